"""Forward step for Megatron's schedules: runs a microbatch through a model chunk."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fgoffload.integrations.megatron.patching.imports import load_module
from fgoffload.trainer.data import Microbatch
from fgoffload.trainer.training_arguments import TrainingArguments

LOSS = "lm loss"
"""Key under which the schedules return the loss of each microbatch."""


class ForwardStep:
    """Runs a chunk on the next microbatch from `prepare`.

    A CUDA graph can capture a call, because only `prepare` copies to the device and synchronizes with it.
    """

    def __init__(self, arguments: TrainingArguments, device: torch.device) -> None:
        self._arguments = arguments
        self._device = device

    def prepare(self, batch: Microbatch) -> dict[str, Any]:
        """Return this rank's part of a microbatch on the rank's device."""
        length, size = batch.tokens.shape[1], self._arguments.context_parallel_size
        bounds = None
        if self._arguments.packed_sequences:
            bounds = find_packed_bounds(length, 2 * size if size > 1 else 1)
            batch = batch._replace(position_ids=_restart_positions(batch.position_ids, bounds))
        tensors = batch._asdict()
        if size > 1:
            rank = int(load_module("megatron.core.parallel_state").get_context_parallel_rank())
            indices = find_context_parallel_tokens(bounds or [0, length], rank=rank, size=size)
            tensors = {name: tensor.index_select(1, indices) for name, tensor in tensors.items()}
        own = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        return {**own, "packed_seq_params": None if bounds is None else self._pack(bounds)}

    def __call__(
        self,
        microbatches: Iterator[Mapping[str, Any]],
        chunk: torch.nn.Module,
        return_schedule_plan: bool = False,  # noqa: FBT001, FBT002 - Megatron's signature
    ) -> tuple[Any, Any]:
        """Return the chunk's output, or its schedule plan, and a function that computes the loss from the output."""
        batch = next(microbatches)
        loss_mask = batch["loss_mask"]
        run = _unwrap(chunk).build_schedule_plan if return_schedule_plan else chunk
        output = run(
            batch["tokens"],
            batch["position_ids"],
            None,  # attention creates its own causal mask
            labels=batch["labels"],
            loss_mask=loss_mask,
            packed_seq_params=batch["packed_seq_params"],
        )
        return output, functools.partial(_compute_loss, loss_mask)

    def _pack(self, bounds: Sequence[int]) -> Any:
        lengths = torch.tensor(bounds, dtype=torch.int32, device=self._device)
        longest = max(after - before for before, after in itertools.pairwise(bounds))
        return load_module("megatron.core.packed_seq_params").PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest
        )


def _unwrap(chunk: Any) -> Any:
    """Return the model inside its wrappers for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def find_packed_bounds(length: int, multiple: int = 1) -> list[int]:
    """Return the bounds of packed sequences with 1/2, 1/4 and 1/4 of `length` tokens, rounded to multiples of `multiple`."""
    parts = length // multiple
    return [multiple * bound for bound in sorted({0, parts // 2, 3 * parts // 4, parts})]


def find_context_parallel_tokens(bounds: Sequence[int], *, rank: int, size: int) -> torch.Tensor:
    """Return the token indices of one context-parallel rank, split as in Megatron and Transformer Engine.

    Each sequence between two `bounds` is split into `2 * size` parts. A rank gets one part from the front and the mirrored part
    from the back, because later parts take more time in causal attention.
    """
    indices = []
    for begin, end in itertools.pairwise(bounds):
        part = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            indices.append(torch.arange(begin + number * part, begin + (number + 1) * part))
    return torch.cat(indices)


def _restart_positions(position_ids: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Return the positions, `[b, s]`, restarted at 0 in every packed sequence."""
    starts = torch.zeros(position_ids.shape[1], dtype=position_ids.dtype)
    for begin, end in itertools.pairwise(bounds):
        starts[begin:end] = begin
    return position_ids - starts


def _compute_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and the mean loss. Both arguments are `[b, s]`.

    Megatron divides the sum in place by the numbers of tokens and microbatches.
    """
    loss = (output.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return loss, tokens.detach().to(torch.int), {LOSS: (loss / tokens).detach().clone()}
