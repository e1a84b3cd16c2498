"""Offload for any module tree: regions around modules that are named by globs.

[Note: Hooks on modules]
A copy of a model takes its forward hooks along, and they are told which module runs. They are closures, because copying a model
copies bound methods with what they are bound to. `always_call` lets them run after an exception too, but torch does not call
them for what is no `Exception`, a keyboard interrupt for one: see [Note: Interrupted forwards]. `torch.compile` does not look
into them: it compiles what lies between.

They hold the handle, and neither they nor the handle hold a module: weights, handle, engine and host memory go with the last
reference to the model, and nothing of them waits for Python's cyclic collector.
"""

import collections
import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fgoffload.engine import is_inert
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.buffers import BufferWatch
from fgoffload.integrations.pytorch.calls import Call, Calls, WatchedForward
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import Forward, find_running, is_shadowed
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.integrations.pytorch.patterns import ModuleSite, Patterns, find_sites
from fgoffload.transfer_config import TransferConfig

logger = logging.getLogger(__name__)

_MARK = "fgoffload_handle"
"""The attribute by which a hook is known to be of a handle."""


def offload(
    model: torch.nn.Module,
    modules: Patterns = (),
    config: TransferConfig | None = None,
    *,
    device: DeviceChoice = None,
) -> "ModelOffload":
    """Let what chosen modules of `model` save for backward leave for the host during forward, and come back in time.

        handle = fgoffload.offload(model, {"layers.*.attn": "attn", "layers.*.mlp": "mlp"})
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            print(handle.stats().d2h_bytes)
        handle.close()

    Gradients are equal to the bit. A forward without grad mode is left alone, as is what runs inside of a checkpoint.
    Parameters and buffers never move.

    Args:
        model: Any module tree; it need not be on its device yet. Compile it afterwards, or before its first forward.
        modules: Globs over the names of `named_modules()`, each with the tag under which its numbers are counted, or globs
            alone: then the tag is the last word of the module's name. `*` stays within one part of a name, `**` crosses
            dots. Leave it out where the model places its regions by hand with `fgoffload.region`.
        config: What may leave, and where to.
        device: None takes the accelerator that the model, or what its first forward is given, lies on; else the CPU.

    Returns:
        The handle; also a context manager, which closes it.

    Raises:
        ConfigError: An argument is not what it has to be, a pattern matches no module, a tag is not one word, or the model is
            offloaded already.
    """
    sites = find_sites(model, modules)
    handle = ModelOffload(model, sites, config, device=device)
    count = collections.Counter(site.tag for site in sites)
    regions = ", ".join(f"{number} {tag}" for tag, number in count.items()) or "those that the model places by hand"
    logger.info("offload of %s, regions: %s%s", handle.name, regions, "" if handle.config.enabled else " (not enabled)")
    return handle


class ModelOffload(EngineOwner):
    """Offload of one model, until `remove` or `close`. Made by `offload`.

    Two threads may run the model at once, each in a forward of its own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sites: list[ModuleSite],
        config: TransferConfig | None,
        *,
        device: DeviceChoice,
    ) -> None:
        name = type(getattr(model, "_orig_mod", model)).__name__
        super().__init__(config, device=device, name=name, tags=dict.fromkeys(site.tag for site in sites))
        if any(hasattr(hook, _MARK) for hook in model._forward_pre_hooks.values()):  # noqa: SLF001 - no public name
            raise ConfigError(
                f"{name} is offloaded already. Call `remove` on the first handle, or name all modules in one call."
            )
        self._model = weakref.ref(model)  # its hooks hold the handle
        self._buffers = BufferWatch()
        self._calls = Calls()
        self._hooks: list[RemovableHandle | WatchedForward] = []
        if self.config.enabled:
            self._hook(model, self._enter_model)
            self._hooks.append(WatchedForward.put(model, self._calls))
            for site in sites:
                self._hook(site.module, self._make_entry(site))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Count what runs inside as one forward of the model.

        For code that calls the model's parts and not the model itself. Without it, each module call outside of the model's
        forward is a forward by itself: right, but nothing comes back ahead of backward.
        """
        count = len(self._calls.open)
        forward = self._begin(self._model())
        is_failed = True
        try:
            yield
            is_failed = False
        finally:
            self._calls.abandon(count)
            if forward is not None:
                forward.finish(is_failed=is_failed)

    def remove(self) -> None:
        """Take all hooks off the modules. A second call does no harm. Call it between forwards.

        Graphs that exist keep working. The numbers since the last `stats` are in `last_stats` then.
        """
        self.remove_hooks()
        self.report()

    def remove_hooks(self) -> None:
        """Take all hooks off the modules, and those on saved tensors that an interrupted forward has left on this thread."""
        while self._hooks:
            self._hooks.pop().remove()
        self._calls.abandon()

    def close(self) -> None:
        """Do as `remove` does, and give back all memory but what a graph still wants."""
        self.remove()
        super().close()

    def __enter__(self) -> "ModelOffload":
        """Return the handle."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it, on an exception too."""
        self.close()

    def _make_entry(self, site: ModuleSite) -> Callable[[torch.nn.Module, Any], None]:
        tag, layer = site.tag, site.layer  # not the site: it holds the module that is about to hold this

        def enter(module: torch.nn.Module, given: Any) -> None:
            self._enter_site(module, given, tag, layer)

        return enter

    def _hook(self, module: torch.nn.Module, enter: Callable[[torch.nn.Module, Any], None]) -> None:
        """Call `enter` before each forward of `module`, and close what it opened behind it. See [Note: Hooks on modules]."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            enter(module, (args, kwargs))

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._leave(module, output)

        setattr(before, _MARK, True)
        self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def _begin(self, module: torch.nn.Module | None, given: Any = ()) -> Forward | None:
        """Begin a forward of `module`, or return None where everything has to be left alone."""
        if is_inert() or not self.config.enabled:
            return None
        engine = self._engine or self.get_engine(given)
        if module is not None:
            self._buffers.mark_new(module, engine.keep)  # see [Note: Buffers stay]
        forward = Forward(self, engine)
        forward.begin()
        return forward

    def _enter_model(self, module: torch.nn.Module, given: Any) -> None:
        if not self._calls.running:
            self._calls.abandon()  # see [Note: Interrupted forwards]
        call = Call(module, sys.exc_info()[1])
        self._calls.open.append(call)
        call.own_forward = self._begin(module, given)

    def _enter_site(self, module: torch.nn.Module, given: Any, tag: str, layer: int) -> None:
        call = Call(module, sys.exc_info()[1])
        self._calls.open.append(call)
        if is_shadowed():
            self.count_shadowed(tag)
        if is_inert():
            return
        call.forward = find_running(self)
        if call.forward is None:
            call.forward = call.own_forward = self._begin(module, given)
            if not isinstance(vars(module).get("forward"), WatchedForward):
                self._hooks.append(WatchedForward.put(module, self._calls))  # from its next call on
        if call.forward is not None:
            call.region = call.forward.begin_region(tag, find_tensor(given), layer=layer)
            call.forward.layers.append(layer)

    def _leave(self, module: torch.nn.Module, output: Any) -> None:
        """Close the call of `module`, and those inside of it that an exception left open."""
        calls = self._calls.open
        if not any(call.module is module for call in calls):
            return  # it never began: a hook before ours raised
        # An exception that is handled here and was not when the module began came out of the module.
        error = sys.exc_info()[1]
        while (call := calls.pop()).module is not module:
            call.close(None, is_failed=True)
        call.close(output, is_failed=error is not call.error)

    def _find_tensors(self, given: Any) -> Iterator[torch.Tensor]:
        model = self._model()
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()
        yield from list_tensors(given)
