"""Reduces gradients with Megatron's data-parallel wrapper, hashes them, and updates the parameters."""

import concurrent.futures
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fgoffload.integrations.megatron.adapter.dispatchers import detach_routing
from fgoffload.integrations.megatron.patching.imports import ignore_expected_warnings, load_module
from fgoffload.trainer.training_arguments import TrainingArguments

_MAX_DIGEST_THREADS = 8
"""Maximum number of hashing threads. Each holds a copy of a tensor, and all ranks share their machine's memory and cores."""


def wrap_chunks(chunks: Sequence[torch.nn.Module], config: Any, arguments: TrainingArguments) -> list[Any]:
    """Wrap each model chunk for data parallelism.

    Gradients accumulate in each parameter's `main_grad`, and Megatron reduces them over all groups at the end of backward.
    For bitwise comparison, communication does not overlap with compute, and optimizer state is not sharded.
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
    """Release the autograd graph of the last microbatch, which token dispatchers reference through routing probabilities.

    The graph also references the dispatchers. Python's garbage collector cannot detect this cycle through autograd.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "token_dispatcher"):
            detach_routing(module.token_dispatcher)


class MainGradOptimizer:
    """AdamW that reads gradients from `main_grad`."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, lr: float) -> None:
        self._parameters = list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr)

    def step(self) -> None:
        """Update the parameters."""
        for parameter in self._parameters:
            # AdamW requires gradients of the parameter's dtype. `to` copies only if the dtypes differ.
            parameter.grad = get_main_grad(parameter).to(parameter.dtype)
        self._optimizer.step()
        # Otherwise, autograd would accumulate into `grad`, which may be a view of the wrapper's buffer.
        self._optimizer.zero_grad(set_to_none=True)


def get_main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of a wrapped chunk's parameter, which is a view of the wrapper's buffer."""
    gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of `tensor`, as hexadecimal digits."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the result of `digest_tensor` for each tensor, in order. The device must have finished all work on the tensors.

    Copies and hashes run in several threads and release the GIL. In one thread, they would take longer than a step.
    """
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_DIGEST_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(digest_tensor, tensors.values()), strict=True))
