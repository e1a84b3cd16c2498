"""Records the source of each flag, so that an error names the file or command line to change."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""Source of flags typed after an argument file, in errors."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSources:
    """Sources of flags. The text names all of them: `x.sh and the command line`."""

    places: tuple[str, ...]
    """One or more sources, in the order of reading."""
    place_of_flag: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each given flag, by all spellings of the flag."""

    def __str__(self) -> str:
        return " and ".join(self.places)

    def refuse(self, message: str) -> ConfigError:
        """Return an error with `message`, prefixed with the sources of the flags that it names."""
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(f"{' and '.join(places)}: {message}")
