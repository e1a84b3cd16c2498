"""Converts frozen dataclasses to JSON and back, based on the types of their fields.

Fields can be numbers, strings, booleans, enums (stored by value), other frozen dataclasses, tuples of these, mappings with
string keys, and None if the type allows it.
"""

import dataclasses
import difflib
import enum
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import FASTEST_PER_S

T = TypeVar("T")

LONGEST_S = 1e6
"""Maximum measured time, in seconds: the solver cannot handle much longer times."""

MOST_BYTES = 1e15
"""Maximum value of a field in bytes: a petabyte."""

_MOST: Mapping[str, float] = {"_per_s": FASTEST_PER_S, "_s": LONGEST_S, "_bytes": MOST_BYTES, "_part": 1.0}
"""Maximum values of fields, keyed by the suffix of the field's name, which gives the unit."""


def to_json_value(value: Any) -> Any:
    """Convert `value` to JSON types: objects, lists, strings, numbers and null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: to_json_value(one) for key, one in value.items()}
    return [to_json_value(one) for one in value] if isinstance(value, (tuple, list)) else value


def read_json_value(kind: type[T], value: Any, *, source: str) -> T:
    """Convert `value`, parsed from JSON, to an instance of `kind`. If a field is invalid, raise a ConfigError that names it."""
    try:
        return _read_object(kind, value, "")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def check_fields(kind: type, value: Any, place: str) -> dict[str, Any]:
    """Return the fields of the JSON object `value`. Reject unknown fields and missing required ones; do not check types."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is {_shorten(value)}. Use an object with the fields of {kind.__name__}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Its fields are: {', '.join(fields)}."
            raise ConfigError(f"{place} has no field {key!r}. {hint}")
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not has_default and value.get(name) is None:
            raise ConfigError(f"{place} lacks {name!r}. Add it.")
    return dict(value)


def _read_object(kind: type[T], value: Any, where: str) -> T:
    """Build a `kind` instance from the value at path `where`, such as `ranks[0].chunks[1]`, or "" for the whole document."""
    place = where or "the document"
    fields = check_fields(kind, value, place)
    hints = typing.get_type_hints(kind)
    found = {name: _read(hints[name], one, f"{where}.{name}".lstrip(".")) for name, one in fields.items()}
    try:
        return kind(**found)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        return _read(next(one for one in inner if one is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {_shorten(value)}. Use a list.")
        return tuple(_read(inner[0], one, f"{where}[{index}]") for index, one in enumerate(value))
    if origin is not None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {_shorten(value)}. Use an object.")
        return {key: _read(inner[1], one, f"{where}[{key!r}]") for key, one in value.items()}
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, where)  # type: ignore[arg-type]
    return _read_scalar(kind, value, where)


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        values = [member.value for member in kind]
        if value not in values:
            raise ConfigError(f"{where} is {_shorten(value)}. Use one of: {', '.join(map(str, values))}.")
        return kind(value)
    if kind is float:
        # A bool is an int in Python. Compare before converting: a float cannot hold an int of hundreds of digits.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"{where} is {_shorten(value)}. Use a finite number of at least 0.")
        _check_most(value, where)
        return float(value)
    if kind is int:
        if type(value) is not int or value < 0:
            raise ConfigError(f"{where} is {_shorten(value)}. Use a whole number of at least 0.")
        _check_most(value, where)
        return value
    if type(value) is not kind:
        raise ConfigError(f"{where} is {_shorten(value)}. Use {'text' if kind is str else 'true or false'}.")
    return value


def _check_most(value: float, where: str) -> None:
    most = next((most for unit, most in _MOST.items() if where.endswith(unit)), sys.maxsize)
    if value > most:
        raise ConfigError(f"{where} is {_shorten(value)}, above the maximum of {most:g}. Measure again.")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
