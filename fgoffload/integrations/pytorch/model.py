"""Offloads any module tree, with regions around modules selected by globs.

[Note: A replaced forward]
explains how a region wraps a module. The handle has no strong reference to a module, so weights,
handle, engine and host memory are freed with the last reference to the model, without the cyclic garbage collector.

[Note: Buffers stay]
Batch norm updates its running statistics without a new version, so an old graph's copy on the host would
pass for the current values. Saved buffers therefore stay on the device, as without offload. They are small, and the module
would hold their memory anyway.

Buffers are collected at the outermost module of each forward, since `to`, `register_buffer` and `functional_call` replace
them, and copies of a model have their own. A walk costs 0.7 us per module, and calling a module costs ten or more. Only new
buffers are passed to the engine. A buffer created during a forward counts from the next forward on.
"""

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from fgoffload.engine import OffloadEngine, is_inert
from fgoffload.errors import ConfigError, StateError
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import Forward, SavingRegion, Surroundings, enter_layer, find_running, note_inert
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.integrations.pytorch.patterns import ModuleSite
from fgoffload.integrations.pytorch.replaced import CHECKPOINT, HANDLE, ReplacedForward, checkpoints_its_call
from fgoffload.transfer_config import TransferConfig

logger = logging.getLogger(__name__)


def offload_sites(
    model: torch.nn.Module, sites: list[ModuleSite], config: TransferConfig | None = None, *, device: DeviceChoice = None
) -> "ModelOffload":
    """Offload `sites`, the modules that were already found, as `offload` does."""
    known = find_handle(model)
    if known is not None and known.is_made_of(sites, config, device=device):
        return known
    handle = ModelOffload(model, sites, config, device=device)
    count = collections.Counter(site.tag for site in sites)
    regions = ", ".join(f"{number} {tag}" for tag, number in count.items()) or "those placed by hand"
    logger.info("offload of %s, regions: %s%s", handle.name, regions, "" if handle.config.enabled else " (not enabled)")
    return handle


class ModelOffload(EngineOwner):
    """Handle of an offloaded model, until `remove` or `close`. Made by `offload`.

    Two threads may run the model at once, each in its own forward.
    """

    def __init__(
        self, model: torch.nn.Module, sites: list[ModuleSite], config: TransferConfig | None, *, device: DeviceChoice
    ) -> None:
        name = type(getattr(model, "_orig_mod", model)).__name__
        super().__init__(config, device=device, name=name, tags=dict.fromkeys(site.tag for site in sites))
        if find_handle(model) is not None:
            raise ConfigError(
                f"{name} is offloaded already, with other modules, config or device. Call `remove` on the first handle, or "
                "name all modules in one call."
            )
        self._model = weakref.ref(model)  # weak, since the model references the handle
        self._sites = _list_weakly(sites)
        self._buffers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Buffers of the last forward by id, with their data pointers, since `buffer.data` may be replaced."""
        self._replaced: list[weakref.ref[ReplacedForward]] = []  # weak, since they reference the handle
        if not self.config.enabled:
            return
        try:
            vars(model)[HANDLE] = self  # not by `setattr`, which wrappers override
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
        """Engine. None before the first forward with gradients, while the model may still change its device."""
        is_removed = self.config.enabled and not self._replaced
        return self.get_engine() if is_removed else self._engine

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether this handle was made for `model`."""
        return self._model() is model

    def is_made_of(self, sites: list[ModuleSite], config: TransferConfig | None, *, device: DeviceChoice) -> bool:
        """Return whether `offload` with these arguments would create an equal handle."""
        same_config = (config or TransferConfig()) == self.config
        return same_config and device == self._device and _list_weakly(sites) == self._sites

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Treat the body as one forward of the model.

        Use it for code that calls parts of the model and not the model itself. Without it, each such call is a separate
        forward: results are right, but nothing is prefetched for backward.
        """
        self._check_placed()
        around = Surroundings()  # see [Note: Interrupted forwards]
        try:
            begun = None if is_inert() or not self.config.enabled else self._begin(self._model(), ())
            yield
            if begun is not None:
                begun.finish()
        finally:
            around.restore()

    def remove(self) -> None:
        """Restore the modules' own forwards. Call it between forwards. A second call does nothing.

        Existing graphs keep working. `last_stats` then has the statistics since the last `stats`.
        """
        self.put_back()
        self.report()

    def _put(self, replaced: ReplacedForward) -> None:
        self._replaced.append(weakref.ref(replaced))
        replaced.put()

    def put_back(self) -> None:
        """Restore the modules' own forwards, without a log line."""
        while self._replaced:
            replaced = self._replaced[-1]()
            if replaced is not None:
                replaced.remove()
            self._replaced.pop()
        model = self._model()
        if model is not None:
            vars(model).pop(HANDLE, None)

    def close(self) -> None:
        """Restore the modules' own forwards as `remove` does, and release all memory that no graph still needs."""
        self.remove()
        super().close()

    def __enter__(self) -> "ModelOffload":
        """Return the handle.

        Raises:
            StateError: The handle was removed or closed.
        """
        self._check_placed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the handle, on an exception too."""
        self.close()

    def _check_placed(self) -> None:
        if self.config.enabled and not self._replaced:
            raise StateError(
                f"the offload of {self.name} was removed, so nothing is offloaded. Call `fgoffload.offload` again."
            )

    def explain(self) -> str:
        """Raise `ConfigError`, since there is no plan without a budget."""
        raise ConfigError(f"the offload of {self.name} has no plan to explain. Give `offload` a budget, as in memory='60GiB'.")

    def arrange(self, module: torch.nn.Module, forward: Callable[..., Any], given: Any, tag: str | None, layer: int) -> Any:
        """Return the function to run instead of `forward`. Here it is `forward` itself."""
        return forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_run(self, module: torch.nn.Module, given: Any, tag: str | None, layer: int) -> "_Run | None":
        """Begin a run of `module` with the arguments `given`, or return None if offload does nothing here.

        `tag` and `layer` are those of the module's region. The model itself has the tag None.
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
            self._keep_buffers(module, engine)
        forward = Forward(self, engine)
        forward.begin()
        return forward

    def _keep_buffers(self, module: torch.nn.Module, engine: OffloadEngine) -> None:
        """Keep the buffers below `module` that are new or have moved since the last forward. See [Note: Buffers stay]."""
        known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        new = []
        for buffer in module.buffers():
            if type(buffer) is not torch.Tensor:
                continue  # the engine keeps subclasses on the device anyway
            try:
                address = buffer.data_ptr()
            except RuntimeError:
                continue  # without its own storage: a wrapper of `torch.func`, or sparse
            entry = self._buffers.get(id(buffer))
            if entry is None or entry[0]() is not buffer or entry[1] != address:
                entry = weakref.ref(buffer), address
                new.append(buffer)
            known[id(buffer)] = entry
        if new:
            engine.keep(new)
        self._buffers = known  # last, so that a second thread does not see a buffer as marked too early

    def _find_tensors(self, given: Any) -> Iterator[torch.Tensor]:
        model = self._model()
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()
        yield from list_tensors(given)


@dataclasses.dataclass(slots=True)
class _Run:
    """Run of a module with gradients."""

    forward: Forward | None
    """Forward that began with this run, and ends with it. None if the run is inside of a forward."""
    region: SavingRegion | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, output: Any) -> None:
        """End the run, after the module has returned `output`."""
        if self.region is not None:
            self.region.close(output)
        if self.forward is not None:
            self.forward.finish()


def find_handle(model: torch.nn.Module) -> ModelOffload | None:
    """Return the handle of `model`, or None. A copied handle of another model does not count."""
    handle = vars(model).get(HANDLE)
    return handle if isinstance(handle, ModelOffload) and handle.is_of(model) else None


def _list_weakly(sites: list[ModuleSite]) -> list[tuple["weakref.ref[torch.nn.Module]", str, int, bool]]:
    return [(weakref.ref(site.module), site.tag, site.layer, site.is_checkpointed) for site in sites]
