"""What runs again by Megatron's own flags: its checkpoints copy what that returns to where forward had it.

By a plan it is handed on, and nobody copies. Source: `CheckpointWithoutOutput` of megatron/core/tensor_parallel/random.py,
megatron-core 0.16.1.
"""

import dataclasses
import functools

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.ranks.rank_model import RankModel


def copy_outputs(rank: RankModel) -> RankModel:
    """Return `rank` as it runs where Megatron's own flags say what runs again."""
    chunks = tuple(
        dataclasses.replace(
            chunk, layers=tuple(dataclasses.replace(layer, model=_copy_outputs(layer.model)) for layer in chunk.layers)
        )
        for chunk in rank.chunks
    )
    return dataclasses.replace(rank, chunks=chunks)


@functools.lru_cache(maxsize=256)
def _copy_outputs(layer: LayerModel) -> LayerModel:
    # One object for all who ask: simulations remember what they made of a layer, and look first whether it is the same object.
    units = tuple(
        dataclasses.replace(
            unit,
            extra_s=unit.extra_s + unit.copy_s,
            extra_bytes=unit.extra_bytes + unit.copy_bytes,
            copy_s=0.0,
            copy_bytes=0,
        )
        for unit in layer.units
    )
    return dataclasses.replace(layer, units=units)
