"""Reads Megatron flags from argument files, which are bash scripts, without running the scripts.

    MODEL_ARGS=(
        --num-layers ${LAYERS:-4}   # a comment
        --hidden-size $((16 * 4))
    )
    torchrun --nproc-per-node 8 pretrain_gpt.py "${MODEL_ARGS[@]}"

The flags are the words after the Python script in the last command that runs one. In a file without such a command, the flags
are the words of all arrays, and of strings that begin with a flag. This module supports assignments, arrays, `+=`, `export`,
quotes, variables with defaults, integer arithmetic, and `if` and `[ ] &&` with comparisons of strings or numbers. Everything
else, such as `source` and loops, is skipped. One warning lists the skipped commands and the branches that depend on an
unassigned variable. An unassigned variable is left as written, but counts as empty in a condition.
"""

import itertools
import logging
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.launch_lines import count_gpus, read_header
from fgoffload.integrations.megatron.flags.shell_words import Variables, Word, split_script
from fgoffload.text_files import read_text_file

logger = logging.getLogger(__name__)

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=")
_BLOCKS: Mapping[str, str] = {"if": "fi", "while": "done", "for": "done", "until": "done", "case": "esac", "{": "}"}
"""Closing word of each kind of block, keyed by its opening word."""
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_OPENERS = frozenset({"if", "then", "elif", "else", "do", "while", "until", "!"})
"""Words after which a new command begins."""
_ENDS = frozenset({"\n", ";", ";;", "&", "&&", "||", "|"})
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}

_CHANGES = re.compile(r"\.(py|sh)$|^(source|\.|eval|read|mapfile|sbatch)$")
"""Matches words that mark a command as one that may change flags."""
_AFTER_FLAGS = re.compile(r"\d?>|[|&;]")
"""Matches the first word after the flags of a command that is given as a string, such as `2>&1`."""
_BRACKETS = {"[": "]", "[[": "]]"}


def read_argument_file(path: Path, *, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the flags in the bash file at `path`, in order. See `read_script_file`."""
    return read_script_file(path, variables=variables).flags


def read_script_file(path: Path, *, variables: Mapping[str, str] | None = None) -> "Script":
    """Return the flags and variables in the bash file at `path`, and warn about skipped commands.

    Args:
        path: Bash file.
        variables: Initial values of variables. Pass `os.environ` to read the file as bash does.

    Raises:
        ConfigError: The file cannot be read, has an unclosed quote, bracket or block, or contains no flags.
    """
    text = read_text_file(path, name=f"argument file {path}", fix="Use a bash file with Megatron flags in arrays.")
    script = Script(text, source=str(path), variables=variables)
    if script.skipped:
        logger.warning("%s: fgoffload does not run the file and skipped these commands: %s.", path, ", ".join(script.skipped))
    return script


class Script:
    """Reads the flags and variables of the bash script `text`.

    Raises:
        ConfigError: A quote, bracket or block is not closed, or the script has no flags.
    """

    def __init__(self, text: str, *, source: str, variables: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._header, known = read_header(text)
        self._launch: list[str] | None = None
        """Words before the Python script in the last command that runs one."""
        self._launched: list[str] = []
        """Flags after the Python script in that command."""
        self._variables = Variables(source, {**known, **(variables or {})})
        self.skipped: list[str] = []
        """Skipped commands that may change flags, each with its line number."""
        self._read(split_script(text, source))
        for command in [] if self._launched else self._variables.list_texts():  # sbatch and srun accept a command as a string
            self._read_launch(command.split())
        self.flags = tuple(self._launched or [word for words in self._variables.list_unused() for word in words])
        """Megatron's flags, in order."""
        self.skipped += dict.fromkeys(f"{word} ...)" for word in self.flags if word.startswith("$("))
        self.is_launch = self._launch is not None
        """Whether the script launches training, rather than only defining flags."""
        if not self.flags:
            raise ConfigError(f"{source} has no array of flags. Add one, for example MODEL_ARGS=( --num-layers 4 ).")

    def find_num_gpus(self) -> int | None:
        """Return the number of GPUs from the launch command or `#SBATCH` lines, else from NUM_GPUS, else None."""
        launched = count_gpus(self._launch or (), self._header)
        word = self._variables.find("NUM_GPUS")
        if launched is not None or not word or "$" in word:  # such as NUM_GPUS=$N, where N is not set
            return launched
        if not word.isdecimal():
            raise ConfigError(f"{self._source}: NUM_GPUS={word} is not a whole number. Use one, for example NUM_GPUS=1024.")
        return int(word)

    def _read(self, items: Sequence[Word]) -> None:
        for command in self._split_commands(items):
            first = command[0]
            if first.plain == "if":
                self._read_branches(first, _split_branches(command))
            elif first.plain in _BRACKETS:
                self._read_branches(first, _split_list(command))
            elif not first.operator and (first.plain in _BLOCKS or [one.operator for one in command[1:2]] == ["("]):
                self._skip(command, first.plain)
            elif not first.operator and (words := list(_drop_redirections(command))):
                self._read_command(words)

    def _read_command(self, words: list[Word]) -> None:
        first, rest = words[0], words[1:]
        if first.plain in _DECLARATIONS:
            for word in rest:
                self._assign(word)
        elif self._assign(first):
            if rest:  # NAME=value before a command
                self._read_command(rest)
        elif not self._read_launch([text for word in words for text in self._variables.expand(word)]):
            self._skip(words, self._variables.expand_whole(first))

    def _read_launch(self, texts: Sequence[str]) -> bool:
        """Store the flags after the Python script in a command. Return whether there are any."""
        # `bash -c` takes its command as one word.
        words = zip(("", *texts), texts, strict=False)
        texts = [one for before, text in words for one in (text.split() if re.fullmatch("-[a-z]*c", before) else [text])]
        script = next((place for place, text in enumerate(texts) if text.endswith((".py", "PRETRAIN_EXE}"))), None)
        if script is None or not any(text.startswith("--") for text in texts[script:]):
            return False
        self._launch = texts[:script]
        flags = itertools.takewhile(lambda text: not _AFTER_FLAGS.match(text), texts[script + 1 :])
        self._launched = [text.strip("'\"").replace("\\", "") for text in flags]  # unquoted, as by `eval`
        return True

    def _assign(self, word: Word) -> bool:
        match = _find_assignment(word)
        if match is None:
            return False
        rest = word.pieces[0]._replace(text=word.pieces[0].text[match.end() :])
        value = Word((rest, *word.pieces[1:]), word.line)
        self._variables.assign(match["name"], value, appends=bool(match["append"]))
        return True

    def _read_branches(self, first: Word, branches: Iterable[tuple[Sequence[Word], Sequence[Word]]]) -> None:
        """Read the first branch whose condition holds, unless an earlier condition cannot be evaluated."""
        reason = ""
        skipped = [first]
        is_open = True
        for condition, body in branches:
            holds = self._test(condition) if is_open else False
            unknown = next((text for text in map(self._variables.expand_whole, condition) if "$" in text), "")
            if is_open and (unknown or holds is None):
                reason = reason or f"if {unknown}".strip()
            is_open = is_open and holds is False
            if holds:
                self._read(body)
            else:
                skipped += body
        if reason:
            self._skip(skipped, reason)

    def _test(self, condition: Sequence[Word]) -> bool | None:
        """Return whether a condition holds, or None if it cannot be evaluated. Unassigned variables are empty."""
        result: bool | None = True
        decisive = False
        for is_operator, group in itertools.groupby(condition, lambda one: bool(one.operator)):
            words = list(group)
            if is_operator:
                joins = [word.operator for word in words if word.operator in ("&&", "||")]
                decisive = joins[-1] == "||" if joins else decisive
                continue
            both = (result, self._test_one(words))
            result = decisive if decisive in both else (None if None in both else not decisive)
        return result

    def _test_one(self, words: list[Word]) -> bool | None:
        if words[-1].plain != _BRACKETS.get(words[0].plain, ""):
            return None
        texts = [self._variables.expand_whole(word, unknown="") for word in words[1:-1]]
        negated = bool(texts) and texts[0] == "!"
        match texts[negated:]:
            case ["-n" | "-z" as test, *rest] if len(rest) < 2:
                holds: bool | None = any(rest) == (test == "-n")
            case [left, "=" | "==", right]:
                holds = left == right
            case [left, "!=", right]:
                holds = left != right
            case [left, comparison, right] if comparison in _COMPARISONS and left.isdecimal() and right.isdecimal():
                holds = _COMPARISONS[comparison](int(left), int(right))
            case _:
                holds = None
        return holds if holds is None or not negated else not holds

    def _split_commands(self, items: Sequence[Word]) -> Iterator[list[Word]]:
        """Yield each command. A block, with all its contents, is one command."""
        command: list[Word] = []
        ends: list[str] = []
        for item in items:
            if item.operator in _ENDS and not ends:
                if _is_within_list(command, item):
                    command += [] if item.operator == "\n" else [item]
                elif command:
                    yield command
                    command = []
                continue
            is_first = _begins_command(command[-1:])
            command.append(item)
            if is_first and ends and item.plain == ends[-1]:
                ends.pop()
            elif is_first and item.plain in _BLOCKS:
                ends.append(_BLOCKS[item.plain])
        if ends:
            raise ConfigError(
                f"{self._source}, line {command[0].line}: the block that begins here is not closed. Close it with {ends[-1]}."
            )
        if command:
            yield command

    def _skip(self, command: Sequence[Word], name: str) -> None:
        """Record a skipped command if it may assign a variable, or source or run a script."""
        if any(_find_assignment(item) or _CHANGES.search(item.plain) for item in command):
            self.skipped.append(f"{name[:40]} (line {command[0].line})")


def _drop_redirections(command: Sequence[Word]) -> Iterator[Word]:
    """Yield the words of a command without redirections, such as `2>&1` and `> log`."""
    last = Word((), 0)
    for before, item, behind in zip((last, *command), command, (*command[1:], last), strict=False):
        is_target = before.operator.startswith(("<", ">", "&"))
        is_descriptor = item.plain.isdigit() and behind.operator.startswith(("<", ">"))
        if not item.operator and not is_target and not is_descriptor:
            yield item


def _split_branches(command: Sequence[Word]) -> Iterator[tuple[Sequence[Word], Sequence[Word]]]:
    """Yield the condition and the body of each branch of an `if`. `else` has an empty condition, which always holds."""
    parts: list[tuple[str, list[Word]]] = []
    depth = 0
    for place, item in enumerate(command):
        name = item.plain if _begins_command(command[:place][-1:]) else ""
        depth += (name == "if") - (name == "fi")
        if depth == 1 and name in ("if", "then", "elif", "else"):
            parts.append((name, []))
        elif depth:
            parts[-1][1].append(item)
    for (kind, condition), (_, body) in itertools.pairwise(parts):
        if kind in ("if", "elif"):
            yield condition, body
    if parts[-1][0] == "else":
        yield (), parts[-1][1]


def _is_within_list(command: Sequence[Word], item: Word) -> bool:
    """Return whether `[ condition ] && command` continues after the operator `item`."""
    begins = bool(command) and command[0].plain in _BRACKETS
    return begins and (item.operator in ("&&", "||") or bool(command[-1].operator))


def _split_list(command: Sequence[Word]) -> Iterator[tuple[Sequence[Word], Sequence[Word]]]:
    """Yield the branches of `[ condition ] && command || command`, as if it were an `if`."""
    joins = {place: item.operator for place, item in enumerate(command) if item.operator in ("&&", "||")}
    for place, following in ((place, command[place + 1]) for place in joins if place + 1 < len(command)):
        if not following.operator and following.plain not in _BRACKETS:
            other = next((one for one, text in joins.items() if one >= place and text == "||"), len(command))
            yield command[:place], command[place + 1 : other]
            yield (), command[other + 1 :]
            return


def _begins_command(before: Sequence[Word]) -> bool:
    return not before or bool(before[-1].operator) or before[-1].plain in _OPENERS


def _find_assignment(word: Word) -> re.Match[str] | None:
    is_plain = bool(word.pieces) and word.pieces[0].kind == "plain"
    return _ASSIGNMENT.match(word.pieces[0].text) if is_plain else None
