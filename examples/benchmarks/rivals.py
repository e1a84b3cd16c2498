"""Alternatives to fgoffload for a Hugging Face model, as context managers that `hugging_face.py` compares."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def checkpointing(model: torch.nn.Module) -> Iterator[None]:
    """Enable the gradient checkpointing of transformers."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield


@contextlib.contextmanager
def verl(model: torch.nn.Module, *, enable_ckpt: bool = False) -> Iterator[None]:
    """Offload with verl's `enable_activation_offloading`."""
    from verl.utils.activation_offload import enable_activation_offloading as enable

    enable(model, "fsdp2", enable_ckpt)
    yield


@contextlib.contextmanager
def trl(model: torch.nn.Module, *, enable_ckpt: bool = False) -> Iterator[None]:
    """Offload with TRL's context manager, as TRL's trainers do."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    if enable_ckpt:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    context, forward = get_act_offloading_ctx_manager(model), model.forward

    def inside(*arguments: object, **options: object) -> object:
        with context:
            return forward(*arguments, **options)

    model.forward = inside
    yield


@contextlib.contextmanager
def save_on_cpu(model: torch.nn.Module) -> Iterator[None]:
    """Offload all saved tensors with PyTorch's `save_on_cpu`, as in PyTorch's documentation."""
    forward = model.forward

    def inside(*arguments: object, **options: object) -> object:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return forward(*arguments, **options)

    model.forward = inside
    yield
