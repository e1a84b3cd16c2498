"""Which ops of a Megatron layer are watched where some of its tags leave: the engine's rule, and the simulator's."""

import enum
from collections.abc import Collection


class Watched(enum.Enum):
    """Which ops of a layer are watched, for what they save of storages that leave: see `OffloadEngine.watch`.

    Each tensor that autograd saves inside costs the host a few microseconds both ways, and a layer with experts saves over a
    hundred: a view of the tokens and a weight for each expert.
    """

    LAYER = "all of it"
    FOLLOWED = "all of it, and nothing that leaves is among it"
    ATTENTION = "attention alone"
    NOTHING = "nothing"  # nobody but the sites themselves saves what leaves

    @property
    def covers_layer(self) -> bool:
        """Return whether what backward takes anywhere in the layer tells how far it has come."""
        return self in (Watched.LAYER, Watched.FOLLOWED)


_ALONE = frozenset(
    {"attn_norm", "qkv_linear", "mlp_norm", "expert_fc1", "moe_act", "expert_fc2", "moe_combine", "fused_group_mlp"}
)
"""Tags whose storages no op outside of their sites saves: the residual, what the projections of attention multiply, the
experts' tokens and what they compute."""

_IN_ATTENTION = frozenset({"core_attn", "attn_proj"})
"""Tags whose storages ops of attention save too: the projection what core attention returns, norms of query and key the storage
that the value lies in."""

_ROUTER = frozenset({"router"})
"""Whose input others may save too, as shared experts do."""


def find_watched(tags: Collection[str], *, shares_router_input: bool) -> Watched:
    """Return what of a layer has to be watched where `tags` leave.

    Args:
        tags: Of the layer.
        shares_router_input: Whether something else than the router saves the hidden states that it gets, as shared experts do,
            and a permutation that runs again.
    """
    shared = set(tags) - _ALONE
    if shared == _ROUTER and not shares_router_input:
        return Watched.FOLLOWED
    if shared - _IN_ATTENTION:
        return Watched.LAYER
    return Watched.ATTENTION if shared else Watched.NOTHING
