"""Makes released versions of Megatron-Core run without a GPU or without Transformer Engine.

    with apply_cpu_support():
        ...  # build and train a GPTModel of the local layer spec

Megatron-Core requires a CUDA device. With the symbols below replaced, its models, pipeline schedules and recompute run on the
CPU, with Gloo between processes. The CPU's random state replaces CUDA's, so recompute repeats dropout correctly.
"""

import contextlib
import copy
import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.integrations.megatron.patching.patches import Patches, require_symbol

_logger = logging.getLogger(__name__)

_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
"""Functions of `torch` that megatron-core 0.16.1 calls with `device="cuda"`, and similar functions."""

_RANDOM = "megatron.core.tensor_parallel.random"


def needs_cpu_support() -> bool:
    """Return whether this machine lacks a usable CUDA GPU."""
    return not torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Return whether Megatron-Core could import Transformer Engine."""
    return bool(load_module("megatron.core.models.gpt.gpt_layer_specs").HAVE_TE)


def apply_cpu_support() -> Patches:
    """Make Megatron-Core run on the CPU and without Transformer Engine, until `remove`.

    Raises:
        IntegrationError: A symbol to replace does not exist. Then nothing is replaced.
    """
    with Patches() as support:
        _replace_device(support)
        _replace_in_megatron(support)
        _support_local_layers(support)
        _logger.info("Megatron-Core runs on the CPU: some functions of torch and Megatron-Core are replaced.")
        return support.pop_all()


def apply_local_layer_support() -> Patches:
    """Make Megatron-Core's local layers run without Transformer Engine and Apex, on any device, until `remove`."""
    with Patches() as support:
        _support_local_layers(support)
        _logger.info("Local layers run without Transformer Engine and Apex: some functions of Megatron-Core are replaced.")
        return support.pop_all()


def _replace_device(support: Patches) -> None:
    stream = _InlineStream()
    support.replace("torch.cuda", "current_device", lambda: torch.device("cpu"))
    support.replace("torch.cuda", "synchronize", lambda device=None: None)
    support.replace("torch.cuda", "manual_seed", torch.manual_seed)
    # Megatron calls these functions through both modules.
    for module in ("torch.cuda", "torch.cuda.random"):
        support.replace(module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        support.replace(module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state))
    # The all-to-all dispatcher and the shared experts use their own streams.
    support.replace("torch.cuda", "Stream", _InlineStream)
    support.replace("torch.cuda", "current_stream", lambda device=None: stream)
    support.replace("torch.cuda", "stream", lambda stream: contextlib.nullcontext())
    for owner in ("torch:Tensor", "torch.nn:Module"):
        support.replace(owner, "cuda", lambda self, *args, **kwargs: self)
    for name in _FACTORIES:
        support.replace("torch", name, _on_cpu(getattr(torch, name)))
    # Megatron compiles small functions with torch.compile. On a CPU, this needs a C++ compiler and takes seconds per layer.
    support.enter_context(torch.compiler.set_stance("force_eager"))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _replace_in_megatron(support: Patches) -> None:
    support.replace(f"{_RANDOM}:CudaRNGStatesTracker", "fork", _fork_if_layers_are_sharded)
    support.replace(
        _RANDOM, "_set_cuda_rng_state", lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    )
    # Megatron's function converts the all-to-all dispatcher's split sizes to NumPy only if they were on a GPU.
    support.replace("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _convert_on_cpu)


def _convert_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def _fork_if_layers_are_sharded(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Use the random state `name` in the body if ranks hold shards of a layer, because shards need different random numbers."""
    parallel_state = load_module("megatron.core.parallel_state")
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    if max(sizes) == 1:
        yield
        return
    outside = torch.get_rng_state()
    torch.set_rng_state(self.states_[name])
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


def _support_local_layers(support: Patches) -> None:
    # Megatron's substitute for Apex's norm rejects sequence parallelism, because its gradients would not be summed over ranks.
    original = load_module("megatron.core.transformer.torch_norm").WrappedTorchNorm.__new__
    build = staticmethod(_mark_for_sequence_parallelism(original))
    support.replace("megatron.core.transformer.torch_norm:WrappedTorchNorm", "__new__", build)
    if load_module(_RANDOM).HAVE_TE:
        return
    # Without Transformer Engine, this name is undefined but the router reads it. None selects plain torch.
    router = "megatron.core.transformer.moe.moe_utils"
    require_symbol(router, "RouterGatingLinearFunction")
    support.define(router, "te_general_gemm", None)
    # CheckpointWithoutOutput() in 0.16.1 assumes that FP8 is on (`False is not None`) and reads the FP8 state.
    require_symbol(_RANDOM, "CheckpointWithoutOutput")
    support.define(_RANDOM, "FP8GlobalStateManager", types.SimpleNamespace(is_fp8_enabled=lambda: False))
    for name in ("activation_recompute_forward", "fp8_autocast"):
        support.define(_RANDOM, name, lambda **options: contextlib.nullcontext())
    # Latent attention in 0.16.1 mistakes importable placeholders for Transformer Engine's classes.
    support.replace("megatron.core.transformer.multi_latent_attention", "HAVE_TE", value=False)


def _mark_for_sequence_parallelism(original: Any) -> Any:
    """Mark the parameters of torch's norm as Apex does, so that `finalize_model_grads` sums their gradients."""

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return build


class _InlineStream:
    """CPU substitute for a CUDA stream: work runs as soon as it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self, other: Any = None) -> None:
        pass

    wait_stream = wait_event = synchronize

    def record_event(self, event: Any = None) -> "_InlineStream":
        return self
