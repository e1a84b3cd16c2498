"""Adds the cost of output copies to recompute, for baselines with Megatron's own recompute flags.

Megatron's checkpoints copy a recomputed output into the storage of the original one. Plans do not need these copies. Source:
`CheckpointWithoutOutput` of megatron/core/tensor_parallel/random.py, megatron-core 0.16.1.
"""

import dataclasses
import functools

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel


def copy_outputs(rank: RankModel) -> RankModel:
    """Return `rank` with the cost of output copies added to every recompute unit."""
    return dataclasses.replace(rank, chunks=tuple(chunk.replace_models(_copy_outputs) for chunk in rank.chunks))


@functools.lru_cache(maxsize=256)
def _copy_outputs(layer: LayerModel) -> LayerModel:
    # Cached, so that all callers get the same object: caches of simulation results compare layers by identity first.
    units = tuple(
        dataclasses.replace(
            unit, extra_s=unit.extra_s + unit.copy_s, extra_bytes=unit.extra_bytes + unit.copy_bytes, copy_s=0.0, copy_bytes=0
        )
        for unit in layer.units
    )
    return dataclasses.replace(layer, units=units)
