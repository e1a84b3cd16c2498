"""Both generations of Megatron-Core's offload interface without its engine. Calling the original methods raises.

`installed(make_development_interface())` replaces Megatron-Core's class with a stub, and `load_layers()` imports modules that
call it like the modules of the development branch. The members of the class and its callers follow commit d98e8a64 of that
branch: `transformer_layer.py`, `attention.py`, `moe/experts.py`, `gpt_model.py`, `schedules.py`, `cuda_graphs.py`.
"""

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fgoffload.integrations.megatron.patching.imports import load_module

MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
CLASS = "FineGrainedActivationOffloadingInterface"


class ReachedError(Exception):
    """A call reached Megatron's original interface instead of ours."""


@contextlib.contextmanager
def installed(interface: type | None) -> Iterator[ModuleType]:
    """Replace the class in Megatron's module with `interface`, or remove the class if it is None."""
    parent = load_module(MODULE.rpartition(".")[0])
    load_module("megatron.core.models.gpt.gpt_layer_specs")  # these modules bind the real class by name
    load_module("megatron.core.models.gpt.gpt_model")
    before = sys.modules[MODULE]
    stub = ModuleType(MODULE)
    if interface is not None:
        setattr(stub, CLASS, interface)
    name = MODULE.rpartition(".")[2]
    sys.modules[MODULE] = stub
    setattr(parent, name, stub)
    try:
        yield stub
    finally:
        sys.modules[MODULE] = before
        setattr(parent, name, before)


def load_layers() -> Any:
    """Import `layers.py` again, with the installed interface."""
    path = Path(__file__).with_name("layers.py")
    spec = importlib.util.spec_from_file_location("megatron_stub_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reach(*args: Any, **kwargs: Any) -> Any:
    raise ReachedError(args, kwargs)


_CONTEXT = ("__init__(self, offload, tensor, name)", "__enter__(self)", "__exit__(self, *args)")
_DEVELOPMENT = (
    *_CONTEXT,
    "cuda_graph_stream()",
    "cuda_graph_event()",
    "init_chunk_handler(pp_rank, vp_size, vp_stage, min_offloaded_tensor_size, delta_offload_bytes_across_pp_ranks, "
    "activation_offload_fraction, max_inflight_offloads=None)",
    "get_context(flag)",
    "group_offload(self, tensor, forced_released_tensors=None, delay_offload=None)",
    "mark_not_offload(tensor)",
    "forward_record()",
    "backward_record(tensor)",
    "reset(process_group=None)",
    *(f"{name}()" for name in ("reset_instance", "flush_delayed_groups", "disable_offload", "enable_offload")),
    *(f"{name}()" for name in ("enter_replay", "exit_replay")),
)
_RELEASED = (
    *_CONTEXT,
    "init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size, max_inflight_offloads=None)",
    "get_context(flag)",
    "group_commit(tensor, name, forced_released_tensors=None, delay_offload=None)",
    "mark_not_offloadable(tensor)",
    "forward_record(event)",
    "reset()",
    "reset_instance()",
)


def _make_interface(signatures: tuple[str, ...]) -> type:
    """Return a class with methods of these signatures, static ones without `self`. All of them raise."""
    methods: dict[str, Any] = {}
    for signature in signatures:
        exec(f"def {signature}: _reach()", {"_reach": _reach}, methods)
    is_static = {name: "self" not in inspect.signature(method).parameters for name, method in methods.items()}
    return type(CLASS, (), {name: staticmethod(one) if is_static[name] else one for name, one in methods.items()})


def make_development_interface() -> type:
    """Return a new class with the methods and parameters of the development branch."""
    return _make_interface(_DEVELOPMENT)


def make_released_interface() -> type:
    """Return a new class with the methods and parameters of 0.18. (0.16.1 lacks `max_inflight_offloads`.)"""
    return _make_interface(_RELEASED)


class WithoutOffload:
    """An interface without effect, for the baseline."""

    def __init__(self, offload, tensor, name):
        self.tensor = tensor

    def __enter__(self):
        return self.tensor

    def __exit__(self, *args):
        pass

    def group_offload(self, tensor, **kwargs):
        return tensor

    @staticmethod
    def init_chunk_handler(**kwargs):
        pass

    @staticmethod
    def mark_not_offload(tensor):
        pass

    @staticmethod
    def reset(process_group=None):
        pass
