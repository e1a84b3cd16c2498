"""Offloads the activations of any module, in regions around the submodules that globs select.

[Note: A replaced forward] in `replaced.py` explains how a region wraps a module. The handle has no strong reference to a
module, so weights, handle, engine and host memory are freed with the last reference to the model, without garbage collection.

[Note: Buffers stay]
Batch norm updates its running statistics without changing their version counters, so the engine could not detect that an older
graph's copy on the host is stale. Saved buffers therefore stay on the device. They are small, and the module keeps them in
memory anyway. The buffers are listed at the start of each forward, since `to`, `register_buffer` and `functional_call` replace
them, and copies of a model have their own buffers. A buffer that a forward creates is listed from the next forward on.
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

from fgoffload.engine import is_inert
from fgoffload.engine.identity import has_bytes
from fgoffload.errors import ConfigError, StateError
from fgoffload.integrations.pytorch.devices import DeviceChoice
from fgoffload.integrations.pytorch.forward import Forward, SavingRegion, ThreadState, find_running, record_inert
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.integrations.pytorch.owner import EngineOwner
from fgoffload.integrations.pytorch.patterns import ModuleSite
from fgoffload.integrations.pytorch.replaced import CHECKPOINT, HANDLE, ReplacedForward, checkpoints_its_call
from fgoffload.transfer_config import TransferConfig

logger = logging.getLogger(__name__)


def offload_sites(
    model: torch.nn.Module, sites: list[ModuleSite], config: TransferConfig | None = None, *, device: DeviceChoice = None
) -> "ModelOffload":
    """Offload the modules in `sites`. Return the existing handle if it was created with the same arguments."""
    known = find_handle(model)
    if known is not None and known.is_made_of(sites, config, device=device):
        return known
    handle = ModelOffload(model, sites, config, device=device)
    count = collections.Counter(site.tag for site in sites)
    regions = ", ".join(f"{number} {tag}" for tag, number in count.items()) or "manual ones only"
    logger.info("offload of %s, regions: %s%s", handle.name, regions, "" if handle.config.enabled else " (disabled)")
    return handle


class ModelOffload(EngineOwner):
    """Handle of an offloaded model. Returned by `offload`, and valid until `remove` or `close`.

    Two threads may run the model at once, each in its own forward.
    """

    trainer_state: object = None
    """`TrainerState` of the training run that uses the handle, or None. The next training run may replace the handle."""

    def __init__(
        self, model: torch.nn.Module, sites: list[ModuleSite], config: TransferConfig | None, *, device: DeviceChoice
    ) -> None:
        name = type(getattr(model, "_orig_mod", model)).__name__
        super().__init__(config, device=device, name=name, tags=dict.fromkeys(site.tag for site in sites))
        if find_handle(model) is not None:
            raise ConfigError(
                f"{name} is already offloaded with other arguments (modules, config, device, memory or memory_reserve). Pass "
                "all modules in one call, or call `remove` on the first handle."
            )
        self._model = weakref.ref(model)  # weak, since the model references the handle
        self._sites = _list_weakly(sites)
        self._replaced: list[weakref.ref[ReplacedForward]] = []  # weak, since they reference the handle
        if not self.config.enabled:
            return
        try:
            vars(model)[HANDLE] = self  # not by `setattr`, which wrappers override
            self._install(ReplacedForward(model, self))
            for site in sites:
                self._install(ReplacedForward(site.module, self, site=site))
                if checkpoints_its_call(site.module):
                    self._install(ReplacedForward(site.module, self, site=site, name=CHECKPOINT))
        except BaseException:
            self.restore_forwards()
            raise

    def is_for(self, model: torch.nn.Module) -> bool:
        """Return whether this handle was made for `model`."""
        return self._model() is model

    def is_made_of(self, sites: list[ModuleSite], config: TransferConfig | None, *, device: DeviceChoice) -> bool:
        """Return whether this handle was created with the same arguments."""
        return (_list_weakly(sites), config or TransferConfig(), device) == (self._sites, self.config, self._device)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Treat the `with` block as one forward of the model.

        Use this for code that calls parts of the model instead of the model itself. Otherwise, each call to a part is a forward
        of its own. The results are the same, but nothing is prefetched for backward.
        """
        self._check_placed()
        thread_state = ThreadState()  # see [Note: Interrupted forwards]
        try:
            begun = None if is_inert() or not self.config.enabled else self._begin(self._model(), ())
            yield
            if begun is not None:
                begun.finish()
        finally:
            thread_state.restore()

    def remove(self) -> None:
        """Restore the modules' own forwards. Call this between forwards. A second call does nothing.

        Existing graphs keep working. `last_stats` is set to the statistics since the last call to `stats`.
        """
        self.restore_forwards()
        self.report()

    def _install(self, replaced: ReplacedForward) -> None:
        self._replaced.append(weakref.ref(replaced))
        replaced.install()

    def restore_forwards(self) -> None:
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
        """Remove the offload as `remove` does, and release all memory that no graph needs."""
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
        """Close the handle, even after an exception."""
        self.close()

    def _check_placed(self) -> None:
        if self.config.enabled and not self._replaced:
            raise StateError(f"the offload of {self.name} was removed. Call `fgoffload.offload` again.")

    def wrap(self, module: torch.nn.Module, forward: Callable[..., Any], inputs: Any, tag: str | None, layer: int) -> Any:
        """Return the function to run instead of `forward`. The default is `forward` itself. Subclasses override this."""
        return forward

    def is_idle(self, tag: str | None, layer: int) -> bool:
        """Return whether `begin_run` would do nothing here. This cheap check misses some cases and returns False in them."""
        return False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_run(self, module: torch.nn.Module, inputs: Any, tag: str | None, layer: int) -> "_Run | None":
        """Begin a run of `module` with the arguments `inputs`, or return None if offload does nothing here.

        `tag` and `layer` describe the module's region. For the model itself, `tag` is None.
        """
        if is_inert():
            record_inert(self, tag)
            return None
        if tag is None:
            return _Run(self._begin(module, inputs), None)
        forward, begun = find_running(self), None
        if forward is None:
            forward = begun = self._begin(module, inputs)
        return _Run(begun, forward.begin_region(tag, find_tensor(inputs), layer=layer))

    def _begin(self, module: torch.nn.Module | None, inputs: Any) -> Forward:
        engine = self.engine or self.get_engine(inputs)
        if module is not None:
            # See [Note: Buffers stay]. The engine keeps tensor subclasses on the device anyway.
            engine.keep([buffer for buffer in module.buffers() if type(buffer) is torch.Tensor and has_bytes(buffer)])
        forward = Forward(self, engine)
        forward.begin()
        return forward

    def _find_tensors(self, inputs: Any) -> Iterator[torch.Tensor]:
        model = self._model()
        if model is not None:
            yield from model.parameters()
            yield from model.buffers()
        yield from list_tensors(inputs)


@dataclasses.dataclass(slots=True)
class _Run:
    """One run of a module with gradients enabled."""

    forward: Forward | None
    """Forward that begins and ends with this run. None if the run is part of another forward."""
    region: SavingRegion | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish(self, output: Any) -> None:
        """End the run. `output` is the module's output."""
        if self.region is not None:
            self.region.close(output)
        if self.forward is not None:
            self.forward.finish()


def find_handle(model: torch.nn.Module) -> ModelOffload | None:
    """Return the handle of `model`, or None. If `model` is a copy, the handle of the original is ignored."""
    handle = vars(model).get(HANDLE)
    return handle if isinstance(handle, ModelOffload) and handle.is_for(model) else None


def _list_weakly(sites: list[ModuleSite]) -> list[tuple["weakref.ref[torch.nn.Module]", str, int, bool]]:
    return [(weakref.ref(site.module), site.tag, site.layer, site.is_checkpointed) for site in sites]
