"""What a plan has the host do, of which the simulator counts a late host's groups: of plans as fast the one with less is taken.

Most trainings have a host that is ahead of its device and does this for free. Where layers let it wait for their routing it
often is not, and then all that it does in forward is on the clock: of two plans of W2 that are predicted alike, one took a
step 5% longer, since the router of one layer left and that layer was followed.
"""

from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.planner.solving.choices import Configuration
from fgoffload.tags import list_read_tags
from fgoffload.watched import Watched, find_watched

_FORWARD_S = 50e-6
"""Of a region or a unit that runs again: half of the 74 to 151 us that a region takes a host, as it was measured on H200
(docs/results/host_overhead.md); the other half is in backward, where the host is ahead."""

_WATCHING = {Watched.NOTHING: 0, Watched.ATTENTION: 3, Watched.FOLLOWED: 5, Watched.LAYER: 10}
"""In regions. Source: of W2 on an H200, forward of a layer took the host 2.2 ms more under a profiler, which makes it
twice as slow, where it was watched, and half of that less where it was followed."""


def count_host_s(layer: LayerModel, configuration: Configuration) -> float:
    """Return the seconds of a forward pass in which the host is busy with what a layer does."""
    again = sum(action.recomputes for _, action in configuration.actions)
    regions = len(_list_leaving(configuration)) + again + _WATCHING[find_watched_ops(layer, configuration)]
    return regions * _FORWARD_S


def find_watched_ops(layer: LayerModel, configuration: Configuration) -> Watched:
    """Return which ops of a layer the engine watches."""
    is_read = "router" in list_read_tags(name for name, action in configuration.actions if action.recomputes)
    return find_watched(_list_leaving(configuration), shares_router_input=layer.shares_router_input or is_read)


def _list_leaving(configuration: Configuration) -> list[str]:
    choices = (configuration.mode.base, *configuration.chosen)
    return [tag for choice in choices for tag, action in choice.actions if action.offloads]
