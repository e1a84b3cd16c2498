"""Gradients in the buffers of Megatron's data-parallel wrapper, which reduces them over all groups, and their optimizer."""

import concurrent.futures
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fgoffload.integrations.megatron.adapter.dispatchers import detach_routing
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments

_MAX_DIGEST_THREADS = 8
"""Each holds one tensor in host memory. The ranks of a machine share its cores."""


def wrap_chunks(chunks: Sequence[torch.nn.Module], config: Any, arguments: TrainingArguments) -> list[Any]:
    """Wrap model chunks for data parallelism, and let the schedules reduce gradients over every group.

    From then on each parameter's gradient is summed in its `main_grad`. At the end of a step's backward Megatron itself
    averages it over the copies of the model, sums those of norms over sequence-parallel ranks, and those of an embedding that
    two stages share. Nothing overlaps and no optimizer state is sharded: what is compared here are bits.

    Returns:
        One wrapper a chunk, for Megatron's schedules.
    """
    distributed = load_module("megatron.core.distributed")
    settings = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=arguments.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=False,
        use_distributed_optimizer=False,
    )
    config.finalize_model_grads_func = distributed.finalize_model_grads
    with ignore_expected_warnings():
        return [
            distributed.DistributedDataParallel(config, settings, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]


def release_graphs(chunks: Iterable[torch.nn.Module]) -> None:
    """Let go of the graph of the last microbatch, which token dispatchers hold by their routing probabilities.

    The graph ends in the parameters' gradients, whose hooks hold the data-parallel wrapper, and so the model, and so the
    dispatchers: a cycle through autograd, which Python's collector cannot see. Without this no model with experts is freed.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "token_dispatcher"):
            detach_routing(module.token_dispatcher)


class Optimizer(Protocol):
    """Treatment of a step's gradients."""

    def step(self) -> None:
        """Update the parameters, or leave them."""


class NoOptimizer:
    """Leaves the parameters as they are, and has no memory of its own."""

    def step(self) -> None:
        """Leave them."""


class MainGradOptimizer:
    """Plain AdamW over the gradients in `main_grad`."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr)

    def step(self) -> None:
        """Update the parameters."""
        for parameter in self._parameters:
            # AdamW wants the gradient's type to be the parameter's. Where it is, this is no copy.
            parameter.grad = get_main_grad(parameter).to(parameter.dtype)
        self._optimizer.step()
        # Autograd makes gradients of its own, which the wrapper adds to the buffer; a view of the buffer would be added to.
        self._optimizer.zero_grad(set_to_none=True)


def get_main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a wrapped chunk's parameter: a view of the wrapper's buffer."""
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of `tensor`, as hexadecimal digits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return `digest_tensor` of each, in their order. The device must be done with them.

    Copies and hashes run in threads, which hold no lock of Python's meanwhile: in one, the gradients of a model that fills a
    GPU take longer than the step that made them.
    """
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_DIGEST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(digest_tensor, tensors.values()), strict=True))
