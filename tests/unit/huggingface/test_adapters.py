"""Tests the adapters that replace entry points of verl, ms-swift and TRL; the stubs have the real signatures."""

# ruff: noqa: FBT002 - signatures of other projects

import gc
import importlib
import importlib.util
import inspect
import sys
import types
import weakref

import pytest
import torch
from support.huggingface import ALL, copy_parameters, list_losses, make_trainer, needs
from support.models import check_equal, make_net
from support.sft import make_sft_trainer

from fgoffload import HostMemory, IntegrationError
from fgoffload.integrations.entry_points import replace_function
from fgoffload.integrations.fsdp import enable_activation_offloading
from fgoffload.integrations.ms_swift import PLUGIN


@pytest.fixture
def add_module(monkeypatch):
    """Return a function that adds a stub module to `sys.modules` until the test ends."""

    def add(path, **contents):
        for name in [path[:end] for end, letter in enumerate(path) if letter == "."]:
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        module = types.ModuleType(path)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, path, module)
        return module

    return add


@pytest.fixture
def import_fresh(monkeypatch):
    def import_module(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return import_module


def check_same_parameters(ours, theirs):
    """Check that `ours` accepts all arguments of `theirs`, by position and by name."""
    found = list(inspect.signature(ours).parameters)
    assert found[: len(inspect.signature(theirs).parameters)] == list(inspect.signature(theirs).parameters)


def test_the_adapter_replaces_every_import_of_verls_function(add_module, import_fresh):
    def theirs(model, strategy, enable_ckpt=False):
        raise AssertionError("verl's own function was called")

    definition = add_module("verl.utils.activation_offload", enable_activation_offloading=theirs)
    user = add_module("verl.workers.engine.fsdp.transformer_impl", enable_activation_offloading=theirs)
    others = [
        add_module("another.project", enable_activation_offloading=theirs),
        add_module("verl.another", enable_activation_offloading=print),  # another function with the same name
    ]
    import_fresh("fgoffload.integrations.verl")
    assert definition.enable_activation_offloading is user.enable_activation_offloading is enable_activation_offloading
    assert [other.enable_activation_offloading for other in others] == [theirs, print]
    check_same_parameters(enable_activation_offloading, theirs)
    import_fresh("fgoffload.integrations.verl")  # as each verl role does


def test_a_missing_entry_point_is_refused_with_its_path_and_supported_versions(add_module):
    add_module("verl.utils.activation_offload")
    with pytest.raises(
        IntegrationError, match=r"Cannot find verl\.utils\.activation_offload\.switch: .* Install verl 1 to 2\."
    ):
        replace_function("verl.utils.activation_offload.switch", print, versions="1 to 2")
    with pytest.raises(IntegrationError, match=r"Cannot find verl\.utils\.elsewhere\.switch: "):
        replace_function("verl.utils.elsewhere.switch", print, versions="1 to 2")


def import_plugin():
    """Import our plugin from its file, as ms-swift does."""
    spec = importlib.util.spec_from_file_location("_swift_external_0", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs("transformers", "accelerate")
def test_ms_swifts_callback_name_creates_our_callback(add_module, tmp_path):
    from fgoffload.integrations.transformers import OffloadCallback

    class Theirs:
        def __init__(self, args, trainer):
            raise AssertionError("ms-swift's own callback was created")

    swift = add_module("swift.callbacks", callbacks_map={"activation_cpu_offload": Theirs, "lisa": Theirs})
    import_plugin()
    created = swift.callbacks_map["activation_cpu_offload"](object(), object())
    assert isinstance(created, OffloadCallback)
    assert swift.callbacks_map["lisa"] is Theirs
    trainer = make_trainer(make_llama_with_1_mib_activations(), tmp_path, created, fsdp_config={"activation_cpu_offload": True})
    trainer.train()
    assert trainer.state.log_history[0]["offload/percent"] > 0


def make_llama_with_1_mib_activations():
    from support.huggingface import make_llama

    return make_llama(hidden_size=64, intermediate_size=8192)


def test_the_plugin_folder_shadows_no_other_module(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN).rpartition("/")[0])
    for name in ("transformers", "megatron", "trl", "verl", "torch", "ms_swift"):
        spec = importlib.util.find_spec(name)
        assert spec is None or "fgoffload" not in str(spec.origin or spec.submodule_search_locations)


def test_trls_context_offloads_from_the_first_step_and_has_the_original_signature(add_module, import_fresh):
    def theirs(model, use_pin_memory=True, use_streams=True, min_offload_size=1024, max_fwd_stash_size=5, warn_if_no_head=True):
        raise AssertionError("TRL's own function was called")

    add_module("trl.models.activation_offloading", get_act_offloading_ctx_manager=theirs)
    user = add_module("trl.trainer.sft_trainer", get_act_offloading_ctx_manager=theirs)
    import_fresh("fgoffload.integrations.trl")
    check_same_parameters(user.get_act_offloading_ctx_manager, theirs)
    model = make_net()
    model._no_split_modules = ["Block"]
    context = user.get_act_offloading_ctx_manager(model=model, use_pin_memory=False, min_offload_size=0)
    assert context.handle is None
    for _ in range(2):
        with context:
            model(torch.randn(32, 64)).backward()
        assert context.handle.last_stats.tags["layers"].d2h_bytes > 0
        assert context.handle.last_totals.forwards == 1
    assert context.handle.config.host_memory is HostMemory.PAGEABLE
    assert context.handle.config.min_offloaded_bytes == 0
    before = context.handle.last_stats
    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError
    assert context.handle.last_stats is before  # a failed step does not count


def test_trls_context_does_not_keep_the_model_alive_and_warns_of_ignored_options(add_module, import_fresh, caplog):
    add_module("trl.models.activation_offloading", get_act_offloading_ctx_manager=print)
    adapter = import_fresh("fgoffload.integrations.trl")
    model = make_net()
    context = adapter.get_act_offloading_ctx_manager(model)
    assert caplog.messages == []
    adapter.get_act_offloading_ctx_manager(model, use_streams=False)
    adapter.get_act_offloading_ctx_manager(model, max_fwd_stash_size=5)
    assert len(caplog.messages) == 2
    assert all("use_streams and max_fwd_stash_size have no effect" in line for line in caplog.messages)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    with context:
        assert context.handle is None


@needs("transformers", "trl")
@pytest.mark.filterwarnings("ignore")
def test_an_sft_trainer_with_trls_own_switch_is_bitwise_identical_with_our_engine(tmp_path, import_fresh):
    plain = make_sft_trainer(tmp_path)
    plain.train()
    module = importlib.import_module("trl.models.activation_offloading")
    theirs, users = module.get_act_offloading_ctx_manager, sys.modules["trl.trainer.sft_trainer"]
    try:
        adapter = import_fresh("fgoffload.integrations.trl")
        trainer = make_sft_trainer(tmp_path, activation_offloading=True)
        assert isinstance(trainer.maybe_activation_offload_context, adapter.TrainingSteps)
        trainer.train()
    finally:
        module.get_act_offloading_ctx_manager = users.get_act_offloading_ctx_manager = theirs
    assert list_losses(plain) == list_losses(trainer)
    check_equal(copy_parameters(plain.model), copy_parameters(trainer.model))
    assert trainer.maybe_activation_offload_context.handle.last_totals.forwards == 1


@needs("swift")
@pytest.mark.filterwarnings("ignore")
def test_the_real_ms_swift_imports_the_plugin_and_the_real_transformers():
    from swift.callbacks import callbacks_map
    from swift.utils.utils import import_external_file

    theirs, path = callbacks_map["activation_cpu_offload"], list(sys.path)
    try:
        import_external_file(PLUGIN)
        assert callbacks_map["activation_cpu_offload"].__name__ == "SwiftOffloadCallback"
        check_same_parameters(callbacks_map["activation_cpu_offload"], theirs)
        assert "fgoffload" not in importlib.util.find_spec("transformers").origin
    finally:
        callbacks_map["activation_cpu_offload"] = theirs
        sys.path[:] = path


@needs("verl")
@pytest.mark.filterwarnings("ignore")
def test_the_real_verl_imports_the_adapter(import_fresh):
    from verl.utils import activation_offload
    from verl.utils.import_utils import import_external_libs

    theirs = activation_offload.enable_activation_offloading
    try:
        sys.modules.pop("fgoffload.integrations.verl", None)
        import_external_libs("fgoffload.integrations.verl")
        assert activation_offload.enable_activation_offloading is enable_activation_offloading
        check_same_parameters(enable_activation_offloading, theirs)
    finally:
        activation_offload.enable_activation_offloading = theirs


@needs("transformers", "trl")
@pytest.mark.filterwarnings("ignore")
def test_an_sft_trainer_with_the_callback_is_bitwise_identical(tmp_path):
    from fgoffload.integrations.transformers import OffloadCallback

    plain, offloaded = make_sft_trainer(tmp_path), make_sft_trainer(tmp_path, OffloadCallback(config=ALL))
    plain.train()
    offloaded.train()
    assert list_losses(plain) == list_losses(offloaded)
    check_equal(copy_parameters(plain.model), copy_parameters(offloaded.model))
    assert offloaded.state.log_history[0]["offload/percent"] == 100
