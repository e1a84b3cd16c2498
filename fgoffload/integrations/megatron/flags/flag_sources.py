"""Where each flag was written, so that an error blames the place that a user has to change."""

import dataclasses
import re
from collections.abc import Mapping

from fgoffload.errors import ConfigError

COMMAND_LINE = "the command line"
"""What errors call the flags that were typed after an argument file."""

_FLAG = re.compile(r"--[A-Za-z][\w-]*")


@dataclasses.dataclass(frozen=True, slots=True)
class FlagSources:
    """The places that flags came from. As text: all of them, as in `x.sh and the command line`."""

    places: tuple[str, ...]
    """At least one, in the order in which they were read."""
    place_of_flag: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By flag, in all its spellings: the place that gave the value. Flags that were not given are absent."""

    def __str__(self) -> str:
        """Return all places."""
        return " and ".join(self.places)

    def refuse(self, message: str) -> ConfigError:
        """Return the error for `message`, which begins with the places of the flags that it names.

        Every error names its flags as they are typed, so the message says which ones contradict each other.
        """
        named = {self.place_of_flag[flag] for flag in _FLAG.findall(message) if flag in self.place_of_flag}
        places = [place for place in self.places if place in named] or self.places
        return ConfigError(f"{' and '.join(places)}: {message}")
