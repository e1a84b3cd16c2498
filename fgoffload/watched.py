"""Chooses which ops of a Megatron layer the engine watches. The simulator uses the same rules."""

import enum
from collections.abc import Collection


class Watched(enum.Enum):
    """Ops of a layer, outside its sites, that the engine watches. See `OffloadEngine.watch` and `OffloadEngine.follow`.

    Each watched save costs a few microseconds of CPU time in forward and in backward. A layer with experts can save over a
    hundred tensors: a view of the tokens and a weight for each expert.
    """

    LAYER = "the whole layer"
    FOLLOWED = "the whole layer, only to track backward"  # no op outside the sites saves an offloaded storage
    ATTENTION = "only attention"
    NOTHING = "nothing"  # no op outside the sites saves an offloaded storage

    @property
    def covers_layer(self) -> bool:
        """Return whether unpacking any tensor of the layer shows the position of backward."""
        return self in (Watched.LAYER, Watched.FOLLOWED)


_ALONE = frozenset(
    {"attn_norm", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act", "expert_fc2", "moe_combine", "fused_group_mlp"}
)
"""Tags whose storages are saved only inside their sites: the residual, the input to the query-key-value projection, and the
experts' tokens and outputs."""

_IN_ATTENTION = frozenset({"core_attn", "attn_proj"})
"""Tags whose storages are also saved by other ops of attention. The projection saves the output of core attention. The query
and key norms save a storage that also holds the value."""


def find_watched(tags: Collection[str], *, shares_router_input: bool) -> Watched:
    """Return which ops of a layer to watch if `tags` are offloaded.

    `shares_router_input` is true if other modules, such as shared experts or a recomputed permutation, save the router's input.
    """
    shared = set(tags) - _ALONE
    if shared == {"router"} and not shares_router_input:
        return Watched.FOLLOWED
    if shared - _IN_ATTENTION:
        return Watched.LAYER
    return Watched.ATTENTION if shared else Watched.NOTHING
