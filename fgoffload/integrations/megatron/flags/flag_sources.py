"""Records the file or command line that sets each flag, for errors."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""Source of flags that the user typed. Errors name it only together with a file."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


def add_source(source: str, message: str) -> str:
    """Prefix `message` with the source of its flags, unless that is only the command line."""
    return message if source == COMMAND_LINE else f"{source}: {message}"


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSources:
    """Sources of flags. `str` joins all of them: `x.sh and the command line`."""

    places: tuple[str, ...]
    """One or more sources, in reading order."""
    place_of_flag: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each flag, under all spellings of the flag."""

    def __str__(self) -> str:
        return " and ".join(self.places)

    def refuse(self, message: str) -> ConfigError:
        """Return an error with `message`, prefixed with the source of each flag in it. See `add_source`."""
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(add_source(" and ".join(places), message))
