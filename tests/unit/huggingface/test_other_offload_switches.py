"""Tests other offload switches that are on at the same time: results are bitwise identical, and a warning names them."""

import functools
import inspect
import types

import pytest
import torch
from support.huggingface import ALL, OLD_NAMES, copy_parameters, list_losses, make_llama, make_trainer, needs
from support.models import check_equal
from support.sft import make_sft_trainer

pytestmark = [needs("transformers", "accelerate"), OLD_NAMES]


def compare(train, caplog, other_switch):
    """Check that `train` is bitwise identical with the callback, and that one warning names `other_switch`."""
    from fgoffload.integrations.transformers import OffloadCallback

    plain, both = train(), train(OffloadCallback(config=ALL))
    assert list_losses(plain) == list_losses(both)
    check_equal(copy_parameters(plain.model), copy_parameters(both.model))
    (line,) = [line for line in caplog.messages if " is also on. " in line]
    assert line.startswith(f"{other_switch} is also on.")
    assert both.state.log_history[0]["offload/saved_gib"] == 0  # the other switch takes every tensor


def test_transformers_checkpoint_offload_is_compatible_and_logs_a_warning(tmp_path, caplog):
    from transformers import PreTrainedModel

    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers has no such switch")

    def train(*callbacks):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
        trainer = make_trainer(make_llama(), tmp_path, *callbacks, **options)
        trainer.train()
        return trainer

    compare(train, caplog, "transformers' activation_checkpointing_kwargs={'offload': True}")


def test_accelerates_checkpoint_offload_is_compatible_and_logs_a_warning(tmp_path, caplog):
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    if "activation_checkpointing_offload" not in inspect.signature(FullyShardedDataParallelPlugin).parameters:
        pytest.skip("this accelerate has no such switch")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    )

    def train(*callbacks):
        model = fsdp2_apply_ac(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), make_llama())
        trainer = make_trainer(model, tmp_path, *callbacks)
        trainer.train()
        return trainer

    compare(train, caplog, "accelerate's fsdp_activation_checkpointing_offload")


@needs("trl")
@pytest.mark.filterwarnings("ignore")
def test_trls_activation_offload_is_compatible_and_logs_a_warning(tmp_path, caplog, monkeypatch):
    from trl.trainer import sft_trainer

    # The CPU replaces the accelerator that TRL requires. It has neither streams nor pinned memory.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    options = {"use_streams": False, "use_pin_memory": False}
    theirs = sft_trainer.get_act_offloading_ctx_manager
    monkeypatch.setattr(sft_trainer, "get_act_offloading_ctx_manager", functools.partial(theirs, **options))

    def train(*callbacks):
        trainer = make_sft_trainer(tmp_path, *callbacks, activation_offloading=True)
        trainer.train()
        return trainer

    compare(train, caplog, "TRL's activation_offloading")
