"""Which ops of a Megatron layer are watched where some of its tags leave: the engine's rule, and the simulator's."""

import enum
from collections.abc import Iterable


class Watched(enum.Enum):
    """Which ops of a layer are watched, for what they save of storages that leave: see `OffloadEngine.watch`.

    Each tensor that autograd saves inside costs the host a few microseconds both ways, and a layer with experts saves over a
    hundred: a view of the tokens and a weight for each expert.
    """

    LAYER = "all of it"
    ATTENTION = "attention alone"
    NOTHING = "nothing"  # nobody but the sites themselves saves what leaves


_ALONE = frozenset({"mlp_norm", "expert_fc1", "moe_act", "expert_fc2", "moe_combine", "fused_group_mlp"})
"""Tags whose storages no op outside of their sites saves: the residual, the experts' tokens and what they compute."""

_IN_ATTENTION = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj"})
"""Tags whose storages ops of attention save too: the rotary embedding, for one, looks at query, key and value as one."""


def find_watched(tags: Iterable[str]) -> Watched:
    """Return what of a layer has to be watched where `tags` leave."""
    shared = set(tags) - _ALONE
    if shared - _IN_ATTENTION:
        return Watched.LAYER
    return Watched.ATTENTION if shared else Watched.NOTHING
