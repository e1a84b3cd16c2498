"""Finds the layers of a model, such as transformer blocks or FSDP units."""

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.patterns import ModuleSite, make_site, name_modules, unwrap, unwrap_model


def find_layers(model: torch.nn.Module) -> list[ModuleSite]:
    """Return a region for each layer of `model`: each module of a class in `_no_split_modules`, or else each FSDP unit.

    Embeddings are omitted. Of nested layers, only the outermost is a region. The tag is the last word of the layer's name, for
    example `layers` for `model.layers.3`. Raises `ConfigError` if there are no layers.
    """
    whole = set(getattr(unwrap_model(model), "_no_split_modules", None) or ())
    layers = _find_outermost(model, lambda module: any(kind.__name__ in whole for kind in type(unwrap(module)).__mro__))
    layers = layers or find_fsdp_units(model)
    if not layers:
        raise ConfigError(
            f"no layers found in {type(model).__name__}: it has no modules of the classes in `_no_split_modules` "
            f"({', '.join(sorted(whole)) or 'none'}) and no FSDP units. Select modules, for example ['model.layers.*']."
        )
    return layers


def find_fsdp_units(model: torch.nn.Module) -> list[ModuleSite]:
    """Return a region for each outermost FSDP1 or FSDP2 unit of `model`, except embeddings."""
    return _find_outermost(model, lambda module: isinstance(module, (FSDPModule, FullyShardedDataParallel)))


def _find_outermost(model: torch.nn.Module, is_layer: Callable[[torch.nn.Module], bool]) -> list[ModuleSite]:
    layers: list[ModuleSite] = []
    for name, module in name_modules(model):
        is_inside = any(name.startswith(f"{layer.name}.") for layer in layers)
        is_embedding = any("Embedding" in kind.__name__ for kind in type(unwrap(module)).__mro__)
        if not is_inside and not is_embedding and is_layer(module):
            layers.append(make_site(module, name, {name: None}))
    return layers
