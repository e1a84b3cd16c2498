"""Tests `Trainer` with DeepSpeed ZeRO-2 and ZeRO-3 on two ranks, if DeepSpeed is installed."""

import pytest
from support.deepspeed_ranks import STAGES, run_ranks
from support.huggingface import HIDDEN_BYTES, LAYERS, needs

pytestmark = [needs("deepspeed", "transformers", "accelerate"), pytest.mark.slow]


def test_losses_and_weights_are_bitwise_identical_and_no_parameter_is_offloaded(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = list(run_ranks(processes=2, imports=("transformers.trainer",)))
    assert [plain["stage"] for plain, _ in found] == [stage for stage in STAGES for _ in range(2)] * 2
    for plain, offloaded in found:
        assert plain["losses"] == offloaded["losses"]
        assert plain["parameters"] == offloaded["parameters"]
    saved_tensors, layer_inputs = ([offloaded["saved_gib"] for _, offloaded in found[first::2]] for first in (0, 1))
    # ZeRO-3 gathers parameters into temporary storages. If these were offloaded, it would save more than ZeRO-2.
    assert min(saved_tensors) == max(saved_tensors) > max(layer_inputs)
    assert layer_inputs == [LAYERS * HIDDEN_BYTES / 2**30] * 4
