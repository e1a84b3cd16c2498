"""Makes our engine serve Megatron's own call sites.

Megatron-Core marks its sites with `FineGrainedActivationOffloadingInterface`: a context around the code that saves, and a call
that allows the tensors to be offloaded. Many modules import that class by name, some inside functions. So we keep the class and
replace its methods: all importers, past and future, call ours.

The class has two generations, distinguished by how a group ends and not by version numbers. `methods.py` translates the calls
of both, and `calls.py` implements them once.
"""

from collections.abc import Callable

import torch

from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.interface.calls import Calls, CallSite
from fgoffload.integrations.megatron.interface.generations import (
    INTERFACE,
    check_methods,
    find_interface,
    make_methods,
    make_refusals,
)
from fgoffload.integrations.megatron.patching.patches import Patches

__all__ = ["is_marked_to_stay", "is_replaced", "replace_interface"]


def replace_interface(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace the methods of Megatron's interface class, or raise an IntegrationError and replace nothing.

    `get_offload` returns the integration that serves the calls. It exists only after everything is replaced.
    """
    interface = find_interface()
    methods = make_methods(interface, Calls(get_offload))
    check_methods(interface, methods)
    for name, method in (methods | make_refusals(interface, methods)).items():
        patches.replace(INTERFACE, name, method)


def is_replaced() -> bool:
    """Return whether Megatron's interface class has our methods now."""
    return bool(vars(find_interface())["__init__"].__module__ == CallSite.__module__)


def is_marked_to_stay(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine marked `tensor` as not to be offloaded: weights in another format, and tensors for FP8.

    It marks tensors that live on after backward. Source: `mark_not_offload` in Transformer Engine's `cpu_offload`, which
    Megatron-Core's own engine respects since 0.19 (`_te_do_not_offload`). Autograd passes on the marked object itself if it
    has no history, as is the case here.
    """
    return getattr(tensor, "_TE_do_not_offload", False) is True
