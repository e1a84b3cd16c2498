"""Adds the extra cost of recompute under Megatron's own flags, whose checkpoints copy recomputed outputs into place.

Under a plan, recomputed outputs are not copied. Source: `CheckpointWithoutOutput` of megatron/core/tensor_parallel/random.py,
megatron-core 0.16.1.
"""

import dataclasses
import functools

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel


def copy_outputs(rank: RankModel) -> RankModel:
    """Add the cost of output copies to every recompute of `rank`, as under Megatron's own flags."""
    return dataclasses.replace(rank, chunks=tuple(chunk.replace_models(_copy_outputs) for chunk in rank.chunks))


@functools.lru_cache(maxsize=256)
def _copy_outputs(layer: LayerModel) -> LayerModel:
    # Returns one object to all callers: simulations cache their results per layer, and compare layers by identity first.
    units = tuple(
        dataclasses.replace(
            unit, extra_s=unit.extra_s + unit.copy_s, extra_bytes=unit.extra_bytes + unit.copy_bytes, copy_s=0.0, copy_bytes=0
        )
        for unit in layer.units
    )
    return dataclasses.replace(layer, units=units)
