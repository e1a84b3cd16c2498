"""Finds the repeated layers of a model, and the submodules of each layer that are planned separately."""

import collections
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.layers import find_fsdp_units, find_layers
from fgoffload.integrations.pytorch.patterns import ModuleSite, unwrap, unwrap_model
from fgoffload.planner.ranks.measured_layers import LAYER

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def find_parts(model: torch.nn.Module) -> list[ModuleSite]:
    """Return a region with the tag `layer` for each layer, followed by regions for its submodules with parameters.

    A compiled layer is planned as a whole. Raises `ConfigError` if `model` has no repeated layers, or if FSDP shards submodules
    of a layer separately.
    """
    sites = []
    for number, layer in enumerate(_find_repeated(model)):
        inner = unwrap(layer)
        if any(isinstance(one, (FSDPModule, FullyShardedDataParallel)) for one in inner.modules() if one is not inner):
            raise ConfigError(
                f"memory: FSDP shards submodules of {type(inner).__name__} separately, so a recompute would gather their "
                "weights again. Shard whole layers, or select modules instead of a memory budget."
            )
        is_wrapped = hasattr(layer, "_orig_mod")
        sites.append(ModuleSite(layer if is_wrapped else inner, f"layer {number}", LAYER, number))
        if not is_wrapped and getattr(layer, "_compiled_call_impl", None) is None:
            sites += [ModuleSite(part, f"layer {number} {tag}", tag, number) for tag, part in _list_parts(inner)]
    return sites


def _find_repeated(model: torch.nn.Module) -> list[torch.nn.Module]:
    if getattr(unwrap_model(model), "_no_split_modules", None) or find_fsdp_units(model):
        return [site.module for site in find_layers(model)]
    found: list[torch.nn.Module] = []
    largest = 0
    for container in model.modules():
        if not isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        kinds = collections.Counter(type(unwrap(child)) for child in container)
        layers = [child for child in container if kinds[type(unwrap(child))] > 1 and list(unwrap(child).children())]
        numel = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        if numel > largest:
            found, largest = layers, numel
    if not found:
        raise ConfigError(
            f"memory: {type(model).__name__} has no repeated layers: no `_no_split_modules`, no FSDP units, and no list of "
            "modules of the same class. Select modules instead of a memory budget."
        )
    return found


def _list_parts(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _list_parts(child, f"{prefix}{name}_")
        elif any(True for _ in child.parameters()):
            tag = f"{prefix}{name}"
            yield f"part_{tag}" if tag[0].isdecimal() else tag, child
