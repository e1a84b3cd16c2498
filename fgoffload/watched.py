"""Chooses which ops of a Megatron layer are watched, for the engine and the simulator."""

import enum
from collections.abc import Collection


class Watched(enum.Enum):
    """Ops of a layer that are watched for saves that share offloaded storages. See `OffloadEngine.watch`.

    Each watched save costs a few microseconds of CPU time in forward and backward, and a layer with experts has over a
    hundred: a view of the tokens and a weight for each expert.
    """

    LAYER = "the whole layer"
    FOLLOWED = "the whole layer, none of whose ops save an offloaded storage"
    ATTENTION = "only attention"
    NOTHING = "nothing"  # only the sites save offloaded storages

    @property
    def covers_layer(self) -> bool:
        """Return whether any unpacked tensor of the layer shows the position of backward."""
        return self in (Watched.LAYER, Watched.FOLLOWED)


_ALONE = frozenset(
    {"attn_norm", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act", "expert_fc2", "moe_combine", "fused_group_mlp"}
)
"""Tags whose storages no op outside of their sites saves: residual, inputs of attention's projections, the experts' tokens and
outputs."""

_IN_ATTENTION = frozenset({"core_attn", "attn_proj"})
"""Tags whose storages other ops of attention save too. The projection saves the output of core attention. The norms of query
and key save the storage of the value."""

_ROUTER = frozenset({"router"})
"""Tags whose input other modules may save too, such as shared experts."""


def find_watched(tags: Collection[str], *, shares_router_input: bool) -> Watched:
    """Return which ops of a layer to watch, by its offloaded `tags`.

    `shares_router_input`: other modules save the router's input hidden states too, such as shared experts or a recomputed
    permutation.
    """
    shared = set(tags) - _ALONE
    if shared == _ROUTER and not shares_router_input:
        return Watched.FOLLOWED
    if shared - _IN_ATTENTION:
        return Watched.LAYER
    return Watched.ATTENTION if shared else Watched.NOTHING
