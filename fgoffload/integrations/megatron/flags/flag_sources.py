"""Records whether a file or the command line sets each flag, for error messages."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""Source of flags that the user typed. Errors name this source only together with a file."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


def add_source(source: str, message: str) -> str:
    """Prefix `message` with the source of its flags, unless the source is the command line."""
    return message if source == COMMAND_LINE else f"{source}: {message}"


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSources:
    """Sources of flags. `str` joins them, for example as `x.sh and the command line`."""

    places: tuple[str, ...]
    """One or more sources, in reading order."""
    place_of_flag: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each flag, keyed by every spelling of the flag."""

    def __str__(self) -> str:
        return " and ".join(self.places)

    def refuse(self, message: str) -> ConfigError:
        """Return a ConfigError with `message`, prefixed with the sources of the flags in `message`. See `add_source`."""
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(add_source(" and ".join(places), message))
