"""Checks the actions that a plan assigns to a layer against the layer's tags and units and the rules in `fgoffload.tags`."""

from collections.abc import Mapping

from fgoffload.errors import PlanError
from fgoffload.plan import Action
from fgoffload.planner.ranks.layer_model import LayerModel
from fgoffload.tags import TagRegistry, default_tags


def check_choice(layer: LayerModel, actions: Mapping[str, Action]) -> None:
    """Raise a PlanError for actions that `layer` does not support."""
    tags = default_tags()
    for name, action in actions.items():
        if action.recomputes:
            _check_unit(layer, name, actions)
        if action.offloads:
            _check_tag(layer, name, actions, tags)


def _check_unit(layer: LayerModel, name: str, actions: Mapping[str, Action]) -> None:
    unit = layer.find_unit(name)
    if unit is None:
        possible = ", ".join(one.name for one in layer.units) or "none"
        raise PlanError(
            f"The plan recomputes {name!r}, which layers of kind {layer.kind!r} do not support. Supported units: {possible}."
        )
    for covered in unit.covered:
        action = actions.get(covered, Action.KEEP)
        if action.offloads:
            raise PlanError(
                f"The plan recomputes {name!r} and offloads {covered!r} in a layer of kind {layer.kind!r}. A recomputed "
                f"module saves nothing to offload. Remove one of the two from the plan."
            )
        if covered not in (name, *unit.excluded) and action.recomputes:
            raise PlanError(
                f"The plan recomputes {name!r} and {covered!r} in a layer of kind {layer.kind!r}, but {covered!r} is part of "
                f"{name!r}. Remove one of the two from the plan."
            )
    for other in unit.excluded:
        if actions.get(other, Action.KEEP).recomputes:
            raise PlanError(
                f"The plan recomputes {name!r} and {other!r} in a layer of kind {layer.kind!r}, but the two are mutually "
                "exclusive. Remove one of them from the plan."
            )


def _check_tag(layer: LayerModel, name: str, actions: Mapping[str, Action], tags: TagRegistry) -> None:
    if name not in layer.offloadable_tags:
        possible = sorted(layer.offloadable_tags, key=tags.get_place)
        raise PlanError(
            f"The plan offloads {name!r} in a layer of kind {layer.kind!r}, which saves no offloadable tensor under that "
            f"tag. Offloadable tags: {', '.join(possible)}."
        )
    if name == "layer_input" and not actions.get("layer", Action.KEEP).recomputes:
        raise PlanError(
            f"The plan offloads 'layer_input' in a layer of kind {layer.kind!r} that does not recompute 'layer'. Only a fully "
            "recomputed layer saves a tensor with this tag. Recompute 'layer' too, or remove 'layer_input'."
        )
    if name not in tags:  # a custom tag of the layer, not in the registry
        return
    tag = tags.get(name)
    for required in tag.requires:
        if actions.get(required, Action.KEEP) is Action.KEEP:
            raise PlanError(
                f"The plan offloads {name!r} and keeps {required!r} in a layer of kind {layer.kind!r}. Both tags share a "
                f"storage, so offloading only one of them frees nothing. Offload {required!r} too, or keep {name!r}."
            )
    for excluded in tag.excludes:
        if actions.get(excluded, Action.KEEP).offloads:
            raise PlanError(
                f"The plan offloads {name!r} and {excluded!r} in a layer of kind {layer.kind!r}, but the two are mutually "
                "exclusive. Remove one of them from the plan."
            )
