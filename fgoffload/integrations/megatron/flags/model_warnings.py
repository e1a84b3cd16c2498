"""What a plan says of Megatron's flags before it takes a model for another than they may mean."""

import logging
from collections.abc import Mapping
from typing import Any

from fgoffload.captured_tags import NO_GRAPHS
from fgoffload.integrations.megatron.flags.parallel_flags import MICROBATCHES_OF_A_CHUNK
from fgoffload.integrations.megatron.graphs.graph_checks import read_graphs
from fgoffload.planner.model.parallelism import Parallelism

logger = logging.getLogger(__name__)

_COVERED_LAYERS = "transformer_engine"
"""Megatron's default, and what the formulas are of."""

_KEEPING_SCORES = ("unfused", "local")
"""Backends of attention that make the scores a tensor. Source: `AttnBackend` of megatron-core 0.16.1."""


def warn_of_flags(values: Mapping[str, Any], parallelism: Parallelism, source: str) -> None:
    """Say what flags leave out where that is easily not what is meant, and what of them no formula covers.

    Args:
        values: By name of a flag, with `_` for `-`. A flag that is absent has no entry.
        parallelism: What they make of ranks and microbatches.
        source: Where they came from.
    """
    if "num_experts" in values and "moe_token_dispatcher_type" not in values:
        logger.warning(
            "%s: without --moe-token-dispatcher-type a plan takes alltoall; Megatron's default, allgather, is not covered.",
            source,
        )
    if "num_experts" in values and not values.get("moe_grouped_gemm"):
        logger.warning(
            "%s: without --moe-grouped-gemm a plan takes grouped experts. Others save other tensors, which a profile alone "
            "knows, and Megatron recomputes no moe_act in them.",
            source,
        )
    if values.get("transformer_impl", _COVERED_LAYERS) != _COVERED_LAYERS:
        logger.warning(
            "%s: --transformer-impl %s saves other tensors than Transformer Engine's layers, which a plan takes: a profile "
            "alone knows them.",
            source,
            values["transformer_impl"],
        )
    if read_graphs(values).impl != NO_GRAPHS:
        logger.warning(
            "%s: a plan does not count what pools of CUDA graphs hold beyond tensors that are in use: a step reserves more.",
            source,
        )
    if values.get("attention_backend") in _KEEPING_SCORES:
        logger.warning(
            "%s: --attention-backend %s saves the scores of each pair of tokens, which a profile alone knows. A plan takes "
            "fused attention, which saves none.",
            source,
            values["attention_backend"],
        )
    if "global_batch_size" not in values and parallelism.pipeline_parallel_size > 1:
        logger.warning(
            "%s: without --global-batch-size a step is 1 microbatch, as in Megatron, which fills no pipeline. "
            "Give it, as in --global-batch-size %d.",
            source,
            MICROBATCHES_OF_A_CHUNK
            * parallelism.pipeline_parallel_size
            * parallelism.chunks
            * parallelism.micro_batch_size
            * parallelism.data_parallel_size,
        )
