"""Rejects tags with no tensors to offload under Megatron's flags, before Megatron starts.

`apply` itself reports tags without a site only after the first step, because a process may train several models.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fgoffload.config import AUTO, OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.arguments import add_fine_grained_offload_args
from fgoffload.integrations.megatron.flags.field_flags import FlagParser, one_of
from fgoffload.integrations.megatron.flags.flag_sources import COMMAND_LINE
from fgoffload.integrations.megatron.graphs.graph_checks import check_graphs, has_dense_layers
from fgoffload.tags import RECOMPUTE_MODULES

_EXPERT_TAGS = ("router", "expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine", "shared_expert")
_STASHED_TAGS = ("expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp")
_DENSE_TAGS = ("mlp_fc1", "mlp_act", "mlp_fc2")
_RECOMPUTE_MODULES = (*RECOMPUTE_MODULES, "gdn_norm_out", "gdp_in_proj", "mhc")  # of all Megatron-Core versions
_OTHER_LAYERS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
    "is_hybrid_model",
    "use_checkpoint_args",
)
"""Fields that are set if the layers are defined elsewhere, in other flags or files."""


def check_replaced(words: Sequence[str]) -> None:
    """Raise a ConfigError if the flags for offload and recompute, which `fgoffload plan` replaces, would fail in training."""
    parser = add_fine_grained_offload_args(FlagParser(source=COMMAND_LINE))
    recompute = {"granularity": ("full", "selective"), "method": ("uniform", "block"), "modules": _RECOMPUTE_MODULES}
    for name, choices in recompute.items():
        parser.add_argument(f"--recompute-{name}", nargs="*", type=one_of(choices), default=[])
    flags, _ = parser.parse_known_args(["--fine-grained-activation-offloading", *words])
    modules = " ".join(flags.recompute_modules)
    if modules and "full" in flags.recompute_granularity:
        raise ConfigError(f"--recompute-granularity full and --recompute-modules {modules} are mutually exclusive. Remove one.")
    # `from_flags` requires a tag or a budget. The plan will replace these values.
    if not flags.offload_modules and not hasattr(flags, "offload_plan"):
        flags.offload_modules = ["attn_norm"]
    elif flags.offload_modules == [AUTO]:
        flags.offload_memory_budget = "1GiB"
    if (offload := OffloadConfig.from_flags(flags)) is not None:
        offload.check_recompute(flags.recompute_modules)


def check_tags(offload: OffloadConfig, values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for tags with no tensors to offload. The message names the tag, the flag and the fix.

    `values` maps fields of Megatron's `TransformerConfig` to the values from flags. Absent fields keep their defaults.
    """
    check_selective(offload, values)
    check_paged_stash(offload.offload_modules, values)
    check_graphs(offload, offload.offload_modules, values)
    if not offload.is_auto and offload.offload_plan is None:  # a plan decides what to recompute
        _check_recompute(offload, values)
    if not offload.is_auto and not any(values.get(field) for field in _OTHER_LAYERS):
        _check_model(offload.offload_modules, values)


def check_selective(offload: OffloadConfig, values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for tags whose saved tensors Megatron's selective recompute drops."""
    if values.get("recompute_granularity") == "selective":
        offload.check_recompute(values.get("recompute_modules") or ("core_attn",))


def check_paged_stash(tags: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raise a ConfigError for routed-expert tags whose saved tensors Megatron's paged stash already moves."""
    for name in tags:
        if values.get("moe_paged_stash") and name in _STASHED_TAGS:
            raise ConfigError(
                f"--offload-modules {name!r} and --moe-paged-stash are mutually exclusive: the stash moves the experts' saved "
                "tensors to its own pages, so nothing is left to offload. Remove one of them."
            )


def _check_recompute(offload: OffloadConfig, values: Mapping[str, Any]) -> None:
    is_full = values.get("recompute_granularity") == "full"
    is_uniform = is_full and values.get("recompute_method") == "uniform"
    for name in offload.offload_modules:
        if name == "layer_input" and not is_full:
            raise ConfigError(
                "--offload-modules 'layer_input' has no effect without full recompute. Pass --recompute-granularity full, or "
                "remove the tag."
            )
        if name != "layer_input" and is_uniform and name in offload.tags:
            raise ConfigError(
                f"--offload-modules {name!r} and --recompute-method uniform are mutually exclusive: every layer is recomputed "
                "as a whole and saves only its input. Use layer_input instead, or --recompute-method block."
            )


def _check_model(tags: Iterable[str], values: Mapping[str, Any]) -> None:
    experts = values.get("num_moe_experts")
    for name in tags:
        needs, flag = "", ""
        if name in _EXPERT_TAGS and not experts:
            needs, flag = "experts", "--num-experts"
        elif name == "shared_expert" and not values.get("moe_shared_expert_intermediate_size"):
            needs, flag = "shared experts", "--moe-shared-expert-intermediate-size"
        elif name in _DENSE_TAGS and experts and not has_dense_layers(values):
            needs = "dense layers"
        if needs:
            fix = f"Pass {flag}, or remove the tag" if flag else "Remove the tag"
            raise ConfigError(f"--offload-modules {name!r} needs {needs}, but this model has none. {fix}.")
