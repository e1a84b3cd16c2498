"""Sets up the process groups that Megatron-Core's models need, once per test module."""

import gc
from collections.abc import Iterator

import pytest
from support.trainings import DENSE

from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel


@pytest.fixture(scope="module")
def parallel() -> Iterator[None]:
    initialize_parallel(parse_arguments(DENSE.split(), source="test"))
    # A closed trainer collects garbage. Most of a small training's time would go into looking through what was imported.
    gc.collect()
    gc.freeze()
    yield
    destroy_parallel()
