"""From dataclass fields to command-line flags, and a parser that raises instead of ending the process.

The flags of a model are the fields of Megatron's own config classes: their names, types, defaults and, where a field carries
one, the spelling that Megatron-LM gives it. So a flag that Megatron adds is known here without being written down again.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from fgoffload.errors import ConfigError

LONGEST_PATTERN = 10_000
"""Elements. A layer pattern such as `[0]*1+[1]*3` may be this long; the deepest models have a few hundred layers."""


NEAREST_CUTOFF = 0.75
"""From 0 to 1, as `difflib` measures. `--num-layer` is 0.96 near to `--num-layers`; below 0.75 the hint misleads."""

_PARSED_AT_ONCE = 200
"""Words, and those up to the next flag. Fewer cost more, since each part looks at the defaults of all flags."""

_VALUE_THAT_BEGINS_WITH_MINUS = re.compile(r"-\.?\d")
"""`-1e-3` and `-1MiB` are values that are out of range, not flags; argparse knows `-1` and `-.5` alone."""


def whole_number(text: str) -> int:
    """Return the whole number that `text` is, for argparse: decimal digits, without the `_` and blanks that Python takes."""
    # The length: Python refuses to read thousands of digits, and no flag has a use for a hundred.
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number. Give one, as in 4.")
    return int(text)


def number(text: str) -> float:
    """Return the finite number that `text` is, for argparse."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number. Give one, as in 0.1 or 1e-4.")
    return value


def layer_pattern(text: str) -> int | list[int]:
    """Return the number or the list that `text` is: `2`, `[0,1,1]`, `([0]*1+[1]*3)*2`.

    Lists are computed from literals, `+` and `*` alone: nothing in `text` is run.
    """
    try:
        pattern: int | list[int] = _compute(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number nor a list of them. Write it as in 2 or [0]*1+[1]*3."
        ) from None
    return pattern


def _compute(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        elements = [_compute(element) for element in node.elts]
        if all(isinstance(element, int) for element in elements):
            return elements
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right):
            if isinstance(left, list):
                _check_length(len(left) + len(right))
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(right, int):
            if isinstance(left, list):
                _check_length(len(left) * right)
            return left * right
    raise ValueError("not a number or a list of them")


def _check_length(length: int) -> None:
    if not 0 < length <= LONGEST_PATTERN:
        raise ValueError("an empty list, or one too long for a model")


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return a type for argparse that accepts `choices` alone."""

    def choice(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of: {', '.join(choices)}. Give one of them.")
        return text

    return choice


def size_pair(text: str) -> tuple[int, int]:
    """Return the two whole numbers that `text` is, as in `128,0` or `(128,0)`."""
    parts = text.strip("()").split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two whole numbers. Write them as in 128,0.")
    return whole_number(parts[0]), whole_number(parts[1])


class FlagParser(argparse.ArgumentParser):
    """A parser for flags from a file or a command line: it raises ConfigError and never prints nor exits."""

    def __init__(self, *, source: str, known_elsewhere: Collection[str] = ()) -> None:
        """Make a parser without flags.

        Args:
            source: Where the words come from, for errors.
            known_elsewhere: Flags that something else reads from the same place, to be suggested for one typed wrongly.
        """
        # Absent flags leave no attribute, so that a config class keeps its own default. Abbreviations would hide typing errors.
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.source = source
        self._known_elsewhere = tuple(known_elsewhere)
        self._negative_number_matcher = _VALUE_THAT_BEGINS_WITH_MINUS

    def parse_flags(self, words: Sequence[str], *, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the values of the flags in `words`; a flag that is absent has no entry unless it has a default.

        Raises:
            ConfigError: A flag is unknown, lacks its value, or has one that it cannot have.
        """
        values, unknown = self.parse_known_args(list(words), argparse.Namespace(**(earlier or {})))
        if unknown:
            self._refuse_unknown(unknown[0])
        return vars(values)

    # argparse's own signature takes further forms, for subclasses of Namespace.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the values of the flags in `args`, and the words that are none of them.

        Done part by part: argparse copies what is left of the words at each flag, and so takes minutes for 100,000 of them.
        """
        values, unknown = namespace or argparse.Namespace(), []
        for part in _split_at_flags(args):
            values, left = super().parse_known_args(part, values)
            unknown += left
        return values, unknown

    def find_given(self, words: Sequence[str]) -> dict[str, str]:
        """Return the flags that `words` gives, in all their spellings, with the names of their fields."""
        actions = self._option_string_actions
        given = {actions[flag].dest for flag in (word.partition("=")[0] for word in words) if flag in actions}
        return {flag: action.dest for flag, action in actions.items() if action.dest in given}

    def find_nearest(self, flag: str) -> str | None:
        """Return the known flag that `flag` may have been meant to be, or None where none is near."""
        known = (*self._option_string_actions, *self._known_elsewhere)
        return next(iter(difflib.get_close_matches(flag, known, n=1, cutoff=NEAREST_CUTOFF)), None)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as a ConfigError."""
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        if rest.startswith("expected"):
            rest = f"{rest}. Give it after the flag, as in {flag.partition('/')[0]} VALUE."
        prefix = "ignored explicit argument "
        if rest.startswith(prefix):
            flag, rest = flag.partition("/")[0], f"takes no value, but has {rest.removeprefix(prefix)}. Leave it out."
        raise ConfigError(f"{self.source}: {flag} {rest}" if rest else f"{self.source}: {message}")

    def _refuse_unknown(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{self.source}: {word!r} stands where a flag should. Flags begin with --.")
        nearest = self.find_nearest(flag)
        hint = "Leave it out." if nearest is None else f"Did you mean {nearest}?"
        raise ConfigError(f"{self.source}: {flag} is an unknown flag. {hint}")


def _split_at_flags(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield `words` in parts, at least one, that begin with a flag. What follows a `--` is one with it: there are no flags."""
    begin = 0
    for index, word in enumerate(words):
        if word == "--":
            break
        # A blank in a word may make it a value.
        if index - begin >= _PARSED_AT_ONCE and word.startswith("--") and " " not in word:
            yield list(words[begin:index])
            begin = index
    yield list(words[begin:])


def add_field_flags(
    parser: argparse.ArgumentParser,
    config_class: type,
    *,
    leave_out: Collection[str] = (),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Add a flag for each field of `config_class` that can be typed on a command line.

    A boolean field gets `--name` and `--no-name`; a field that carries Megatron-LM's spelling gets that one instead.
    """
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if field.name in leave_out or field.name.startswith("_"):
            continue
        spelled = field.metadata.get("argparse_meta", {}).get("arg_names", [])
        flags = [*(spelled or [to_flag(field.name)]), *(aliases or {}).get(field.name, ())]
        if hints[field.name] in (bool, typing.Optional[bool]):  # noqa: UP045 (the hint itself is compared)
            if spelled:
                parser.add_argument(*flags, dest=field.name, action="store_const", const=not field.default)
            else:
                parser.add_argument(*flags, dest=field.name, action=argparse.BooleanOptionalAction)
        elif (options := _find_options(hints[field.name])) is not None:
            parser.add_argument(*flags, dest=field.name, **options)


def to_flag(field_name: str) -> str:
    """Return the flag of a field: `num_layers` becomes `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def name_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return `message` with the flag in place of each field that it names.

    Args:
        message: Of an error that speaks of fields of dataclasses, to somebody who typed flags.
        flags: By field, the flag with `_` for `-`.
    """
    return re.sub(rf"\b({'|'.join(flags)})\b", lambda match: to_flag(flags[match[0]]), message)


class _StoreOneOrMore(argparse.Action):
    """Stores one value as itself and several as a list, for fields that are a value or a list of them."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _find_options(hint: Any) -> dict[str, Any] | None:
    """Return how argparse reads a field of type `hint`, or None where it cannot be typed."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = [member for member in (typing.get_args(hint) if is_union else (hint,)) if member is not types.NoneType]
    elements = [typing.get_args(member)[0] for member in members if typing.get_origin(member) is list]
    singles = [member for member in members if typing.get_origin(member) is not list]
    if elements and int in singles:
        return {"type": layer_pattern}
    if elements and (read := _find_reader(elements[0])) is not None:
        return {"type": read, "nargs": "+", "action": _StoreOneOrMore} if singles else {"type": read, "nargs": "*"}
    if singles and (read := _find_reader(singles[0])) is not None:
        return {"type": read}
    return None


def _find_reader(kind: Any) -> Callable[[str], Any] | None:
    readers: dict[Any, Callable[[str], Any]] = {int: whole_number, float: number, str: str}
    if kind in (int, float, str):
        return readers[kind]
    if typing.get_origin(kind) is typing.Literal:
        return one_of(typing.get_args(kind))
    if typing.get_origin(kind) is tuple and typing.get_args(kind) == (int, int):
        return size_pair
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        find = one_of(kind.__members__)
        return lambda text: kind[find(text)]
    return None
