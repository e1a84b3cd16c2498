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
    # Closing a trainer collects garbage. Without the freeze, scanning imported modules would dominate a small training.
    gc.collect()
    gc.freeze()
    yield
    destroy_parallel()
