"""Tests `--offload-modules auto` with a budget below the static memory."""

import pytest
from support.trainings import DENSE, make_trainer

from fgoffload import OffloadConfig, PlanError
from fgoffload.integrations.megatron.profile import step_measurement as profiling
from fgoffload.integrations.megatron.profile.device_memory import MemoryReading

BUDGET_BYTES = 1000


class FullMemory:
    """Fakes an allocator with the whole budget in use."""

    def read(self):
        return MemoryReading(allocated_bytes=BUDGET_BYTES, peak_bytes=BUDGET_BYTES)


@pytest.mark.usefixtures("parallel")
def test_static_memory_above_the_budget_fails_before_the_first_forward(monkeypatch):
    monkeypatch.setattr(profiling, "find_device_memory", lambda device_type: FullMemory())
    config = OffloadConfig(offload_modules=("auto",), offload_memory_budget_bytes=BUDGET_BYTES)
    with make_trainer(DENSE, config) as trainer:
        trainer.chunks[0].register_forward_pre_hook(lambda module, args: pytest.fail("a forward ran"))
        with pytest.raises(PlanError, match="--offload-memory-budget 1000 B is not above the static memory of a rank"):
            trainer.run_step()
