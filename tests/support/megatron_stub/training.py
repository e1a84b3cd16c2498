"""Trains the stub's modules with and without offload."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fgoffload import OffloadConfig
from fgoffload.integrations import megatron
from support.megatron_stub import WithoutOffload, installed, load_layers, make_development_interface

SEQUENCE, BATCH = 8, 4
LAYERS = 3
DENSE_TAGS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
ALL_TAGS = (*DENSE_TAGS, "expert_fc1", "moe_act")


def make_config(*tags: str, **options: Any) -> OffloadConfig:
    options.setdefault("min_offloaded_tensor_size", 0)
    options.setdefault("offload_prefetch_bytes", 64 * 1024)
    return OffloadConfig(offload_modules=tags, **options)


@dataclasses.dataclass
class Training:
    """Modules of the stub, and the integration that they call."""

    layers: Any
    """The module from `load_layers`."""
    models: list[Any]
    offload: Any = None
    """The integration, or None without offload."""

    def forward(self, chunk: int = 0, *, microbatch: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * chunk + microbatch)
        hidden = torch.randn(SEQUENCE, BATCH, self.layers.HIDDEN, generator=generator).requires_grad_()
        return self.models[chunk](hidden)

    def step(self, *, microbatches: int = 2) -> list[torch.Tensor]:
        """Run forward and backward of each microbatch, without a pipeline, and return the gradients."""
        for microbatch in range(microbatches):
            self.forward(microbatch=microbatch).square().sum().backward()
        self.layers.finish_schedule()
        return self.take_gradients()

    def take_gradients(self) -> list[torch.Tensor]:
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return gradients


def build(layers: Any, tags: Sequence[str], *, chunks: int = 1, kind: str = "Layer", **options: bool) -> list[Any]:
    """Return model chunks with layers of a kind and reproducible parameters."""
    torch.manual_seed(5)
    return [
        layers.Model(
            [getattr(layers, kind)(LAYERS * chunk + i, tags, **options) for i in range(LAYERS)],
            vp_size=chunks if chunks > 1 else None,
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]


@contextlib.contextmanager
def without_offload(**options: Any) -> Iterator[Training]:
    with installed(WithoutOffload):
        layers = load_layers()
        yield Training(layers, build(layers, (), **options))


@contextlib.contextmanager
def with_offload(
    *tags: str,
    make_interface: Callable[[], type] = make_development_interface,
    imports_first: bool = True,
    config: OffloadConfig | None = None,
    **options: Any,
) -> Iterator[Training]:
    """Apply offload to a stub, after its modules are imported and built, or before."""
    with installed(make_interface()):
        layers, models = None, []
        if imports_first:
            layers = load_layers()
            models = build(layers, tags, **options)
        offload = megatron.apply(config or make_config(*tags))
        try:
            if layers is None:
                layers = load_layers()
                models = build(layers, tags, **options)
            for layer in (layer for model in models for layer in model.layers):
                # The stub has no TransformerLayer, which announces the layer in Megatron.
                layer.register_forward_pre_hook(lambda module, args: offload.enter_layer(module.number) and None)
            yield Training(layers, models, offload)
        finally:
            offload.remove()


def list_offloaded_places(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the places of offloaded groups in order, such as `layers.0.core_attn mb=0`, and clear the log."""
    places = [
        record.getMessage().removeprefix("offload ").partition(":")[0]
        for record in caplog.records
        if record.levelno == logging.DEBUG and record.getMessage().startswith("offload ")
    ]
    caplog.clear()
    return places


def check_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Check that gradients are bitwise identical."""
    assert expected
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
