"""Which plan file an error is about."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fgoffload.errors import PlanError


@contextlib.contextmanager
def naming_file(path: Path | None) -> Iterator[None]:
    """Let each `PlanError` from inside begin with the file that the plan is of; None where it is of none."""
    try:
        yield
    except PlanError as error:
        if path is None:
            raise
        raise PlanError(f"--offload-plan {path}: {error}") from error
