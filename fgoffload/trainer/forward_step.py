"""Runs one microbatch through a model chunk, as Megatron's schedules require."""

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
    """Runs a chunk on the next prepared microbatch.

    A call neither waits for the device nor copies to it, so that a CUDA graph can capture the call. `prepare` does both first.
    """

    def __init__(self, arguments: TrainingArguments, device: torch.device) -> None:
        self._arguments = arguments
        self._device = device

    def prepare(self, batch: Microbatch) -> dict[str, Any]:
        """Return this rank's part of a microbatch, on its device, as keyword arguments of the chunk."""
        length = batch.tokens.shape[1]
        bounds = find_packed_bounds(length, self._share) if self._arguments.packed_sequences else None
        positions = batch.position_ids if bounds is None else restart_positions(batch.position_ids, bounds)
        indices = self._find_own_tokens(bounds or [0, length])
        tensors = {"tokens": batch.tokens, "labels": batch.labels, "loss_mask": batch.loss_mask, "position_ids": positions}
        own = {
            name: (tensor if indices is None else tensor.index_select(1, indices)).to(self._device)
            for name, tensor in tensors.items()
        }
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
        run = get_unwrapped(chunk).build_schedule_plan if return_schedule_plan else chunk
        output = run(
            batch["tokens"],
            batch["position_ids"],
            None,  # no mask: attention builds the causal mask itself
            labels=batch["labels"],
            loss_mask=loss_mask,
            packed_seq_params=batch["packed_seq_params"],
        )
        return output, functools.partial(_compute_loss, loss_mask)

    @property
    def _share(self) -> int:
        """Number of parts into which context-parallel ranks cut a sequence."""
        size = self._arguments.context_parallel_size
        return 2 * size if size > 1 else 1

    def _find_own_tokens(self, bounds: Sequence[int]) -> torch.Tensor | None:
        """Return the tokens of a microbatch that belong to this context-parallel rank, or None for all."""
        size = self._arguments.context_parallel_size
        if size == 1:
            return None
        rank = int(load_module("megatron.core.parallel_state").get_context_parallel_rank())
        return find_context_parallel_tokens(bounds, rank=rank, size=size)

    def _pack(self, bounds: Sequence[int]) -> Any:
        lengths = torch.tensor(bounds, dtype=torch.int32, device=self._device)
        longest = max(after - before for before, after in itertools.pairwise(bounds))
        return load_module("megatron.core.packed_seq_params").PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def get_unwrapped(chunk: Any) -> Any:
    """Return the model inside its wrappers for data parallelism and half precision."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def find_packed_bounds(length: int, multiple: int = 1) -> list[int]:
    """Return the bounds of the sequences packed into one of `length` tokens: a half, a quarter, and the rest."""
    parts = length // multiple
    return [multiple * bound for bound in sorted({0, parts // 2, 3 * parts // 4, parts})]


def find_context_parallel_tokens(bounds: Sequence[int], *, rank: int, size: int) -> torch.Tensor:
    """Return the tokens of one context-parallel rank, as Megatron and Transformer Engine cut sequences.

    Each sequence is cut into `2 * size` parts. A rank gets one part from the front and the matching one from the back, since
    later parts cost more in causal attention.

    Args:
        bounds: Bounds of the sequences, whose lengths are multiples of `2 * size`.
        rank: Context-parallel rank, from 0.
        size: Number of context-parallel ranks.
    """
    indices = []
    for begin, end in itertools.pairwise(bounds):
        part = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            indices.append(torch.arange(begin + number * part, begin + (number + 1) * part))
    return torch.cat(indices)


def restart_positions(position_ids: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Restart positions, `[b, s]`, at 0 in every packed sequence."""
    starts = torch.zeros(position_ids.shape[1], dtype=position_ids.dtype)
    for begin, end in itertools.pairwise(bounds):
        starts[begin:end] = begin
    return position_ids - starts


def _compute_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and the mean for reports.

    Megatron divides the sum in place, by the tokens and by the number of microbatches.

    Args:
        loss_mask: Mask of counted losses, `[b, s]`.
        output: Loss of each token, `[b, s]`.
    """
    loss = (output.float() * loss_mask).sum()
    tokens = loss_mask.sum()
    return loss, tokens.detach().to(torch.int), {LOSS: (loss / tokens).detach().clone()}
