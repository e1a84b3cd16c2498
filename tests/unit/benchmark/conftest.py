"""Sets up the process groups that Megatron-Core's models need, once per test module."""

import gc
from collections.abc import Iterator

import pytest
from support.trainings import DENSE

from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel


@pytest.fixture(autouse=True)
def _keep_imports_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep imported modules frozen, since measurements collect garbage before each step."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture(scope="module")
def parallel() -> Iterator[None]:
    initialize_parallel(parse_arguments(DENSE.split(), source="test"))
    yield
    destroy_parallel()
