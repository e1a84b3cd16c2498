"""A covering design: a few plans that contain every allowed pair of choices for consecutive sites of a model's forward."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload import Action
from fgoffload.tags import RECOMPUTE_UNITS

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in plan tables

Choices = Mapping[str, tuple[Action, ...]]
"""The possible actions of consecutive sites, in forward order."""
Plan = dict[tuple[int, str], Action]
"""The action of each layer and site or unit name."""

WHOLE_LAYER: Choices = {"layer": (K, R, B)}
"""Full recompute keeps the layer's input, which a plan can offload with `layer_input`."""
ATTENTION: Choices = {
    "attn_norm": (K, R, O, B),
    "qkv_linear": (K, R, O, B),
    "core_attn": (K, R, O),
    "attn_proj": (K, O),
    "mlp_norm": (K, R, O, B),
}
LATENT_ATTENTION: Choices = {
    "attn_norm": (K, R, O, B),
    "qkv_linear": (K, O),
    "mla_up_proj": (K, R),
    "core_attn": (K, R, O),
    "attn_proj": (K, O),
    "mlp_norm": (K, R, O, B),
}
WHOLE_MLP: Choices = {"mlp": (K, R)}
MLP_PARTS: Choices = {"mlp_fc1": (K, R, O, B), "mlp_act": (K, O), "mlp_fc2": (K, O)}
WHOLE_MOE: Choices = {"moe": (K, R)}
_EXPERTS: Choices = {"expert_fc1": (K, O), "moe_act": (K, O), "expert_fc2": (K, O)}
_GROUPED_EXPERTS: Choices = {"expert_fc1": (K, R, O, B), "moe_act": (K, R, O, B), "expert_fc2": (K, O)}
MOE_PARTS: Choices = {"shared_expert": (K, R, O), "router": (K, O), **_EXPERTS, "moe_combine": (K, O)}
GROUPED_MOE_PARTS: Choices = {
    "shared_expert": (K, R, O),
    "router": (K, O),
    "dispatch": (K, R),
    **_GROUPED_EXPERTS,
    "moe_combine": (K, O),
}

Layer = Sequence[Choices]
"""The granularities of a layer: as a whole, with its MLP as a whole, and part by part."""


def make_layer(attention: Choices, whole_mlp: Choices, mlp: Choices) -> Layer:
    """Return the granularities of a layer, including recompute of the whole layer."""
    return (WHOLE_LAYER, {**attention, **whole_mlp}, {**attention, **mlp})


LARGER_UNITS = {
    name: tuple(unit.name for unit in RECOMPUTE_UNITS if name in unit.covers and name != unit.name)
    for name in {
        *(unit.name for unit in RECOMPUTE_UNITS),
        *itertools.chain.from_iterable(unit.covers for unit in RECOMPUTE_UNITS),
    }
}
"""The larger units that contain each site or unit."""


def list_pairs(layers: Sequence[Layer]) -> list[Plan]:
    """Return each allowed pair of choices for two consecutive sites.

    If `attn_proj` is offloaded, the pair also offloads `core_attn` in some layer, which it requires.
    """
    granularities = [
        [[((number, name), choices) for name, choices in granularity.items()] for granularity in layer]
        for number, layer in enumerate(layers)
    ]
    pairs: dict[frozenset[tuple[tuple[int, str], Action]], Plan] = {}
    for path in itertools.product(*granularities):
        for (one, choices), (other, others) in itertools.pairwise(itertools.chain(*path)):
            for first, second in itertools.product(choices, others):
                pair = _add_required({one: first, other: second}, len(layers))
                if is_possible(pair):
                    pairs[frozenset(pair.items())] = pair
    return list(pairs.values())


def _add_required(pair: Plan, layers: int) -> Plan:
    for layer, name in list(pair):
        if name == "attn_proj" and pair[layer, name].offloads:
            elsewhere = layer if (layer, "core_attn") not in pair else (layer + 1) % layers
            return pair if pair.get((layer, "core_attn"), K).offloads else pair | {(elsewhere, "core_attn"): O}
    return pair


def is_possible(plan: Plan) -> bool:
    """Return whether all parts of recomputed units are kept."""
    for unit in RECOMPUTE_UNITS:
        for layer in {layer for layer, name in plan if name == unit.name and plan[layer, name].recomputes}:
            covered = (plan.get((layer, name), K) for name in unit.covers if name != unit.name)
            if any(action is not K for action in covered):
                return False
            if any(plan.get((layer, name), K).recomputes for name in unit.excludes):
                return False
    return True


def design(layers: Sequence[Layer]) -> list[Plan]:
    """Return plans that contain all pairs. Each plan greedily combines as many missing pairs as possible."""
    sites = [(number, name) for number, layer in enumerate(layers) for granularity in layer for name in granularity]
    # Recompute first, since it excludes the most other choices.
    missing = sorted(list_pairs(layers), key=lambda pair: -sum(action.recomputes for action in pair.values()))
    plans: list[Plan] = []
    while missing:
        plan: Plan = {}
        included: list[Plan] = []
        for pair in missing:
            both = plan | pair
            if plan.items() <= both.items() and is_possible(both) and all(has(both, one) for one in (*included, pair)):
                plan = both
                included.append(pair)
        plans.append(dict.fromkeys(sites, K) | plan)
        missing = find_missing(missing, plans[-1:])
    return plans


def find_missing(pairs: Iterable[Plan], plans: Sequence[Plan]) -> list[Plan]:
    """Return the `pairs` that are in no plan."""
    return [pair for pair in pairs if not any(has(plan, pair) for plan in plans)]


def has(plan: Plan, pair: Plan) -> bool:
    """Return whether `plan` contains a pair, and no larger unit recomputes a site of it."""
    return pair.items() <= plan.items() and not any(
        plan.get((layer, whole), K).recomputes and (layer, whole) not in pair
        for layer, name in pair
        for whole in LARGER_UNITS[name]
    )


def list_rows(plan: Plan) -> Iterator[tuple[tuple[int, str], Action]]:
    """Yield the rows of a plan file."""
    for (layer, name), action in plan.items():
        if name == "layer" and action is B:
            yield from (((layer, "layer"), R), ((layer, "layer_input"), O))
        else:
            yield (layer, name), action
