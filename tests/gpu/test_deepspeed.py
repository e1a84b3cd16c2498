"""Tests `Trainer` with DeepSpeed ZeRO-2 and ZeRO-3 on one GPU, if DeepSpeed is installed."""

import pytest
from support.deepspeed_ranks import STAGES, run_ranks
from support.huggingface import needs

pytestmark = needs("deepspeed", "transformers", "accelerate")


@pytest.mark.timeout(300)
def test_losses_and_weights_are_bitwise_identical_and_no_parameter_is_offloaded():
    found = list(run_ranks(processes=1))
    assert [plain["stage"] for plain, _ in found] == [stage for stage in STAGES for _ in range(2)]
    for plain, offloaded in found:
        assert plain["losses"] == offloaded["losses"]
        assert plain["parameters"] == offloaded["parameters"]
    saved_gib = [offloaded["saved_gib"] for _, offloaded in found]
    assert saved_gib[0] == saved_gib[2] > saved_gib[1] == saved_gib[3] > 0
