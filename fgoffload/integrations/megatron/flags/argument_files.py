"""Argument files: bash scripts that hold Megatron flags in arrays, read without running them.

    MODEL_ARGS=(
        --num-layers ${LAYERS:-4}   # a comment
        --hidden-size 64
    )

What is read: assignments, arrays, `+=`, `export`, comments, quotes, line continuations, and `$NAME`, `${NAME}`,
`${NAME:-default}`, `${ARRAY[@]}`. Everything else that bash could do is refused with its line, never guessed at and never run.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from fgoffload.errors import ConfigError
from fgoffload.text_files import read_text_file

_TOKEN = re.compile(
    r"""
      (?P<continuation>\\\n)
    | (?P<blank>[ \t\r]+)
    | (?P<end>[\n;])
    | (?P<single>'[^']*')
    | (?P<double>"(?:[^"\\`]|\\.)*")
    | (?P<variable>\$\w+|\$\{[^{}]*\})
    | (?P<escaped>\\.)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<comment>\#[^\n]*)
    | (?P<plain>[^\s;'"\\$`()\#&|<>]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=")
_VARIABLE = re.compile(r"\$(?:(?P<bare>\w+)|\{(?P<name>\w+)(?:(?P<array>\[[@*]\])|(?P<colon>:?)-(?P<default>[^}]*))?\})")
_EXPANSION = re.compile(r"\$[\w{(]")
_IGNORED_COMMANDS = frozenset({"set", "shopt"})
"""They change how bash runs a script, not what its arrays hold."""
_LONGEST_SHOWN = 100
"""Characters of what cannot be read, in an error: a file of bytes may be one long word."""
_LARGEST_EXPANSION = 16 * 1024 * 1024
"""Characters of variables, and words of arrays, that a whole file may take in: `X="$X$X"` doubles with each line."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int
    """From 1."""


class _Word:
    """A word under construction: None until a piece of it has come, since `""` is a word and nothing is none."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def take(self) -> str | None:
        text = "".join(self._pieces) if self._pieces else None
        self._pieces.clear()
        return text


def read_argument_file(path: Path, *, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the flags in the arrays of the bash file at `path`, in the order of the arrays.

    An array that a later one takes in (`ALL=("${MODEL_ARGS[@]}" --lr 1)`) counts once, where it was taken in.

    Args:
        path: The file.
        variables: What `$NAME` means where the file does not say; None knows no other names. Bash would look into the
            environment, so `os.environ` reads the file as bash would.

    Raises:
        ConfigError: The file cannot be read, or holds what this reader does not know; the error names file and line.
    """
    text = read_text_file(path, name=f"argument file {path}", fix="Give a bash file with Megatron flags in arrays.")
    return parse_argument_file(text, source=str(path), variables=variables)


def parse_argument_file(text: str, *, source: str, variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the flags in the arrays of the bash script `text`. See `read_argument_file`.

    Args:
        text: The script.
        source: Where it came from, for errors.
        variables: What `$NAME` means where the script does not say.

    Raises:
        ConfigError: The script holds what this reader does not know, or no array.
    """
    reader = _Reader(source, variables or {})
    for tokens in _split_statements(text, source):
        reader.read_statement(tokens)
    return reader.collect_flags()


class _Reader:
    """What the script has assigned so far."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._scalars = {name: [value] for name, value in variables.items()}
        """In pieces, as `+=` adds them."""
        self._arrays: dict[str, list[str]] = {}
        self._taken_in: set[str] = set()
        self._expanded = 0
        """Characters of variables and words of arrays that were taken in."""

    def collect_flags(self) -> tuple[str, ...]:
        """Return the words of all arrays that no other array took in."""
        if not self._arrays:
            raise ConfigError(f"{self._source} holds no array of flags. Write them as in: MODEL_ARGS=( --num-layers 4 )")
        return tuple(word for name, words in self._arrays.items() if name not in self._taken_in for word in words)

    def read_statement(self, tokens: list[_Token]) -> None:
        """Take in one statement: an assignment, an array, or one that does not matter."""
        first = tokens[0]
        if first.kind == "plain" and first.text in _IGNORED_COMMANDS:
            return
        if first.kind == "plain" and first.text in {"export", "declare", "local", "readonly"}:
            tokens = _strip([token for token in tokens[1:] if not token.text.startswith("-")])
            if not tokens:
                return
            first = tokens[0]
        match = _ASSIGNMENT.match(first.text) if first.kind == "plain" else None
        if match is None:
            self._refuse(first, "a command")
        rest = tokens[1:]
        if match.end() < len(first.text):
            rest = [dataclasses.replace(first, text=first.text[match.end() :]), *rest]
        if rest and rest[0].kind == "open":
            self._assign_array(match, rest)
        else:
            self._assign_scalar(match, rest)

    def _assign_array(self, match: re.Match[str], tokens: list[_Token]) -> None:
        if tokens[-1].kind != "close":
            self._refuse(tokens[-1], f"text after the end of array {match['name']}")
        name, words = match["name"], list(self._split_words(tokens[1:-1]))
        if match["append"] and name in self._arrays:
            self._arrays[name] += words
        else:
            self._arrays[name] = words
        self._taken_in.discard(name)  # an array that takes itself in goes on

    def _assign_scalar(self, match: re.Match[str], tokens: list[_Token]) -> None:
        pieces = []
        for index, token in enumerate(tokens):
            if token.kind == "blank":
                self._refuse(tokens[min(index + 1, len(tokens) - 1)], f"a command after the assignment of {match['name']}")
            pieces.append(self._expand(token))
        earlier = self._scalars.get(match["name"], []) if match["append"] else []
        earlier += pieces
        self._scalars[match["name"]] = earlier

    def _split_words(self, tokens: list[_Token]) -> Iterator[str]:
        """Yield the words of an array, split and unquoted as bash does."""
        word = _Word()
        for token in tokens:
            if token.kind in {"blank", "end"}:
                if (text := word.take()) is not None:
                    yield text
                continue
            array = self._find_array(token)
            if array is not None:
                yield from array
            elif token.kind == "variable":
                # Unquoted, so bash splits the value at blanks: EXTRA="--lr 1" makes two words.
                value = self._expand(token)
                first, *more = value.split() or [""]
                if first:
                    word.add(first)
                for part in more:
                    if (text := word.take()) is not None:
                        yield text
                    word.add(part)
            else:
                word.add(self._expand(token))
        if (text := word.take()) is not None:
            yield text

    def _find_array(self, token: _Token) -> list[str] | None:
        """Return the words of the array that `token` is the whole of, quoted or not, or None."""
        match = _VARIABLE.fullmatch(token.text.strip('"')) if token.kind in {"variable", "double"} else None
        if match is None or not match["array"]:
            return None
        if match["name"] not in self._arrays:
            self._refuse(token, f"array {match['name']}, which is not assigned above,")
        self._taken_in.add(match["name"])
        array = self._arrays[match["name"]]
        self._count_expanded(len(array), token)
        return array

    def _expand(self, token: _Token) -> str:
        """Return what `token` stands for: quotes gone, variables replaced."""
        if token.kind == "single":
            return token.text[1:-1]
        if token.kind == "escaped":
            return token.text[1:]
        if token.kind == "variable":
            return self._expand_variable(_VARIABLE.fullmatch(token.text), token)
        if token.kind == "double":
            return self._expand_quoted(token)
        if token.kind in {"open", "close"}:
            self._refuse(token, "a bracket inside an array (quote it)")
        return token.text

    def _expand_quoted(self, token: _Token) -> str:
        pieces = []
        position = 1
        while position < len(token.text) - 1:
            character = token.text[position]
            if character == "\\" and token.text[position + 1] in '"\\$`\n':
                pieces.append("" if token.text[position + 1] == "\n" else token.text[position + 1])
                position += 2
            elif character == "$" and _EXPANSION.match(token.text, position):
                match = _VARIABLE.match(token.text, position)
                pieces.append(self._expand_variable(match, token))
                position = match.end() if match else position
            else:
                pieces.append(character)
                position += 1
        return "".join(pieces)

    def _expand_variable(self, match: re.Match[str] | None, token: _Token) -> str:
        if match is None or match["array"]:
            self._refuse(token, f"{token.text}, an expansion")
        name = match["bare"] or match["name"]
        # `:-` takes the default for an empty value too, `-` only for a name that is not assigned.
        value = self._find_scalar(name)
        if value is not None and (value or not match["colon"]):
            self._count_expanded(len(value), token)
            return value
        if match["default"] is not None and "$" not in match["default"]:
            return match["default"].strip("\"'")
        raise ConfigError(
            f"{self._source}, line {token.line}: variable ${name} is not assigned above. "
            f"Assign it before its use, or write ${{{name}:-default}}."
        )

    def _find_scalar(self, name: str) -> str | None:
        if name not in self._scalars:
            return None
        pieces = self._scalars[name]
        pieces[:] = ["".join(pieces)]
        return pieces[0]

    def _count_expanded(self, size: int, token: _Token) -> None:
        self._expanded += size
        if self._expanded > _LARGEST_EXPANSION:
            raise ConfigError(
                f"{self._source}, line {token.line}: {token.text} and the variables before it come to more than "
                f"{_LARGEST_EXPANSION} characters. Write out what they hold."
            )

    def _refuse(self, token: _Token, what: str) -> NoReturn:
        _refuse(self._source, token.line, what, token.text)


def _split_statements(text: str, source: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each statement: a line, or an array over several lines."""
    statement: list[_Token] = []
    opened: _Token | None = None
    for token in _tokenize(text, source):
        if token.kind == "open":
            if opened is not None:
                _refuse(source, token.line, "a bracket inside an array (quote it)", token.text)
            opened = token
        elif token.kind == "close" and opened is None:
            _refuse(source, token.line, "a closing bracket without an array", token.text)
        elif token.kind == "close":
            opened = None
        if token.kind == "end" and opened is None:
            if statement := _strip(statement):
                yield statement
            statement = []
        else:
            statement.append(token)
    if opened is not None:
        raise ConfigError(f"{source}, line {opened.line}: the array that begins here has no end. Close it with ).")
    if statement := _strip(statement):
        yield statement


def _strip(statement: list[_Token]) -> list[_Token]:
    start, end = 0, len(statement)
    while start < end and statement[start].kind == "blank":
        start += 1
    while end > start and statement[end - 1].kind == "blank":
        end -= 1
    return statement[start:end]


def _tokenize(text: str, source: str) -> Iterator[_Token]:
    """Yield the pieces of `text`, without comments and line continuations."""
    position, line = 0, 1
    starts_word = True
    while position < len(text):
        if text[position] == "#" and not starts_word:
            # In bash a # inside a word is a part of the word.
            kind, piece = "plain", "#"
        else:
            match = _TOKEN.match(text, position)
            if match is None:
                _refuse(source, line, *_name_unknown(text, position))
            kind, piece = str(match.lastgroup), match.group()
        if kind not in {"comment", "continuation"}:
            yield _Token(kind, piece, line)
        starts_word = kind in {"blank", "end", "open", "continuation"}
        line += piece.count("\n")
        position += len(piece)


def _name_unknown(text: str, position: int) -> tuple[str, str]:
    rest = text[position:]
    for start, what in (("$((", "arithmetic"), ("$(", "command substitution"), ("`", "command substitution")):
        if rest.startswith(start):
            return what, rest.splitlines()[0]
    if rest[0] in "'\"":
        return "a quote that is not closed, or a command substitution inside quotes,", rest.splitlines()[0]
    return "an operator", rest[0]


def _refuse(source: str, line: int, what: str, text: str) -> NoReturn:
    shown = repr(text.strip())
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}..."
    raise ConfigError(
        f"{source}, line {line}: {what} cannot be read: {shown}. Argument files are read, not run: "
        "keep to NAME=value and NAME=( --flag value ) with $NAME, ${NAME} and ${NAME:-default}."
    )
