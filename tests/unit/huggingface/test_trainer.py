"""Tests `OffloadCallback` in transformers' `Trainer`: bitwise identical training, logged numbers, and cleanup."""

import logging
import re

import pytest
import torch.distributed as dist
from support.huggingface import (
    ALL,
    HIDDEN_BYTES,
    LAYERS,
    OLD_NAMES,
    copy_parameters,
    list_losses,
    make_llama,
    make_trainer,
    needs,
)
from support.huggingface_models import make_inputs
from support.models import check_equal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fgoffload import BudgetError, ConfigError, TransferConfig

pytestmark = [needs("transformers", "accelerate"), OLD_NAMES]


@pytest.fixture(scope="module")
def callback_type():
    from fgoffload.integrations.transformers import OffloadCallback

    return OffloadCallback


@pytest.fixture
def callback(callback_type):
    return callback_type(config=ALL)


def compare(tmp_path, callback, make_model=make_llama, **options):
    """Check that training with `callback` is bitwise identical, and return its trainer."""
    trainers = []
    for callbacks in ((), (callback,)):
        trainer = make_trainer(make_model(), tmp_path, *callbacks, **options)
        trainer.train()
        trainers.append(trainer)
    plain, offloaded = trainers
    assert list_losses(plain) == list_losses(offloaded)
    check_equal(copy_parameters(plain.model), copy_parameters(offloaded.model))
    return offloaded


def get_logged(trainer, name):
    return [entry[f"offload/{name}"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved tensors", "layer inputs"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_is_bitwise_identical_and_logs_the_savings(callback, tmp_path, checkpointing, microbatches):
    options = {"gradient_checkpointing": checkpointing, "gradient_accumulation_steps": microbatches}
    trainer = compare(tmp_path, callback, **options)
    assert len(get_logged(trainer, "saved_gib")) == 4
    if checkpointing:
        assert get_logged(trainer, "saved_gib") == [LAYERS * HIDDEN_BYTES / 2**30] * 4
    assert get_logged(trainer, "percent") == [100] * 4
    assert all(wait_ms > 0 for wait_ms in get_logged(trainer, "wait_ms"))


def test_training_within_a_memory_budget_is_bitwise_identical(callback_type, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.budget")
    callback = callback_type(config=ALL, memory="400KiB")
    compare(tmp_path, callback, lambda: make_llama(use_cache=False))
    assert "measured: no time yet (steps 11 to 13 of the plan will be timed)" in callback.explain()
    assert re.search(r"layer \d \(LlamaDecoderLayer\), .* saved: .*(offload|recompute)", caplog.text)


def test_a_failed_training_does_not_block_the_next(callback_type, tmp_path):
    model = make_llama(use_cache=False)
    with pytest.raises(BudgetError, match="too small"):
        make_trainer(model, tmp_path, callback_type(config=ALL, memory="1KiB")).train()
    make_trainer(model, tmp_path).train()  # without offload

    from transformers import TrainerCallback

    class Interrupt(TrainerCallback):
        def on_step_end(self, *args, **others):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(model, tmp_path, callback_type(config=ALL, memory="400KiB"), Interrupt()).train()
    trainer = make_trainer(model, tmp_path, callback_type(config=ALL))
    trainer.train()
    assert get_logged(trainer, "percent") == [100] * 4


def test_the_savings_are_logged_once_after_the_third_step(callback, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.transformers")
    for _ in range(2):
        make_trainer(make_llama(), tmp_path, callback, max_steps=2).train()
    assert "Memory saved" not in caplog.text
    make_trainer(make_llama(), tmp_path, callback, max_steps=5).train()
    assert [line for line in caplog.messages if "saved" in line] == ["Memory saved: 0.000209 GiB (100%)"]


def test_only_the_first_process_logs_the_savings(callback, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.transformers")
    trainer = make_trainer(make_llama(), tmp_path, callback, max_steps=3)
    trainer.state.is_local_process_zero = False
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    for _ in range(3):
        trainer.model(**make_inputs()).loss.backward()
        callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert "Memory saved" not in caplog.text


def test_the_log_has_no_wait_time_if_timing_is_disabled(callback_type, tmp_path):
    trainer = make_trainer(make_llama(), tmp_path, callback_type(config=TransferConfig(min_offloaded_bytes=0)), max_steps=1)
    trainer.train()
    assert {name for name in trainer.state.log_history[0] if "/" in name} == {"offload/saved_gib", "offload/percent"}


def test_the_end_of_training_restores_the_model_and_releases_host_memory(callback, tmp_path):
    model, engines = make_llama(), []

    class RecordEngines(type(callback)):
        def on_step_end(self, *given, **others):
            super().on_step_end(*given, **others)
            engines.append(self.handle.engine)

    callback = RecordEngines(config=ALL)
    trainer = make_trainer(model, tmp_path, callback)
    trainer.train()
    assert callback.handle is None
    assert not any({"forward", "__getstate__", "_fgoffload_handle"} & set(vars(module)) for module in model.modules())
    assert engines[0].arena.reserved_bytes == 0
    trainer.train()  # a second training is offloaded too
    assert engines[-1] is not engines[0]


@pytest.mark.parametrize(("value", "switch"), [(True, True), (False, False), ("yes", True), ("No", False), ("0", False)])
def test_fsdp_config_switches_offload_on_and_off(callback_type, tmp_path, caplog, value, switch):
    caplog.set_level(logging.INFO, logger="fgoffload.integrations.transformers")
    trainer = make_trainer(make_llama(), tmp_path, callback_type(), fsdp_config={"activation_cpu_offload": value}, max_steps=1)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ("offload/percent" in entry) is switch
    assert ("offload is off: fsdp_config has activation_cpu_offload=False." in caplog.messages) is not switch


def test_a_non_boolean_value_in_the_fsdp_config_is_refused(callback, tmp_path):
    trainer = make_trainer(make_llama(), tmp_path, callback, fsdp_config={"activation_cpu_offload": "maybe"}, max_steps=1)
    with pytest.raises(ConfigError, match="activation_cpu_offload='maybe', which is not a boolean"):
        trainer.train()


def test_restarting_with_a_smaller_batch_reuses_the_handle(callback, tmp_path, caplog):
    handles, failed = [], []

    def fail_once(module, given):
        handles.append(callback.handle)
        if not failed:
            failed.append(True)
            raise RuntimeError("CUDA out of memory.")  # the message that accelerate looks for

    model = make_llama()
    model.model.layers[1].mlp.register_forward_pre_hook(fail_once)
    trainer = make_trainer(model, tmp_path, callback, auto_find_batch_size=True)
    trainer.args.activation_offloading = True
    trainer.train()
    assert sum("TRL's activation_offloading is also on" in line for line in caplog.messages) == 1
    assert trainer._train_batch_size < 2
    assert len(set(map(id, handles))) == 1
    assert get_logged(trainer, "percent") == [100] * 4


def test_training_another_model_restores_the_model_whose_training_failed(callback, tmp_path):
    model = make_llama()
    hook = model.lm_head.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_trainer(model, tmp_path, callback).train()
    hook.remove()
    assert "forward" in vars(model.model.layers[0])
    compare(tmp_path, callback)
    assert "forward" not in vars(model.model.layers[0])


def test_of_two_callbacks_the_first_is_used_with_a_warning(callback, callback_type, tmp_path, caplog):
    trainer = make_trainer(make_llama(), tmp_path, callback, callback_type(["lm_head"]))
    trainer.train()
    assert get_logged(trainer, "percent") == [100] * 4
    assert [line for line in caplog.messages if "OffloadCallbacks" in line or "no effect" in line] == [
        "The Trainer has two OffloadCallbacks and uses only the first. Remove the other. `fgoffload run` adds one unless "
        "Trainer(callbacks=[...]) contains one."
    ]


def test_selected_modules_are_offloaded_instead_of_the_layers(callback_type, tmp_path):
    tags = []

    class RecordTags(callback_type):
        def on_step_end(self, *given, **others):
            super().on_step_end(*given, **others)
            tags.append(set(self.handle.last_stats.tags))

    compare(tmp_path, RecordTags(["model.layers.*.mlp"], ALL))
    assert tags == [{"mlp"}] * 4


def test_add_to_makes_the_numbers_visible_to_reporters(callback, tmp_path):
    from transformers import TrainerCallback

    logged = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            logged.append(set(logs))

    trainer = make_trainer(make_llama(), tmp_path, Reporter(), max_steps=1)
    callback.add_to(trainer)
    trainer.train()
    assert {"loss", "offload/saved_gib", "offload/percent", "offload/wait_ms"} <= logged[0]
    assert not any(name.startswith("offload/") for name in logged[1])  # the summary of the run


def test_training_with_evaluation_between_steps_is_bitwise_identical(callback, tmp_path):
    compare(tmp_path, callback, eval_strategy="steps", eval_steps=1, prediction_loss_only=True)


def test_other_active_offload_switches_are_listed_in_one_warning(callback, tmp_path, caplog):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    model = make_llama()
    model.model.layers[0].mlp = offload_wrapper(model.model.layers[0].mlp)
    trainer = make_trainer(model, tmp_path, callback, max_steps=1)
    trainer.args.gradient_checkpointing_kwargs = {"offload": True}
    trainer.args.activation_offloading = True
    trainer.train()
    (line,) = [line for line in caplog.messages if " are also on. " in line]
    assert line.startswith(
        "transformers' gradient_checkpointing_kwargs={'offload': True} and accelerate's fsdp_activation_checkpointing_offload "
        "and TRL's activation_offloading are also on."
    )


def test_without_other_offload_switches_no_warning_is_logged(callback, tmp_path, caplog):
    make_trainer(make_llama(), tmp_path, callback, gradient_checkpointing=True).train()
    assert not [record for record in caplog.records if record.name.startswith("fgoffload") and record.levelno > logging.INFO]


def test_the_layers_of_a_model_sharded_by_fsdp2_are_offloaded(callback, tmp_path):
    def compute(model):
        model.zero_grad()
        loss = model(**make_inputs()).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.to_local().clone() for parameter in model.parameters())]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, trainer = make_llama().train(), make_trainer(make_llama(), tmp_path)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        expected = compute(model)
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
        check_equal(expected, compute(model))
        assert callback.handle.stats().tags["layers"].groups >= LAYERS
        callback.on_train_end(trainer.args, trainer.state, trainer.control)
    finally:
        dist.destroy_process_group()
