"""Splits a bash script into words and expands them, without running anything.

`split_script` returns words and operators in order. `Variables` holds the assignments of a script, and expands words as bash
does: quotes, `$NAME`, `${NAME:-default}`, `${ARRAY[@]}` and `$(( ))`. Commands that would have to be run, and unknown
variables, are left as written.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from fgoffload.errors import ConfigError

_LARGEST_EXPANSION = 16 * 1024 * 1024
"""Most characters of all variables of a script. A line such as `X="$X$X"` doubles them."""
_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-?|>>|>&|<&|&>|[|&;<>()]")
_DOCUMENT = re.compile(r"[ \t]*['\"]?(\w+)")
_PLAIN = re.compile(r"[^\s\"'\\$`|&;<>()]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_EXPANSION = re.compile(r"(?P<name>\w+|[@*])(?:(?P<array>\[[@*]\])|(?P<operator>:?[-=+])(?P<word>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


class Piece(NamedTuple):
    """A part of a word."""

    kind: str
    """`plain`, `quoted`, `double` with its pieces in `inner`, `variable`, `arithmetic`, `command`, or `array` of words."""
    text: str
    """Text between the quotes or brackets."""
    inner: tuple["Piece | Word", ...] = ()


class Word(NamedTuple):
    """A word and its pieces."""

    pieces: tuple[Piece, ...]
    line: int
    """Number of the line, from 1."""

    @property
    def plain(self) -> str:
        """Text of a word without quotes and expansions; empty for other words."""
        return self.pieces[0].text if len(self.pieces) == 1 and self.pieces[0].kind == "plain" else ""


class Operator(NamedTuple):
    """Separator of words: `;`, the end of a line, `&&`, a redirection or similar."""

    text: str
    line: int


def split_script(text: str, source: str) -> list[Word | Operator]:
    """Return the words and operators of `text`, without comments, continuations and here-documents.

    Raises:
        ConfigError: A quote or bracket is not closed. Names its line.
    """
    return _Scanner(text, source).scan()


class _Scanner:
    def __init__(self, text: str, source: str, *, line: int = 1) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._line = line
        self._documents: list[str] = []
        """End markers of the here-documents after the current line."""

    def scan(self, *, in_array: bool = False) -> list[Word | Operator]:
        first = self._line
        items: list[Word | Operator] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\n":
                items.append(Operator("\n", self._line))
                self._move(1)
                self._skip_documents()
            elif character.isspace() or self._text.startswith("\\\n", self._at):
                self._move(1 if character.isspace() else 2)
            elif character == "#":
                end = self._text.find("\n", self._at)
                self._move((len(self._text) if end < 0 else end) - self._at)
            elif in_array and character == ")":
                self._move(1)
                return items
            elif match := _OPERATOR.match(self._text, self._at):
                items.append(Operator(match.group(), self._line))
                self._move(len(match.group()))
                if match.group().startswith("<<") and match.group() != "<<<":
                    name = _DOCUMENT.match(self._text, self._at)
                    self._documents += [name[1]] if name else []
            else:
                items.append(self._scan_word())
        if in_array:
            raise self._refuse("the array that begins here has no end. Close it with )", first)
        return items

    def _scan_word(self) -> Word:
        line = self._line
        pieces: list[Piece] = []
        while self._at < len(self._text):
            character, rest = self._text[self._at], self._text[self._at : self._at + 2]
            if character == "(" and len(pieces) == 1 and _ASSIGNMENT.fullmatch(pieces[0].text):
                self._move(1)
                words = self.scan(in_array=True)
                pieces.append(Piece("array", "", tuple(one for one in words if isinstance(one, Word))))
            elif character.isspace() or rest == "\\\n" or _OPERATOR.match(character):
                break
            elif character in "\"'\\$`":
                pieces.append(self._scan_piece())
            else:
                match = _PLAIN.match(self._text, self._at)
                text = match.group() if match else character
                self._move(len(text))
                pieces.append(Piece("plain", text))
        return Word(tuple(pieces), line)

    def _scan_piece(self) -> Piece:
        """Scan a quote, an escape or an expansion."""
        character = self._text[self._at]
        if character == "'":
            return Piece("quoted", self._take_until("'", "a quote that is not closed"))
        if character == "\\":
            self._move(2)
            return Piece("quoted", self._text[self._at - 1 : self._at])
        if character == '"':
            return self._scan_double()
        return self._scan_expansion()

    def _scan_double(self) -> Piece:
        first = self._line
        self._move(1)
        pieces: list[Piece] = []
        while self._at < len(self._text):
            character, following = self._text[self._at], self._text[self._at + 1 : self._at + 2]
            if character == '"':
                self._move(1)
                return Piece("double", "", tuple(pieces))
            if character == "\\" and following in ("$", "`", '"', "\\", "\n"):
                pieces.append(Piece("quoted", "" if following == "\n" else following))
                self._move(2)
            elif character in "$`":
                pieces.append(self._scan_expansion())
            else:
                match = _QUOTED.match(self._text, self._at)
                pieces.append(Piece("quoted", match.group() if match else character))
                self._move(len(pieces[-1].text))
        raise self._refuse("a quote that is not closed", first)

    def _scan_expansion(self) -> Piece:
        for opened, closed, kind in (("$((", "))", "arithmetic"), ("$(", ")", "command"), ("${", "}", "variable")):
            if self._text.startswith(opened, self._at):
                self._move(len(opened))
                return Piece(kind, self._take_brackets(opened[-1], closed))
        if self._text[self._at] == "`":
            return Piece("command", self._take_until("`", "a command substitution that is not closed"))
        match = _NAME.match(self._text, self._at)
        self._move(len(match.group()) if match else 1)
        return Piece("variable", match[1]) if match else Piece("quoted", "$")

    def _take_brackets(self, opened: str, closed: str) -> str:
        """Return the text up to the matching closing bracket, with nested brackets."""
        begin, first, depth = self._at, self._line, 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if depth == 0 and self._text.startswith(closed, self._at):
                self._move(len(closed))
                return self._text[begin : self._at - len(closed)]
            depth += (character == opened) - (character == closed[0])
            self._move(1)
        raise self._refuse("an expansion that is not closed", first)

    def _take_until(self, end: str, problem: str) -> str:
        place = self._text.find(end, self._at + 1)
        if place < 0:
            raise self._refuse(problem, self._line)
        text = self._text[self._at + 1 : place]
        self._move(len(text) + 2)
        return text

    def _skip_documents(self) -> None:
        while self._documents:
            end = self._documents.pop(0)
            match = re.compile(rf"^\t*{end}$", re.MULTILINE).search(self._text, self._at)
            self._move((match.end() if match else len(self._text)) - self._at)

    def _move(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _refuse(self, problem: str, line: int) -> ConfigError:
        return ConfigError(f"{self._source}, line {line}: {problem}. Argument files are read as bash reads them: close it.")


class Variables:
    """Variables that a script has assigned so far."""

    def __init__(self, source: str, known: Mapping[str, str]) -> None:
        """Start with `known` variables, such as those of the environment."""
        self._source = source
        self._scalars = dict(known)
        self._assigned: set[str] = set()
        """Scalars that the script itself assigned."""
        self._arrays: dict[str, list[str]] = {}
        self._used: set[str] = set()
        self._size = 0
        self._line = 0

    def assign(self, name: str, word: Word, *, appends: bool) -> None:
        """Assign the text after the `=` of `word` to `name`.

        Raises:
            ConfigError: All variables together have too many characters.
        """
        self._line = word.line
        if word.pieces and word.pieces[-1].kind == "array":
            words = [text for one in word.pieces[-1].inner if isinstance(one, Word) for text in self.expand(one)]
            if appends and name in self._arrays:
                self._arrays[name] += words
            else:
                self._arrays[name] = words
            self._used.discard(name)  # an array that includes itself is not used by another
        elif name in self._arrays and appends:
            self._arrays[name][:1] = [self._arrays[name][0] + self.expand_whole(word)] if self._arrays[name] else []
        else:
            self._arrays.pop(name, None)
            self._scalars[name] = (self._scalars.get(name, "") if appends else "") + self.expand_whole(word)
            self._assigned.add(name)
            self._used.discard(name)

    def unset(self, name: str) -> None:
        """Forget `name`."""
        self._scalars.pop(name, None)
        self._assigned.discard(name)
        self._arrays.pop(name, None)

    def find(self, name: str) -> str | None:
        """Return the text of `name`, or None if it is not assigned."""
        return self._scalars.get(name)

    def list_unused(self) -> Iterator[list[str]]:
        """Yield the words of all arrays, and of strings that begin with a flag, that no other word includes."""
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
        done: list[str] = []
        current: str | None = None
        for piece in word.pieces:
            quoted = piece.kind == "double"
            texts, splits = self._expand_piece(piece)
            if splits:
                texts, ends = _split_fields(texts)
            else:
                ends = False
            for place, text in enumerate(texts):
                if place or (ends and current is not None and text == ""):
                    done += [] if current is None else [current]
                    current = None
                if text or quoted or piece.kind in ("quoted", "plain"):
                    current = (current or "") + text
        return done if current is None else [*done, current]

    def expand_whole(self, word: Word, *, unknown: str | None = None) -> str:
        """Return `word` as one string, as in an assignment. An unknown variable becomes `unknown`, or is left as written."""
        return "".join(" ".join(self._expand_piece(piece, unknown=unknown)[0]) for piece in word.pieces)

    def _expand_piece(self, piece: Piece, *, unknown: str | None = None) -> tuple[list[str], bool]:
        """Return the strings of a piece, and whether bash splits them at blanks."""
        if piece.kind in ("plain", "quoted"):
            return [piece.text], False
        if piece.kind == "double":
            texts = [""]
            for one in piece.inner:
                if isinstance(one, Piece):
                    first, *more = self._expand_piece(one, unknown=unknown)[0] or [""]
                    texts[-1] += first
                    texts += more
            return texts, False
        if piece.kind == "variable":
            return self._expand_variable(piece.text, unknown), True
        if piece.kind == "arithmetic":
            return [_compute(self.expand_whole(_scan_text(piece.text, self._source)), self._scalars)], False
        return [f"$({piece.text})" if unknown is None else unknown], False

    def _expand_variable(self, text: str, unknown: str | None) -> list[str]:
        match = _EXPANSION.fullmatch(text)
        name = match["name"] if match else ""
        if match and match["array"] and (name in self._arrays or unknown is not None):
            self._used.add(name)
            return self._count(self._arrays.get(name, []))
        value = self._arrays[name][0] if self._arrays.get(name) else self._scalars.get(name)
        kind = match["operator"] if match else None
        if match and (kind is None or kind[-1] in "-="):
            if value is not None and not match["array"] and (value or kind not in (":-", ":=")):
                self._used.add(name)
                return self._count([value])
            if kind is not None:
                return [self.expand_whole(_scan_text(match["word"], self._source), unknown=unknown)]
        elif match and kind:
            return [self.expand_whole(_scan_text(match["word"], self._source), unknown=unknown)] if value else []
        if match and (value == "" or match["array"]):
            return []
        return [f"${text}" if text.isalnum() else f"${{{text}}}"] if unknown is None else [unknown]

    def _count(self, texts: list[str]) -> list[str]:
        self._size += sum(map(len, texts)) + len(texts)
        if self._size > _LARGEST_EXPANSION:
            raise ConfigError(
                f"{self._source}, line {self._line}: variables expand to more than {_LARGEST_EXPANSION} characters. Write out "
                "their values."
            )
        return texts


def _split_fields(texts: list[str]) -> tuple[list[str], bool]:
    """Return `texts` split at blanks. An empty string at either end marks the boundary of a word."""
    fields: list[str] = []
    for text in texts:
        parts = text.split()
        if parts and text[:1].isspace():
            parts.insert(0, "")
        if parts and text[-1:].isspace():
            parts.append("")
        fields += parts
    return fields, bool(fields) and fields[0] == ""


def _scan_text(text: str, source: str) -> Word:
    """Return `text` as if it were inside double quotes."""
    stripped = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    (word,) = _Scanner('"' + stripped.replace('"', '\\"') + '"', source).scan()
    return word if isinstance(word, Word) else Word((), 1)


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _compute(text: str, scalars: Mapping[str, str]) -> str:
    """Return the result of integer arithmetic, or the text if it cannot be computed."""
    named = re.sub(r"[A-Za-z_]\w*", lambda match: scalars.get(match[0], match[0]), text)
    try:
        return str(_evaluate(ast.parse(named.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({text}))"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(ast.dump(node))
