"""Rejects unsupported combinations of CUDA graphs and offload."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fgoffload.config import OffloadConfig
from fgoffload.cuda_graphs import FULL_ITERATION, LOCAL, NO_GRAPHS, TRANSFORMER_ENGINE, Graphs, find_captured, find_kept
from fgoffload.errors import ConfigError, PlanError
from fgoffload.planner.model.model_shape import list_moe_layers

logger = logging.getLogger(__name__)


def check_graphs(offload: OffloadConfig, selected: Sequence[str], values: Mapping[str, Any]) -> None:
    """Reject tags that cannot be offloaded under the run's CUDA graphs. The ConfigError names the tag, the flag and the fix.

    `values` are Megatron's flags as fields of its `TransformerConfig`. Missing fields keep their defaults.
    """
    impl, modules = read_graphs(values)
    if offload.delay_offload_until_cuda_graph and impl != TRANSFORMER_ENGINE:
        logger.warning(
            "--delay-offload-until-cuda-graph has no effect with --cuda-graph-impl %s. It needs transformer_engine.", impl
        )
    if impl == NO_GRAPHS:
        return
    if offload.is_auto:
        raise ConfigError(
            f"--offload-modules auto measures modules in eager steps, but --cuda-graph-impl {impl} replays graphs without "
            "running them. Make a plan with fgoffload plan, or select tags."
        )
    has_experts = bool(values.get("num_moe_experts"))
    if not values.get("moe_paged_stash"):
        for fault in list_dropless_faults(impl, values):
            raise ConfigError(fault)
    kept = find_kept(impl, modules, is_moe=has_experts, has_shared_overlap=bool(values.get("moe_shared_expert_overlap")))
    if has_experts and has_dense_layers(values):  # the tag may still be offloaded in dense layers
        kept = {tag: why for tag, why in kept.items() if tag in find_kept(impl, modules, is_moe=False)}
    for tag in selected:
        if tag in kept:
            raise ConfigError(
                f"--offload-modules {tag!r} and --cuda-graph-impl {impl} are mutually exclusive: {kept[tag]}. Remove one."
            )


def check_recompute(units: Iterable[str], values: Mapping[str, Any], *, layer: int, is_moe: bool) -> None:
    """Raise a PlanError if a plan recomputes a captured module. The message names the unit and the fix."""
    impl, modules = read_graphs(values)
    captured = find_captured(impl, modules, is_moe=is_moe, has_shared_overlap=bool(values.get("moe_shared_expert_overlap")))
    for unit in units:
        if unit in captured:
            raise PlanError(
                f"The plan recomputes layers.{layer}.{unit}, but --cuda-graph-impl {impl} captures it, and a plan cannot "
                "recompute inside a graph. Pass the graph flags to fgoffload plan, or use Megatron's --recompute-modules."
            )


def read_graphs(values: Mapping[str, Any]) -> Graphs:
    """Return the CUDA graph options, converted from older versions to the names in megatron-core 0.19."""
    impl = str(values.get("cuda_graph_impl") or NO_GRAPHS)
    given = values.get("cuda_graph_modules")
    if given is None:
        given = values.get("cuda_graph_scope")
    names = [given] if isinstance(given, str) else (given or [])
    modules = [str(getattr(name, "name", name)) for name in names]
    if impl == LOCAL and FULL_ITERATION in modules:
        return Graphs(FULL_ITERATION)
    return Graphs(impl, tuple(name for name in modules if name not in ("full", FULL_ITERATION)))


def list_dropless_faults(impl: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error if a full-iteration graph would capture experts without a fixed capacity."""
    is_padded = values.get("moe_expert_capacity_factor") is not None and values.get("moe_pad_expert_input_to_capacity")
    if impl == FULL_ITERATION and values.get("num_moe_experts") and not is_padded:
        yield (
            f"--cuda-graph-impl {impl}: dropless routing synchronizes on the token counts, which a graph cannot capture. Pass "
            "--moe-expert-capacity-factor 1.0 and --moe-pad-expert-input-to-capacity, or remove --cuda-graph-impl."
        )


def has_dense_layers(values: Mapping[str, Any]) -> bool:
    """Return whether a model with experts may also have dense layers. True if the number of layers is unknown."""
    num_layers = values.get("num_layers")
    return not num_layers or not all(list_moe_layers(values.get("moe_layer_freq") or 1, num_layers=num_layers))
