"""Defines the tags whose tensors users can offload, and the units that a plan can recompute.

Source of Megatron's tags and of the rule that `attn_proj` needs `core_attn`: the check of `offload_modules` in
`TransformerConfig.__post_init__`, megatron-core 0.16.1.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator

from fgoffload.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Module whose saved tensors users can offload.

    Args:
        name: Name for `--offload-modules`.
        saves: Description of the tensors that the module saves for backward.
        requires: Tags that save the same storage. Offloading this tag without them frees nothing.
        excludes: Tags that never occur in the same layer, because this tag's module replaces their modules.
        excluded_by: Values of `--recompute-modules` with which the module saves nothing to offload.
        is_in_megatron: Whether Megatron-Core's own `offload_modules` accepts the tag.
    """

    name: str
    saves: str
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    excluded_by: tuple[str, ...] = ()
    is_in_megatron: bool = False

    def __post_init__(self) -> None:
        """Reject names that are not identifiers."""
        if not self.name.isidentifier():
            raise ConfigError(f"tag name {self.name!r} is not an identifier. Use letters, digits and underscores.")


@dataclasses.dataclass(frozen=True, slots=True)
class TagRegistry:
    """Immutable set of tags, in forward order.

    Two models in one process can use different registries. Add your own tags with `with_tag`:

        tags = default_tags().with_tag(Tag(name="my_router", saves="router logits"))
        config = OffloadConfig(offload_modules=("my_router",), tags=tags)

    Args:
        tags: Tags with unique names.
    """

    tags: tuple[Tag, ...]

    def __post_init__(self) -> None:
        """Reject duplicate names, and tags that require an unregistered tag."""
        names = self.names
        for tag in self.tags:
            if names.count(tag.name) > 1:
                raise ConfigError(f"tag {tag.name!r} is registered twice. Use a different name for each tag.")
            for required in tag.requires:
                if required not in names:
                    raise ConfigError(f"tag {tag.name!r} requires {required!r}, which is not registered. Register it first.")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tags in registry order."""
        return tuple(tag.name for tag in self.tags)

    def __iter__(self) -> Iterator[Tag]:
        """Iterate over the tags in registry order."""
        return iter(self.tags)

    def __contains__(self, name: object) -> bool:
        """Return whether a tag of this name is registered."""
        return name in self.names

    def get(self, name: str, *, flag: str = "--offload-modules") -> Tag:
        """Return the tag called `name`.

        Args:
            name: Name as the user typed it.
            flag: Flag to quote in the error message.

        Raises:
            ConfigError: The tag is unknown. The message lists the valid tags and suggests the closest match.
        """
        for tag in self.tags:
            if tag.name == name:
                return tag
        if "," in name:
            separated = " ".join(name.replace(",", " ").split())
            raise ConfigError(f"{flag} {name!r} is not a tag. Separate tags with spaces, for example {flag} {separated}.")
        nearest = difflib.get_close_matches(name, self.names, n=1, cutoff=0.6)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        if find_recompute_unit(name) is not None:
            hint = " A plan can recompute it, but it has no tensors to offload."
        raise ConfigError(f"{flag} {name!r} is not a tag.{hint} Valid tags: {' '.join(self.names)}.")

    def get_place(self, name: str) -> tuple[int, str]:
        """Return a sort key that puts names in registry order, unregistered names last."""
        return (self.names.index(name) if name in self.names else len(self.tags), name)

    def with_tag(self, tag: Tag) -> "TagRegistry":
        """Return a registry with `tag` appended.

        Raises:
            ConfigError: The name is taken, or a required tag is missing.
        """
        return TagRegistry((*self.tags, tag))

    def check(self, names: Iterable[str], *, flag: str = "--offload-modules") -> tuple[Tag, ...]:
        """Return the tags called `names` after checking that they can be offloaded together.

        Raises:
            ConfigError: A name is unknown or repeated, a required tag is missing, or two tags are mutually exclusive.
        """
        chosen = tuple(self.get(name, flag=flag) for name in names)
        chosen_names = [tag.name for tag in chosen]
        for tag in chosen:
            if chosen_names.count(tag.name) > 1:
                raise ConfigError(f"{flag} lists {tag.name!r} twice. List each tag once.")
            for excluded in tag.excludes:
                if excluded in chosen_names:
                    raise ConfigError(f"{flag} lists {tag.name!r} and {excluded!r}, but no layer has both. Remove one of them.")
            for required in tag.requires:
                if required not in chosen_names:
                    raise ConfigError(
                        f"{flag} {tag.name!r} needs {required!r}: both save the same storage, so {tag.name!r} alone frees "
                        f"nothing. Add {required!r} or remove {tag.name!r}."
                    )
        return chosen


@functools.cache
def default_tags() -> TagRegistry:
    """Return the built-in tags, in forward order."""
    return TagRegistry(_DEFAULT_TAGS)


_DEFAULT_TAGS = (
    Tag(name="layer_input", saves="the layer's input, if the whole layer is recomputed"),
    Tag(name="attn_norm", saves="the layer's input, which is also the input to the norm", is_in_megatron=True),
    Tag(name="qkv_linear", saves="the norm's output, the input to the query-key-value projection", is_in_megatron=True),
    Tag(
        name="gdp_qkv",
        saves="the convolution input and the normalized query and key of a gated delta product",
        excluded_by=("gdp_in_proj",),
    ),
    Tag(
        name="core_attn",
        saves="query, key and value, the attention output, and the softmax statistics",
        excluded_by=("core_attn",),
        is_in_megatron=True,
    ),
    Tag(
        name="attn_proj",
        saves="the attention output, in the same storage as for core_attn",
        requires=("core_attn",),
        is_in_megatron=True,
    ),
    Tag(name="mlp_norm", saves="the residual after attention, the input to the norm before the MLP", is_in_megatron=True),
    Tag(name="mlp_fc1", saves="the norm's output, the input to a dense MLP's first linear", excluded_by=("mlp",)),
    Tag(name="mlp_act", saves="the output of a dense MLP's first linear", excluded_by=("mlp",)),
    Tag(name="mlp_fc2", saves="the activation's output, the input to a dense MLP's second linear", excluded_by=("mlp",)),
    Tag(
        name="shared_expert",
        saves="the shared experts' input, and the input and output of their activation",
        excluded_by=("moe", "shared_experts"),
    ),
    Tag(name="router", saves="the router's input, logits and probabilities", excluded_by=("moe",)),
    Tag(
        name="expert_fc1",
        saves="the permuted tokens, the input to the experts' first linear",
        excluded_by=("moe",),
        is_in_megatron=True,
    ),
    Tag(name="moe_act", saves="the output of the experts' first linear", excluded_by=("moe",), is_in_megatron=True),
    Tag(
        name="expert_fc2",
        saves="the activation's output, the input to the experts' second linear",
        excluded_by=("moe", "moe_act"),
    ),
    Tag(
        name="fused_group_mlp",
        saves="the tensors that Transformer Engine's fused grouped MLP saves for its linear layers and its activation",
        excludes=("expert_fc1", "moe_act", "expert_fc2"),
        excluded_by=("moe",),
    ),
    Tag(
        name="moe_combine",
        saves="the experts' output, if the dispatcher multiplies it by the router's probabilities in unpermute",
        excluded_by=("moe",),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeUnit:
    """Part of a layer that a plan can recompute to save fewer tensors. Each layer can recompute different units."""

    name: str
    """Name in plans. If the unit is a tag's module, it has the tag's name."""
    recompute_module: str | None = None
    """Value of `--recompute-modules` that recomputes the same part in all layers, or None."""
    covers: tuple[str, ...] = ()
    """Tags and units of the layer that are recomputed with this unit and so save nothing."""
    excludes: tuple[str, ...] = ()
    """Units of the layer that cannot be recomputed together with this unit."""
    reads: tuple[str, ...] = ()
    """Tags that save the unit's inputs but are not recomputed with it."""


_MOE_TAGS = ("shared_expert", "router", "expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine")
_MLP_TAGS = ("mlp_fc1", "mlp_act", "mlp_fc2")
_ATTENTION_TAGS = ("attn_norm", "qkv_linear", "gdp_qkv", "core_attn", "attn_proj")

RECOMPUTE_UNITS = (
    RecomputeUnit(
        name="layer",  # recomputed from its input
        covers=(*_ATTENTION_TAGS, "mla_up_proj", "mlp_norm", "mlp", *_MLP_TAGS, "moe", *_MOE_TAGS, "dispatch"),
    ),
    RecomputeUnit(name="attn_norm", recompute_module="layernorm"),
    RecomputeUnit(name="qkv_linear", excludes=("core_attn",)),  # includes the fused norm and rotary embeddings
    RecomputeUnit(name="mla_up_proj", recompute_module="mla_up_proj"),
    RecomputeUnit(name="core_attn", recompute_module="core_attn", covers=("core_attn",)),  # attention without its projections
    RecomputeUnit(name="mlp_norm", recompute_module="layernorm"),
    RecomputeUnit(name="mlp_fc1", covers=("mlp_act", "mlp_fc2")),  # includes the fused norm and the activation
    RecomputeUnit(name="mlp", recompute_module="mlp", covers=_MLP_TAGS),  # a dense MLP
    RecomputeUnit(name="moe", recompute_module="moe", covers=(*_MOE_TAGS, "dispatch")),  # router, dispatch and all experts
    RecomputeUnit(name="shared_expert", recompute_module="shared_experts", covers=("shared_expert",)),
    RecomputeUnit(name="expert_fc1", covers=("moe_act", "expert_fc2")),  # includes the activation
    RecomputeUnit(name="moe_act", recompute_module="moe_act", covers=("expert_fc2",)),  # the activation of the experts
    RecomputeUnit(
        name="dispatch",  # the token permutation; possible only if each rank has all experts
        covers=("expert_fc1",),  # the tag with this name
        excludes=("expert_fc1",),  # the unit with this name, which is recomputed from the tag's tensors
        reads=("router",),
    ),
)
"""Source: `TransformerConfig.recompute_modules`, megatron-core 0.16.1, with a separate unit for each norm. Megatron has no flag
for units without a `recompute_module` (see `partial_recompute.py` in the Megatron integration)."""


RECOMPUTE_MODULES = tuple(dict.fromkeys(unit.recompute_module for unit in RECOMPUTE_UNITS if unit.recompute_module))
"""Distinct values of `recompute_module` among all units."""


_UNITS_BY_NAME = {unit.name: unit for unit in RECOMPUTE_UNITS}


def find_recompute_unit(name: str) -> RecomputeUnit | None:
    """Return the unit called `name`, or None."""
    return _UNITS_BY_NAME.get(name)


def list_read_tags(units: Iterable[str]) -> set[str]:
    """Return the tags that save the inputs of `units` but are not recomputed with them."""
    return {tag for unit in map(find_recompute_unit, units) if unit is not None for tag in unit.reads}
