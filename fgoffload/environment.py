"""Sets and restores environment variables of this process."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set `variables` by name; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def keep_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore the values of the variables `names` when the body ends."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        set_environment(before)
