"""Megatron's own call sites, answered by our engine.

Megatron-Core marks its sites with `FineGrainedActivationOffloadingInterface`: a context around what saves, and a call where the
tensors may leave. Many modules import that class by name, some inside functions. So the class stays and its methods are
replaced: whoever has imported it, or will, calls ours.

The class comes in two generations, told apart by how a group ends (`generations.py`), not by version numbers:

| | ends a group by | adapter |
|---|---|---|
| 0.16.1 and the releases before 0.19 | `Interface.group_commit(tensor, name=...)`, on the class | `released.py` |
| 0.19 and the development branch (0.20) | `site.group_offload(tensor)`, on the object that was the context | `development.py` |

Both adapters only translate. What their calls mean is in `calls.py`, once.
"""

from collections.abc import Callable

import torch

from fgoffload.integrations.megatron.adapter.offload import MegatronOffload
from fgoffload.integrations.megatron.interface.calls import Calls, CallSite
from fgoffload.integrations.megatron.interface.generations import find_generation, find_interface, find_unknown
from fgoffload.integrations.megatron.interface.refusals import INTERFACE, refuse_unknown
from fgoffload.integrations.megatron.patching.patches import Patches

__all__ = ["INTERFACE", "is_marked_to_stay", "is_replaced", "replace_interface"]


def replace_interface(patches: Patches, get_offload: Callable[[], MegatronOffload]) -> None:
    """Replace the methods of Megatron's interface class.

    Args:
        patches: Puts them back later.
        get_offload: Returns what answers the calls; it exists only after everything is replaced.

    Raises:
        IntegrationError: The class is of no generation that is known, lacks one of its methods, or has one that takes other
            arguments. Nothing is replaced then.
    """
    interface = find_interface()
    generation = find_generation(interface)
    methods = generation.make_methods(Calls(get_offload))
    generation.check(interface, methods)
    # What a newer version added would reach Megatron's own engine, beside ours: on a call site's first use it says so.
    methods |= {name: staticmethod(refuse_unknown(name)) for name in find_unknown(interface, methods)}
    for name, method in methods.items():
        patches.replace(INTERFACE, name, method)


def is_replaced() -> bool:
    """Return whether Megatron's interface class has methods of ours at present.

    Raises:
        IntegrationError: Megatron-Core or the class is missing.
    """
    return bool(vars(find_interface())["__init__"].__module__ == CallSite.__module__)


def is_marked_to_stay(tensor: torch.Tensor) -> bool:
    """Return whether Transformer Engine has marked `tensor`: weights in another format, and what it keeps for FP8.

    It marks tensors that live on after backward. Source: `mark_not_offload` in Transformer Engine's `cpu_offload`, which
    Megatron-Core's own engine heeds since 0.19 (`_te_do_not_offload`). Autograd hands over the very tensor that was marked
    where it has no history, as these have not.
    """
    return getattr(tensor, "_TE_do_not_offload", False) is True
