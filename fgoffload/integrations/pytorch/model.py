"""Offload for any module tree: regions around modules that are named by globs.

[Note: A replaced forward] says how a region gets around a module. The handle holds no module, so weights, handle, engine and
host memory go with the last reference to the model, and nothing of them waits for Python's cyclic collector.
"""

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine import OffloadEngine, is_inert
from fgoffload.errors import ConfigError
from fgoffload.integrations.pytorch.buffers import BufferWatch
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import Forward, SavingRegion, Surroundings, enter_layer, find_running, note_inert
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.integrations.pytorch.patterns import ModuleSite, Patterns, find_sites
from fgoffload.integrations.pytorch.replaced import CHECKPOINT, HANDLE, ReplacedForward, checkpoints_its_call
from fgoffload.transfer_config import TransferConfig

logger = logging.getLogger(__name__)


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

    Gradients are bitwise identical. A forward without grad mode is left alone, as is what runs inside of a checkpoint.
    Parameters and buffers never move.

    Args:
        model: Any module tree; it need not be on its device yet. Compile it afterwards, or before its first forward.
        modules: Globs over the names of `named_modules()`, each with the tag under which its numbers are counted, or globs
            alone: then the tag is the last word of the module's name. `*` stays within one part of a name, `**` crosses
            dots. Leave it out where the model places its regions by hand with `fgoffload.region`.
        config: What may leave, and where to.
        device: None takes the accelerator that the model, or what its first forward is given, lies on; else the CPU.

    Returns:
        The handle; also a context manager, which closes it. A model that was offloaded with the same arguments has one already,
        and it is returned.

    Raises:
        ConfigError: An argument is not what it has to be, a pattern matches no module, a tag is not one word, or the model is
            offloaded already with other arguments.
    """
    return offload_sites(model, find_sites(model, modules), config, device=device)


def offload_sites(
    model: torch.nn.Module, sites: list[ModuleSite], config: TransferConfig | None = None, *, device: DeviceChoice = None
) -> "ModelOffload":
    """Do as `offload` does, for modules that are found already."""
    known = _find_handle(model)
    if known is not None and known.is_made_of(sites, config, device=device):
        return known
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
        if _find_handle(model) is not None:
            raise ConfigError(
                f"{name} is offloaded already, with other modules, config or device. Call `remove` on the first handle, or "
                "name all modules in one call."
            )
        self._model = weakref.ref(model)  # it holds the handle
        self._sites = _list_weakly(sites)
        self._buffers = BufferWatch()
        self._replaced: list[weakref.ref[ReplacedForward]] = []  # they hold the handle
        if not self.config.enabled:
            return
        try:
            vars(model)[HANDLE] = self  # not by `setattr`, of which wrappers have their own
            self._put(ReplacedForward(model, self))
            for site in sites:
                self._put(ReplacedForward(site.module, self, site=site))
                if checkpoints_its_call(site.module):
                    self._put(ReplacedForward(site.module, self, site=site, name=CHECKPOINT))
        except BaseException:
            self.put_back()
            raise

    @property
    def engine(self) -> OffloadEngine | None:
        """The engine; None before both the first forward with gradients and `remove`, while the model may change its device."""
        is_removed = self.config.enabled and not self._replaced
        return self.get_engine() if is_removed else self._engine

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether this handle was made for `model`."""
        return self._model() is model

    def is_made_of(self, sites: list[ModuleSite], config: TransferConfig | None, *, device: DeviceChoice) -> bool:
        """Return whether `offload` with these arguments would make such a handle again."""
        same_config = (config or TransferConfig()) == self.config
        return same_config and device == self._device and _list_weakly(sites) == self._sites

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Count what runs inside as one forward of the model.

        For code that calls the model's parts and not the model itself. Without it, each module call outside of the model's
        forward is a forward by itself: right, but nothing comes back ahead of backward.
        """
        around = Surroundings()  # see [Note: Interrupted forwards]
        try:
            begun = None if is_inert() or not self.config.enabled else self._begin(self._model(), ())
            yield
            if begun is not None:
                begun.finish()
        finally:
            around.restore()

    def remove(self) -> None:
        """Give the modules their own forwards back. A second call does no harm. Call it between forwards.

        Graphs that exist keep working. The numbers since the last `stats` are in `last_stats` then.
        """
        self.put_back()
        self.report()

    def _put(self, replaced: ReplacedForward) -> None:
        self._replaced.append(weakref.ref(replaced))
        replaced.put()

    def put_back(self) -> None:
        """Give the modules their own forwards back, and say nothing."""
        while self._replaced:
            replaced = self._replaced[-1]()
            if replaced is not None:
                replaced.remove()
            self._replaced.pop()
        model = self._model()
        if model is not None:
            vars(model).pop(HANDLE, None)

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_run(self, module: torch.nn.Module, given: Any, tag: str | None, layer: int) -> "_Run | None":
        """Begin to run `module`, or return None where everything has to be left alone.

        Args:
            module: The model, or a part of it.
            given: Its arguments.
            tag: Of the region around it; None for the model itself.
            layer: Of the region.
        """
        if is_inert():
            note_inert(self, tag)
            return None
        if tag is None:
            return _Run(self._begin(module, given), None)
        forward, begun = find_running(self), None
        if forward is None:
            forward = begun = self._begin(module, given)
        region = forward.begin_region(tag, find_tensor(given), layer=layer)
        enter_layer(layer)
        return _Run(begun, region)

    def _begin(self, module: torch.nn.Module | None, given: Any) -> Forward:
        """Begin a forward of `module`."""
        engine = self._engine or self.get_engine(given)
        if module is not None:
            self._buffers.mark_new(module, engine.keep)  # see [Note: Buffers stay]
        forward = Forward(self, engine)
        forward.begin()
        return forward

    def _find_tensors(self, given: Any) -> Iterator[torch.Tensor]:
        model = self._model()
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()
        yield from list_tensors(given)


@dataclasses.dataclass(slots=True)
class _Run:
    """One run of a module with gradients."""

    forward: Forward | None
    """The forward that began with it, and ends with it."""
    region: SavingRegion | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, output: Any) -> None:
        """The module has returned `output`."""
        if self.region is not None:
            self.region.close(output)
        if self.forward is not None:
            self.forward.finish()


def _find_handle(model: torch.nn.Module) -> ModelOffload | None:
    """Return the handle of `model`, and not that of a model whose attributes it was copied from, or None."""
    handle = vars(model).get(HANDLE)
    return handle if isinstance(handle, ModelOffload) and handle.is_of(model) else None


def _list_weakly(sites: list[ModuleSite]) -> list[tuple["weakref.ref[torch.nn.Module]", str, int, bool]]:
    return [(weakref.ref(site.module), site.tag, site.layer, site.is_checkpointed) for site in sites]
