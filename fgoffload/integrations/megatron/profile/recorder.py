"""Records a measured step: the times of segments in forward and backward, and every saved storage.

The recorder's hooks replace the engine's around each model, layer and site. A segment is a site's region, or the code between
two regions. In backward, each unpacked tensor identifies the current segment. Timed events on the compute stream separate the
segments, so the host never waits, and results are bitwise identical.

The hooks slow the CPU down. After a synchronization in forward, as in token dispatchers, the step would be launch-bound. So in
the first microbatches, the recorder stalls the device before each segment of forward, so that the CPU gets ahead.

A measured layer that does not fit in the budget is offloaded. Timing of its segments pauses while the engine submits a group or
returns a tensor, because compute may then wait for copies, which a plan counts separately.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from fgoffload.engine import ActivationLedger, Device, Lane, Region, Saving
from fgoffload.engine.device import Event
from fgoffload.engine.geometry import get_view
from fgoffload.engine.handles import Handle, KeptHandle, Packed, keep_tensor
from fgoffload.engine.identity import StorageRef, has_bytes, is_of_leaf
from fgoffload.engine.place import Place
from fgoffload.engine.region import is_in_backward
from fgoffload.engine.torch_internals import get_graph_task, queue_after_backward
from fgoffload.integrations.megatron.profile.device_memory import DeviceMemory
from fgoffload.integrations.megatron.profile.step_records import Run, SavedRecord, SegmentRecord, Span
from fgoffload.plan import Site

_STALL_S = 2e-3
"""Seconds to stall the device before each segment of forward. Even experts in eager mode launch in less time."""

STALLED_MICROBATCHES = 3
"""Number of stalled microbatches per chunk. Only their times count; the first, a warm-up, counts only if it is alone."""

FIRST, LAST = "first", "last"
"""Names of the segments before and after the layers of a model chunk."""


class RecordedHandle(KeptHandle):
    """Wraps the handle of a tensor saved in a measured step. If `saving` is None, the tensor stays on the GPU."""

    __slots__ = ("handle", "saving", "segment")

    def __init__(self, handle: Packed, saving: Saving | None, segment: SegmentRecord) -> None:  # no tensor of its own
        self.handle = handle
        self.saving = saving
        self.place = handle.place
        self.segment = segment

    def take(self) -> torch.Tensor:
        """Return the tensor. The engine reloads it if necessary."""
        return self.handle.take() if self.saving is None else self.saving.unpack(self.handle)


class RecordedRegion(Region):
    """Region that records a site. `inner` is the engine's region if the site is offloaded."""

    __slots__ = ("_inner", "_place", "_recorder", "_run", "_tag")

    def __init__(self, recorder: "StepRecorder", run: Run, site: Site, lane: Lane, inner: Region | None) -> None:  # no group
        self._inner = inner
        self._recorder = recorder
        self._run = run
        self._place = Place(site, str(lane.place))
        self._tag = site.tag

    def __call__(self, tensor: torch.Tensor) -> KeptHandle:  # noqa: D102
        return self._recorder.save(tensor, self._run, self._place, self._inner)

    def unpack(self, handle: Packed) -> torch.Tensor:  # noqa: D102
        return self._recorder.take(handle)

    def __enter__(self) -> None:
        self._recorder.enter(self._run.get_segment(self._tag, tag=self._tag))
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._recorder.leave(self._run)

    def enter(self, tensor: torch.Tensor) -> None:
        """Record the input of the site. Unpacked tensors show where backward is, so no mark on the input is needed."""
        if has_bytes(tensor):
            self._run.input_keys[self._tag] = self._run.name_storage(tensor)
        if self._inner is not None:
            self._inner.enter(tensor)

    def end(self, tensor: torch.Tensor | None = None, *, is_held: bool = False) -> None:
        """End and offload the engine's group, if any."""
        if self._inner is not None:
            with self._recorder.apart():  # compute waits if the window is full
                self._inner.end(tensor, is_held=is_held)


class _RecordedWatch(Saving):
    """Records tensors that a layer or model saves between its regions, in the current segment of forward."""

    __slots__ = ("_inner", "_recorder", "_run")

    def __init__(self, recorder: "StepRecorder", run: Run, inner: Saving | None = None) -> None:  # no lane, and no engine
        self._inner = inner
        self._recorder = recorder
        self._run = run

    def __call__(self, tensor: torch.Tensor) -> KeptHandle:
        return self._recorder.save(tensor, self._run, Place(None, f"mb={self._run.microbatch}"), self._inner)

    def unpack(self, handle: Packed) -> torch.Tensor:
        return self._recorder.take(handle)


class StepRecorder:
    """Records the segments and saves of one step. Without `memory`, device bytes are not recorded."""

    def __init__(self, device: Device, *, memory: DeviceMemory | None, observers: Sequence[ActivationLedger] = ()) -> None:
        self._device = device
        self._observers = observers
        self._memory = memory
        self.runs: list[Run] = []
        """Runs of layers and models, in forward order."""
        self.live_bytes = 0
        """Saved bytes that backward has not reached yet."""
        self.largest_layer_bytes = 0
        """Maximum saved bytes of any layer."""
        self._start_bytes = 0 if memory is None else memory.read().allocated_bytes
        self._stack: list[SegmentRecord] = []
        self.current_layer: Run | None = None
        """Run of the layer whose forward is running."""
        self._model: Run | None = None
        self._forwards: dict[int, int] = {}
        """Number of forwards so far, keyed by chunk."""
        self._open: tuple[SegmentRecord, bool] | None = None
        """The running segment, and whether it is in backward."""
        self._opened_at: Event = None
        self._is_stalled = False
        """Whether to stall the device before each segment of this forward."""
        self.stalls: list[Span] = []
        """Events at the start and end of each stall."""
        self._live_at_start = 0
        self._graph_task = -1
        self._known: set[int] = set()
        """Keys of the storages saved in this step."""

    # Forward.

    @contextlib.contextmanager
    def model(self, chunk: int) -> Iterator[None]:
        """Record the forward of a model chunk, including its layers."""
        self._forwards[chunk] = self._forwards.get(chunk, 0) + 1
        run = self._model = self._add_run(chunk, number=-1)
        self._switch(run.get_segment(FIRST), is_backward=False)
        try:
            with _RecordedWatch(self, run):
                yield
        finally:
            self._model = None
            self._stack.clear()
            self._switch(None, is_backward=False)

    @contextlib.contextmanager
    def layer(self, chunk: int, number: int, hidden: torch.Tensor, *, inner: Saving | None = None) -> Iterator[None]:
        """Record the forward of a layer with the input `hidden`. `inner`, if any, offloads the layer's saved tensors."""
        run = self._add_run(chunk, number=number)
        if inner is not None:
            run.is_offloaded, run.is_sampled = True, False
        run.input_key, run.input_bytes = run.name_storage(hidden), hidden.untyped_storage().nbytes()
        outer, self.current_layer = self.current_layer, run
        self._switch(run.get_segment("start"), is_backward=False)
        try:
            with _RecordedWatch(self, run, inner):
                yield
        finally:
            self.current_layer = outer
            size_bytes = sum(record.size_bytes for record in run.saved.values())
            self.largest_layer_bytes = max(self.largest_layer_bytes, size_bytes)
            self._switch(None if self._model is None else self._model.get_segment(LAST), is_backward=False)

    def find_region(self, site: Site, lane: Lane, *, inner: Region | None = None) -> Region | None:
        """Return a region that records `site`. Outside a recorded layer, return `inner`, the engine's region, if any."""
        run = self.current_layer
        return inner if run is None or run.number != site.layer else RecordedRegion(self, run, site, lane, inner)

    def enter(self, segment: SegmentRecord) -> None:
        """Begin `segment` when forward enters its region."""
        self._stack.append(segment)
        self._switch(segment, is_backward=False)

    def leave(self, run: Run) -> None:
        """End the innermost region's segment, and resume the outer region's segment or begin the following one."""
        left = self._stack.pop()
        segment = run.current = self._stack[-1] if self._stack else run.get_segment(f"after {left.name}")
        self._switch(segment, is_backward=False)

    # Saved and unpacked tensors.

    def save(self, tensor: torch.Tensor, run: Run, place: Place, inner: Saving | None) -> KeptHandle:
        """Return a handle for a tensor that autograd saves in `run`. `inner`, if any, keeps or offloads the tensor."""
        segment = self._open[0] if self._open is not None else run.get_segment(FIRST)
        if self._is_activation(tensor):
            storage = StorageRef(tensor)
            record = run.saved.get(storage.key)
            if record is None:
                size_bytes = tensor.untyped_storage().nbytes()
                record = run.saved[storage.key] = SavedRecord(storage, size_bytes, tensor.element_size(), run.open_modules)
                if storage.key not in self._known and not run.is_offloaded:
                    self._known.add(storage.key)
                    self.live_bytes += size_bytes
                    segment.born_bytes += size_bytes
            record.modules &= run.open_modules
            record.is_held |= is_of_leaf(tensor)
            record.views.add(get_view(tensor))
            record.segments[segment.name] = None
            if segment.tag is not None:
                record.tags[segment.tag] = None
        if inner is not None:
            return RecordedHandle(inner(tensor), inner, segment)
        for ledger in self._observers:
            ledger.count_save(tensor, place=place)
        return RecordedHandle(keep_tensor(tensor, place), None, segment)

    def take(self, handle: Packed) -> torch.Tensor:
        """Return a saved tensor. If its segment is not the current one, backward has entered its segment."""
        if not isinstance(handle, RecordedHandle):
            return handle.take()
        if is_in_backward():
            task = get_graph_task()
            if task != self._graph_task:
                self._graph_task = task
                # `_end_backward` runs after this backward, on the thread that started it.
                queue_after_backward(self._end_backward)
            if self._open != (handle.segment, True):
                self._switch(handle.segment, is_backward=True)
        # Compute may wait for the copy of an offloaded tensor.
        with self.apart() if isinstance(handle.handle, Handle) else contextlib.nullcontext():
            tensor = handle.take()
        if handle.saving is None:
            for ledger in self._observers:
                ledger.count_take(place=handle.place)
        return tensor

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude the time of the `with` body from the running segment."""
        if self._open is not None:
            self._close(*self._open, self._mark(), 0)
        try:
            yield
        finally:
            self._opened_at = self._mark()

    def measure_seconds(self, spans: list[Span]) -> float:
        """Return the total duration of `spans`. The host blocks until the device has reached their ends."""
        for _, end in spans:
            self._device.synchronize(end)
        return sum(self._device.measure_seconds(start, end) for start, end in spans)

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is an activation on this device, not a parameter."""
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
        if isinstance(base, torch.nn.Parameter):
            return False
        return has_bytes(tensor) and self._device.owns(tensor) and tensor.numel() > 0

    def _add_run(self, chunk: int, *, number: int) -> Run:
        microbatch = max(0, self._forwards.get(chunk, 0) - 1)
        # Reading the counters is slow, so they are read only in the first microbatch, whose times count only if it is alone.
        is_sampled = self._memory is not None and microbatch == 0
        run = Run(chunk=chunk, microbatch=microbatch, number=number, is_sampled=is_sampled)
        self._is_stalled = microbatch < STALLED_MICROBATCHES
        self.runs.append(run)
        return run

    def _end_backward(self) -> None:
        self._graph_task = -1
        self._switch(None, is_backward=True)

    def _switch(self, segment: SegmentRecord | None, *, is_backward: bool) -> None:
        """End the running segment, and begin `segment`, if any."""
        now = self._mark()
        was_sampled = self._open is not None and self._open[0].is_sampled
        peak_bytes = 0
        if self._memory is not None and (was_sampled or (segment is not None and segment.is_sampled)):
            peak_bytes = self._memory.read().peak_bytes - self._start_bytes
        if self._open is not None:
            self._close(*self._open, now, peak_bytes if was_sampled else 0)
        self._open = None if segment is None else (segment, is_backward)
        if segment is not None and not is_backward and self._is_stalled:
            self._device.stall(_STALL_S)
            stalled_at, now = now, self._mark()
            self.stalls.append((stalled_at, now))
        self._opened_at = now
        self._live_at_start = self.live_bytes

    def _close(self, segment: SegmentRecord, is_backward: bool, now: Event, peak_bytes: int) -> None:  # noqa: FBT001 - of a tuple
        if is_backward:
            segment.backward.append((self._opened_at, now))
            segment.backward_extra_bytes = max(segment.backward_extra_bytes, peak_bytes - self._live_at_start)
            self.live_bytes -= segment.born_bytes
            segment.born_bytes = 0
        else:
            segment.forward.append((self._opened_at, now))
            segment.forward_extra_bytes = max(segment.forward_extra_bytes, peak_bytes - self.live_bytes)

    def _mark(self) -> Event:
        return self._device.record_event(self._device.current_stream(), is_timed=True)
