"""The order in which a rising price of device memory changes the treatments of a rank's layers.

At a price per offloaded byte, each kind of layer has a treatment with the least time for each number of kept bytes. These form
a convex curve from keeping everything to keeping least, and each of its steps frees bytes at a price. Steps are taken cheapest
first, in early layers before late ones: early layers have the most time before backward needs them.
"""

from collections.abc import Callable, Mapping, Sequence

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.solving.states import LayerSlot
from fgoffload.planner.solving.treatments import Treatment


def list_price_steps(
    slots: Sequence[LayerSlot],
    treatments: Mapping[LayerModel, Sequence[Treatment]],
    *,
    s_per_moved_byte: float,
    s_per_group: float,
) -> list[tuple[int, Treatment]]:
    """Return places of layers and their next treatments, cheapest first. All layers keep everything before the first.

    Args:
        slots: The layers.
        treatments: Treatments of each kind; the first keeps everything.
        s_per_moved_byte: Price of an offloaded byte, in seconds.
        s_per_group: Price of an offloaded group.
    """

    def cost(one: Treatment) -> float:
        return one.recompute_s + one.groups * s_per_group + one.moved_bytes * s_per_moved_byte

    curves = {layer: _list_curve(rows, cost) for layer, rows in treatments.items()}
    found = []
    for place, slot in enumerate(slots):
        weight = slot.microbatches / max(slot.in_flight, 1)
        # Rounded, so that equal prices of different chunks stay in the order of layers.
        found += [(round(price * weight * 1e12, 3), place, treatment) for price, treatment in curves[slot.layer]]
    return [(place, treatment) for _, place, treatment in sorted(found, key=lambda step: step[:2])]


def _list_curve(rows: Sequence[Treatment], cost: Callable[[Treatment], float]) -> list[tuple[float, Treatment]]:
    """Return treatments in the order of their kept bytes, each with the price of a byte at the end of its part of the curve."""
    current, curve = rows[0], []
    while smaller := [one for one in rows if one.kept_bytes < current.kept_bytes]:
        prices = [max(0.0, cost(one) - cost(current)) / (current.kept_bytes - one.kept_bytes) for one in smaller]
        price, current = min(zip(prices, smaller, strict=True), key=lambda pair: (pair[0], pair[1].kept_bytes))
        # The cheaper ones before it are dearer by the byte, and come first: the last changed layer may need no more.
        before = [one for one in smaller if one.kept_bytes > current.kept_bytes and cost(one) < cost(current)]
        curve += [(price, one) for one in (*sorted(before, key=lambda one: -one.kept_bytes), current)]
    return curve
