"""Remembers where each flag was written, so that an error names the place that the user has to change."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""Name in errors of the flags typed after an argument file."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSources:
    """Sources of flags. As text, all of them, as in `x.sh and the command line`."""

    places: tuple[str, ...]
    """At least one source, in the order of reading."""
    place_of_flag: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of the value of each flag, in all its spellings. Flags that were not given are absent."""

    def __str__(self) -> str:
        """Return all sources."""
        return " and ".join(self.places)

    def refuse(self, message: str) -> ConfigError:
        """Return the error for `message`, prefixed with the sources of the flags that it names.

        Every error names its flags as they are typed, so the message shows which ones conflict.
        """
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(f"{' and '.join(places)}: {message}")
