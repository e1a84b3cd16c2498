"""A few plans that cover every pair of choices for consecutive sites of a model's forward.

This is a covering design: each plan makes one choice per site, and at least one plan contains each allowed pair of choices for
two neighbouring sites.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fgoffload import Action
from fgoffload.tags import RECOMPUTE_UNITS

K, R, O, B = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD, Action.RECOMPUTE_AND_OFFLOAD  # noqa: E741 - as in the tables below

Choices = Mapping[str, tuple[Action, ...]]
"""What each site of a segment of forward can have, in order."""
Plan = dict[tuple[int, str], Action]
"""By layer and name."""

WHOLE_LAYER: Choices = {"layer": (K, R, B)}
"""It keeps its input, which may leave: a plan says that in a row of `layer_input`."""
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
"""The ways through a layer: as a whole, with its MLP as a whole, and part by part."""


def make_layer(attention: Choices, whole_mlp: Choices, mlp: Choices) -> Layer:
    """Return a layer of these, which may run again as a whole too."""
    return (WHOLE_LAYER, {**attention, **whole_mlp}, {**attention, **mlp})


WHOLES = {
    name: tuple(unit.name for unit in RECOMPUTE_UNITS if name in unit.covers and name != unit.name)
    for name in {
        *(unit.name for unit in RECOMPUTE_UNITS),
        *itertools.chain.from_iterable(unit.covers for unit in RECOMPUTE_UNITS),
    }
}
"""The units of which each site is a part."""


def list_pairs(layers: Sequence[Layer]) -> list[Plan]:
    """Return each pair of choices that a plan may make for two consecutive sites.

    A pair has what a plan with it needs in rows of its own: beside `attn_proj` a `core_attn` that leaves, in some layer.
    """
    ways = [
        [[((number, name), choices) for name, choices in way.items()] for way in layer] for number, layer in enumerate(layers)
    ]
    pairs: dict[frozenset[tuple[tuple[int, str], Action]], Plan] = {}
    for through_model in itertools.product(*ways):
        for (one, choices), (other, others) in itertools.pairwise(itertools.chain(*through_model)):
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
    """Return whether nothing is asked of what runs again as a part of something else."""
    for unit in RECOMPUTE_UNITS:
        for layer in {layer for layer, name in plan if name == unit.name and plan[layer, name].recomputes}:
            covered = (plan.get((layer, name), K) for name in unit.covers if name != unit.name)
            if any(action is not K for action in covered):
                return False
            if any(plan.get((layer, name), K).recomputes for name in unit.excludes):
                return False
    return True


def design(layers: Sequence[Layer]) -> list[Plan]:
    """Return plans of one choice for each site that have all pairs: each takes as many as go together of those missing."""
    sites = [(number, name) for number, layer in enumerate(layers) for way in layer for name in way]
    # First those that allow the least beside them.
    missing = sorted(list_pairs(layers), key=lambda pair: -sum(action.recomputes for action in pair.values()))
    plans: list[Plan] = []
    while missing:
        plan: Plan = {}
        taken: list[Plan] = []
        for pair in missing:
            both = plan | pair
            if plan.items() <= both.items() and is_possible(both) and all(has(both, one) for one in (*taken, pair)):
                plan = both
                taken.append(pair)
        plans.append(dict.fromkeys(sites, K) | plan)
        missing = find_missing(missing, plans[-1:])
    return plans


def find_missing(pairs: Iterable[Plan], plans: Sequence[Plan]) -> list[Plan]:
    """Return the members of `pairs` that no plan in `plans` has."""
    return [pair for pair in pairs if not any(has(plan, pair) for plan in plans)]


def has(plan: Plan, pair: Plan) -> bool:
    """Return whether `plan` has a pair, and neither site of it runs again as a part of something else."""
    return pair.items() <= plan.items() and not any(
        plan.get((layer, whole), K).recomputes and (layer, whole) not in pair for layer, name in pair for whole in WHOLES[name]
    )


def list_rows(plan: Plan) -> Iterator[tuple[tuple[int, str], Action]]:
    """Return what a plan file says."""
    for (layer, name), action in plan.items():
        if name == "layer" and action is B:
            yield from (((layer, "layer"), R), ((layer, "layer_input"), O))
        else:
            yield (layer, name), action
