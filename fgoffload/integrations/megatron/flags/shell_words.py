"""Splits a bash script into words, and expands the words without running the script.

Expansion follows bash for quotes, `$NAME`, `${NAME:-default}`, `${ARRAY[@]}` and `$(( ))`. Command substitutions and unknown
variables stay as written.
"""

import ast
import bisect
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import compute

_BLANK = re.compile(r"([^\S\n]|\\\n)+|#.*")
_OPERATOR = re.compile(r"\n|&&|\|\||;;|<<<|<<-?|>>|>&|<&|&>|[|&;<>()]")
_END = re.compile(r"[\s|&;<>()]|\\\n")
"""Matches what ends an unquoted word."""
_DOCUMENT = re.compile(r"[ \t]*['\"]?(\w+)")
_LITERAL = re.compile(r"(?P<plain>[^\s\"'\\$`|&;<>()]+)|'(?P<single>[^']*)'|\\(?P<escaped>.?)", re.DOTALL)
_IN_DOUBLE = re.compile(r"([^\"\\$`]+|\\(?![$`\"\\\n]))|\\([$`\"\\\n])")
_BACKTICKS = re.compile(r"`([^`]*)`")
_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_EXPANSION = re.compile(r"(?P<name>\w+|[@*])(?:(?P<array>\[[@*]\])|(?P<operator>:?[-=+])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


class Piece(NamedTuple):
    """A part of a shell word."""

    kind: str
    """`plain`, `quoted`, `double` (double quotes, with pieces in `inner`), `variable`, `arithmetic`, `command` or `array`."""
    text: str
    """Text without quotes or brackets."""
    inner: tuple["Piece | Word", ...] = ()


class Word(NamedTuple):
    """A shell word, split into pieces, or a shell operator, which has no pieces."""

    pieces: tuple[Piece, ...]
    line: int
    """Line number, from 1."""
    operator: str = ""
    """Operator such as `;`, `&&`, a newline or a redirection. Empty for a word."""

    @property
    def plain(self) -> str:
        """Return the word's text if it contains no quotes or expansions, otherwise an empty string."""
        return self.pieces[0].text if len(self.pieces) == 1 and self.pieces[0].kind == "plain" else ""


def split_script(text: str, source: str) -> list[Word]:
    """Return the words and operators of `text`, without comments, line continuations and here-documents.

    Raises:
        ConfigError: A quote or bracket is not closed. The message names its line.
    """
    return _Scanner(text, source).scan()


class _Scanner:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._documents: list[str] = []
        """Delimiters of the here-documents that begin after the current line."""

    def scan(self, *, in_array: bool = False) -> list[Word]:
        begin = self._at
        words: list[Word] = []
        while self._at < len(self._text):
            line = self._find_line(self._at)
            if self._take(_BLANK):
                continue
            if in_array and self._text[self._at] == ")":
                self._at += 1
                return words
            if match := self._take(_OPERATOR):
                words.append(Word((), line, match[0]))
                if match[0] == "\n":
                    self._skip_documents()
                elif match[0] in ("<<", "<<-") and (name := _DOCUMENT.match(self._text, self._at)):
                    self._documents.append(name[1])
            else:
                words.append(Word(self._scan_pieces(), line))
        if in_array:
            raise self._refuse("the array that begins here is not closed", begin)
        return words

    def _scan_pieces(self) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        while self._at < len(self._text):
            if self._text[self._at] == "(" and len(pieces) == 1 and _ASSIGNMENT.fullmatch(pieces[0].text):
                self._at += 1
                pieces.append(Piece("array", "", tuple(one for one in self.scan(in_array=True) if not one.operator)))
            elif _END.match(self._text, self._at):
                break
            else:
                pieces.append(self._scan_piece())
        return tuple(pieces)

    def _scan_piece(self) -> Piece:
        if match := self._take(_LITERAL):
            kind = str(match.lastgroup)
            return Piece("plain" if kind == "plain" else "quoted", match[kind])
        if self._text[self._at] == '"':
            return self._scan_double()
        if self._text[self._at] == "'":
            raise self._refuse("a quote is not closed", self._at)
        return self._scan_expansion()

    def _scan_double(self) -> Piece:
        begin = self._at
        self._at += 1
        pieces: list[Piece] = []
        while self._at < len(self._text):
            if match := self._take(_IN_DOUBLE):
                pieces.append(Piece("quoted", match[1] or match[2].strip("\n")))
            elif self._text[self._at] == '"':
                self._at += 1
                return Piece("double", "", tuple(pieces))
            else:
                pieces.append(self._scan_expansion())
        raise self._refuse("a quote is not closed", begin)

    def _scan_expansion(self) -> Piece:
        for opened, closed, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
            if self._text.startswith(opened, self._at):
                self._at += len(opened)
                return Piece(kind, self._take_brackets(opened[-1], closed))
        if match := self._take(_BACKTICKS):
            return Piece("command", match[1])
        if self._text[self._at] == "`":
            raise self._refuse("a command substitution is not closed", self._at)
        if match := self._take(_NAME):
            return Piece("variable", match[1])
        self._at += 1
        return Piece("quoted", "$")

    def _take_brackets(self, opened: str, closed: str) -> str:
        """Return the text up to the matching closing bracket. Brackets can be nested."""
        begin, depth = self._at, 0
        for place in range(begin, len(self._text)):
            if depth == 0 and self._text.startswith(closed, place):
                self._at = place + len(closed)
                return self._text[begin:place]
            depth += (self._text[place] == opened) - (self._text[place] == closed[0])
        raise self._refuse("an expansion is not closed", begin)

    def _skip_documents(self) -> None:
        while self._documents:
            end = re.compile(rf"^\t*{self._documents.pop(0)}$", re.MULTILINE)
            match = end.search(self._text, self._at)
            self._at = match.end() if match else len(self._text)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match

    def _find_line(self, place: int) -> int:
        return bisect.bisect_left(self._newlines, place) + 1

    def _refuse(self, problem: str, place: int) -> ConfigError:
        return ConfigError(f"{self._source}, line {self._find_line(place)}: {problem}. Close it.")


class Variables:
    """Variables that a script has assigned so far, and `known` variables, such as those of the environment."""

    def __init__(self, source: str, known: Mapping[str, str]) -> None:
        self._source = source
        self._scalars = dict(known)
        self._assigned: set[str] = set()
        """Scalars that the script itself assigned."""
        self._arrays: dict[str, list[str]] = {}
        self._used: set[str] = set()
        """Variables that some other word expands."""

    def assign(self, name: str, word: Word, *, appends: bool) -> None:
        """Assign `word`, the text after the `=`, to `name`, or append it if `appends`."""
        if word.pieces and word.pieces[-1].kind == "array":
            words = [text for one in word.pieces[-1].inner if isinstance(one, Word) for text in self.expand(one)]
            if appends and name in self._arrays:
                self._arrays[name] += words
            else:
                self._arrays[name] = words
            self._used.discard(name)  # an array that only extends itself is unused
        elif name in self._arrays and appends:
            self._arrays[name][:1] = [self._arrays[name][0] + self.expand_whole(word)] if self._arrays[name] else []
        else:
            self._arrays.pop(name, None)
            self._scalars[name] = (self._scalars.get(name, "") if appends else "") + self.expand_whole(word)
            self._assigned.add(name)
            self._used.discard(name)

    def find(self, name: str) -> str | None:
        """Return the string value of `name`, or None if it has none."""
        return self._scalars.get(name)

    def list_unused(self) -> Iterator[list[str]]:
        """Yield the words of each array, and of each string that begins with a flag, unless another word expands it."""
        own = {name: text for name, text in self._scalars.items() if name in self._assigned}
        texts = {name: [word for word in text.split() if word[0] != "$" or len(word) == 1] for name, text in own.items()}
        flags = {name: own[name].split() for name, words in texts.items() if words[:1] and words[0].startswith("--")}
        for name, words in {**self._arrays, **flags}.items():
            if name not in self._used:
                yield words

    def list_texts(self) -> list[str]:
        """Return all strings that the script assigned, in the order of their first assignment."""
        return [text for name, text in self._scalars.items() if name in self._assigned]

    def expand(self, word: Word) -> list[str]:
        """Return the words that bash expands `word` to: none for an empty variable, several for an array."""
        # NUL separates words. \1 marks quoted text, so that an empty quoted word remains.
        text = ""
        for piece in word.pieces:
            texts = self._expand_piece(piece)
            if piece.kind == "variable":
                text += "\0".join(re.sub(r"\s+", "\0", one) for one in texts)
            else:
                text += "\0".join(f"\1{one}" for one in texts)
        return [one.replace("\1", "") for one in text.split("\0") if one]

    def expand_whole(self, word: Word, *, unknown: str | None = None) -> str:
        """Return `word` as one string, as in an assignment. `unknown`, if given, replaces unknown variables."""
        return "".join(" ".join(self._expand_piece(piece, unknown=unknown)) for piece in word.pieces)

    def _expand_piece(self, piece: Piece, *, unknown: str | None = None) -> list[str]:
        if piece.kind in ("plain", "quoted"):
            return [piece.text]
        if piece.kind == "double":
            texts = [""]
            for one in piece.inner:
                if isinstance(one, Piece):
                    first, *more = self._expand_piece(one, unknown=unknown) or [""]
                    texts[-1] += first
                    texts += more
            return texts
        if piece.kind == "variable":
            return self._expand_variable(piece.text, unknown)
        if piece.kind == "arithmetic":
            return [_compute(self.expand_whole(_scan_text(piece.text, self._source)), self._scalars)]
        return [f"$({piece.text})" if unknown is None else unknown]

    def _expand_variable(self, text: str, unknown: str | None) -> list[str]:
        as_written = f"${text}" if text.isalnum() else f"${{{text}}}"
        match = _EXPANSION.fullmatch(text)
        if match is None:
            return [as_written if unknown is None else unknown]
        name, operation = match["name"], match["operator"] or ""
        if match["array"]:
            if name in self._arrays or unknown is not None:
                self._used.add(name)
            return self._arrays.get(name, [])
        value = self._arrays[name][0] if self._arrays.get(name) else self._scalars.get(name)
        has_value = bool(value) if operation.startswith(":") or operation == "+" else value is not None
        if operation and has_value == operation.endswith("+"):
            return [self.expand_whole(_scan_text(match["word"], self._source), unknown=unknown)]
        if operation.endswith("+"):
            return []
        if value is not None:
            self._used.add(name)
            return [value]
        return [as_written if unknown is None else unknown]


def _scan_text(text: str, source: str) -> Word:
    """Scan `text` as if it were inside double quotes."""
    stripped = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    (word,) = split_script('"' + stripped.replace('"', '\\"') + '"', source)
    return word


def _compute(text: str, scalars: Mapping[str, str]) -> str:
    """Evaluate integer arithmetic. Return the expansion as written if it cannot be evaluated."""
    named = re.sub(r"[A-Za-z_]\w*", lambda match: scalars.get(match[0], match[0]), text)
    try:
        return str(compute(ast.parse(named.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError):
        return f"$(({text}))"
