"""Derives command-line flags from the fields of Megatron's config classes, and defines a parser that raises instead of exiting.

The fields define names, types, defaults and spellings, so this module supports new Megatron flags without changes.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.flag_sources import add_source
from fgoffload.integrations.megatron.flags.other_flags import DECIDED_BY_PLAN

_LONGEST_PATTERN = 10_000
"""Maximum length of a layer pattern such as `[0]*1+[1]*3`. The deepest models have a few hundred layers."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_NEAREST_CUTOFF = 0.75
"""Minimum similarity of a suggested flag, from 0 to 1 as in `difflib`. Less similar suggestions would mislead."""

_VALUE_THAT_BEGINS_WITH_MINUS = re.compile(r"-\.?\d")
"""Matches values such as `-1e-3` and `-1MiB`. By default, argparse treats them as flags, although it accepts `-5`."""


def whole_number(text: str) -> int:
    """Parse an integer for argparse. Reject `_`, whitespace and more than 100 digits, which `int` accepts."""
    if re.fullmatch(r"[+-]?[0-9]{1,100}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number. Use one, for example 4.")
    return int(text)


def number(text: str) -> float:
    """Parse a finite number for argparse."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number. Use one, for example 0.1 or 1e-4.")
    return value


def layer_pattern(text: str) -> int | list[int]:
    """Parse an integer or a list of integers for argparse, such as `2`, `[0,1,1]` or `([0]*1+[1]*3)*2`. See `compute`."""
    try:
        pattern: int | list[int] = compute(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number nor a list of whole numbers. Use a value such as 2 or [0]*1+[1]*3."
        ) from None
    return pattern


def compute(node: ast.expr) -> Any:
    """Evaluate an expression of integers and lists of integers, without running code.

    Raises:
        ValueError: The expression contains anything else, or a list is empty or too long.
        TypeError: An operator does not support its operands.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -compute(node.operand)
    if isinstance(node, ast.List):
        elements = [compute(element) for element in node.elts]
        if all(isinstance(element, int) for element in elements):
            return elements
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        operation, operands = _OPERATIONS[type(node.op)], (compute(node.left), compute(node.right))
        sizes = [len(one) if isinstance(one, list) else one for one in operands]
        if any(isinstance(one, list) for one in operands) and not 0 < operation(*sizes) <= _LONGEST_PATTERN:
            raise ValueError("the list is empty or too long for a model")
        return operation(*operands)
    raise ValueError("neither an integer nor a list of integers")


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts only `choices`."""

    def choice(text: str) -> str:
        if text not in choices:
            near = difflib.get_close_matches(text, choices, n=1, cutoff=0.8)  # bf16 is not a typo for fp16
            hint = f" Did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not supported.{hint} Use one of: {', '.join(choices)}.")
        return text

    return choice


def size_pair(text: str) -> tuple[int, int]:
    """Parse two integers for argparse, such as `128,0` or `(128,0)`."""
    parts = text.strip("()").split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair of whole numbers. Use one, for example 128,0.")
    return whole_number(parts[0]), whole_number(parts[1])


class FlagParser(argparse.ArgumentParser):
    """Parses flags from a file or a command line. Raises ConfigError instead of printing or exiting.

    Errors begin with `source` (see `add_source`). Typo suggestions include flags in `known_elsewhere`, which other code parses.
    """

    def __init__(self, *, source: str, known_elsewhere: Collection[str] = ()) -> None:
        # Absent flags set no attribute, so config classes apply their defaults. Abbreviations would hide typos.
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self.source = source
        self._known_elsewhere = tuple(known_elsewhere)
        self._negative_number_matcher = _VALUE_THAT_BEGINS_WITH_MINUS

    def parse_flags(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the flags in `words`. An absent flag has no entry unless it has a default.

        Raises:
            ConfigError: A flag is unknown, lacks its value, or has an invalid value.
        """
        values, unknown = self.parse_known_args(list(words))
        if unknown:
            self._refuse_unknown(unknown[0])
        return vars(values)

    def find_given(self, words: Sequence[str]) -> dict[str, str]:
        """Return the field name of each flag in `words`, keyed by every spelling of the flag."""
        actions = self._option_string_actions
        given = {actions[flag].dest for flag in (word.partition("=")[0] for word in words) if flag in actions}
        return {flag: action.dest for flag, action in actions.items() if action.dest in given}

    def find_nearest(self, flag: str) -> str | None:
        """Return the known flag most similar to `flag`, or None. If two are about equally similar, prefer offload flags."""
        known = (*self._option_string_actions, *self._known_elsewhere)
        near = difflib.get_close_matches(flag, known, n=2, cutoff=_NEAREST_CUTOFF)
        scores = {one: difflib.SequenceMatcher(None, one, flag).ratio() + 0.05 * (one in DECIDED_BY_PLAN) for one in near}
        return max(near, key=lambda one: scores[one], default=None)

    def error(self, message: str) -> NoReturn:
        """Raise an argparse error as a ConfigError."""
        flag, _, rest = message.removeprefix("argument ").partition(": ")
        if rest.startswith("expected"):
            rest = f"{rest}. Use {flag.partition('/')[0]} VALUE."
        prefix = "ignored explicit argument "
        if rest.startswith(prefix):
            flag, rest = flag.partition("/")[0], f"takes no value, but has {rest.removeprefix(prefix)}. Remove the value."
        if rest.startswith("'$"):
            rest = "is computed in a way that fgoffload does not evaluate, or from an unset variable. Pass a number."
        raise ConfigError(add_source(self.source, f"{flag} {rest}" if rest else message))

    def _refuse_unknown(self, word: str) -> NoReturn:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(add_source(self.source, f"{word!r} is not a flag. Flags begin with --."))
        nearest = self.find_nearest(flag)
        hint = "Remove it." if nearest is None else f"Did you mean {nearest}?"
        raise ConfigError(add_source(self.source, f"{flag} is an unknown flag. {hint}"))


def add_field_flags(
    parser: argparse.ArgumentParser,
    config_class: type,
    *,
    leave_out: Collection[str] = (),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Add a flag for each field of `config_class` whose type can be parsed from text.

    A boolean field gets `--name` and `--no-name`. A field whose metadata has Megatron-LM's spelling gets only that flag.
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
    """Return the flag for a field, such as `--num-layers` for `num_layers`."""
    return "--" + field_name.replace("_", "-")


def name_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace field names with flags in `message`. `flags` maps fields to flags, with `_` for `-`."""
    return re.sub(rf"\b({'|'.join(flags)})\b", lambda match: to_flag(flags[match[0]]), message)


class _StoreOneOrMore(argparse.Action):
    """Stores a single value as is, and several values as a list."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _find_options(hint: Any) -> dict[str, Any] | None:
    """Return argparse options for a field of type `hint`, or None if the type cannot be parsed from text."""
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
