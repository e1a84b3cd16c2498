"""What a training is taken for whose host launches kernels late: one in which copies cost compute more.

[Note: A late host]
Where each layer lets the host wait, as token dispatchers do, the host begins anew in each layer, and some hosts need longer for
the launches of a layer than the device does for its kernels. All that slows such a host is on the clock, and copies do: on
three machines with an H100 a look-up that misses caches took 1.16 to 1.29 times as long beside copies to the host, and 1.36 to
1.85 times as long beside copies both ways. What the engine does for each group comes on top. Neither a hardware table nor a
profile knows which host a training will have, or who shares it. So there is a plan for either, and a few steps say which one is
faster.
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.planner.ranks.rank_model import LinkModel, RankModel

LATE_HOST_SLOWDOWN = 0.2
"""What compute of a training takes longer beside copies, as a part, with such a host. Source: plans of W2 for 20.2, 18.9, 16.5
and 14.6 GiB took on an H100 what a slowdown of 0.07, 0.22, 0.24 and 0.19 says (docs/results/w2_moe_h100_202611.md)."""


def assume_late_host(ranks: Sequence[RankModel]) -> tuple[RankModel, ...]:
    """Return `ranks` as they are with a host that launches late. See [Note: A late host].

    Args:
        ranks: The pipeline, by number.
    """
    return tuple(dataclasses.replace(rank, link=_slow_down(rank.link)) for rank in ranks)


def _slow_down(link: LinkModel) -> LinkModel:
    return dataclasses.replace(link, compute_slowdown=max(link.compute_slowdown, LATE_HOST_SLOWDOWN))
