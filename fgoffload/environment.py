"""Sets and restores this process's environment variables."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set environment variables. A value of None removes the variable."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def keep_environment(names: Iterable[str]) -> Iterator[None]:
    """Restore the environment variables `names` on exit."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        set_environment(before)
