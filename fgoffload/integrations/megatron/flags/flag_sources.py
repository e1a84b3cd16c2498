"""Records the file or command line that sets each flag, for errors."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""Name of the command line in errors about flags that follow an argument file."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


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
        """Return an error with `message`, prefixed with the source of each flag in it."""
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(f"{' and '.join(places)}: {message}")
