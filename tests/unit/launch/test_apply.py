"""Tests applying offload to a script: GPU selection and errors."""

import pytest
import torch

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron import apply
from fgoffload.integrations.megatron.interface import is_replaced
from fgoffload.integrations.megatron.launch import apply_to_script, script

CONFIG = OffloadConfig(offload_modules=("core_attn", "attn_proj"), offload_host_budget_bytes=1 << 20)


@pytest.mark.parametrize(
    ("local_rank", "visible", "chosen"),
    [("0", 2, [0]), ("1", 2, [1]), ("1", 1, [])],
    ids=["first", "second", "each process sees only its own"],
)
def test_the_gpu_of_the_rank_is_selected_before_the_engine_is_created(monkeypatch, local_rank, visible, chosen):
    calls = []
    monkeypatch.setattr(script, "needs_cpu_support", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(script, "apply", lambda config: calls.append("applied") or apply(config))
    apply_to_script(CONFIG, (), {"LOCAL_RANK": local_rank}).remove()
    assert calls == [*chosen, "applied"]


def test_without_a_usable_gpu_none_is_selected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # the driver may list an unusable GPU
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: pytest.fail("no GPU is usable"))
    apply_to_script(CONFIG, (), {"LOCAL_RANK": "0"}).remove()


def test_an_error_while_applying_undoes_everything(monkeypatch):
    values = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    monkeypatch.setattr(script, "read_megatron_flags", lambda words: values)
    with pytest.raises(ConfigError, match="are mutually exclusive"):
        apply_to_script(CONFIG, (), {})
    assert not is_replaced()
