"""Records a measured step: segments of forward and backward with their times, and every saved storage.

While a step is measured nothing leaves. The hooks of a recorder stand where the engine's would: around each model, each layer,
and each site. A segment is a site's region, or what runs between two of them. Forward is in one segment at a time; where
backward is, the saved tensors tell that it takes. Between two segments there is one timed event on the compute stream, so that
the host waits for nothing, and what is computed stays bitwise identical.

The host, which the hooks slow down, is late in forward where something lets it wait, as token dispatchers do. So in the first
microbatches the device does nothing for a while before each segment of forward, and the host gets ahead of it: what is
measured is what the device takes. On an H200 with a late host, forward of a layer was measured at 7.9 ms without; others took
6.9.

Where a layer leaves though it is measured, since a budget has no room for it, its segments end where the engine submits a
group or gives a tensor back, and go on behind that: there compute may wait for copies, and a plan counts such waits by itself.
With them a plan of two stages on H100s, of which no layer could stay, was expected to take 3.8 s where it took less than half.
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
from fgoffload.integrations.megatron.profile.step_records import Run, SavedRecord, SegmentRecord
from fgoffload.plan import Site

_STALL_S = 2e-3
"""Seconds before a segment of forward: more than the host takes to launch one, of experts in eager mode too."""

STALLED_MICROBATCHES = 3
"""Of a chunk, from the first: that one's times do not count where there are others, and those of later ones never do."""

FIRST, LAST = "first", "last"
"""Segments of a model chunk: what is before its layers, and what is behind them."""


class RecordedHandle(KeptHandle):
    """Handle of a tensor saved in a measured step: the engine's handle, and the segment."""

    __slots__ = ("_handle", "_saving", "segment")

    def __init__(self, handle: Packed, saving: Saving | None, segment: SegmentRecord) -> None:  # no tensor of its own
        self._handle = handle
        self._saving = saving
        self.place = handle.place
        self.segment = segment

    @property
    def is_kept(self) -> bool:
        """Return whether the engine has nothing to do with it."""
        return self._saving is None

    @property
    def may_wait(self) -> bool:
        """Return whether compute may have to wait for a copy when it is taken."""
        return isinstance(self._handle, Handle)

    def take(self) -> torch.Tensor:
        """Return the tensor, from the engine where it has it."""
        return self._handle.take() if self._saving is None else self._saving.take_back(self._handle)


class RecordedRegion(Region):
    """A site in a measured step: it answers as a region of the engine does, and where it has one hands all on to it."""

    __slots__ = ("_inner", "_place", "_recorder", "_run", "_tag")

    def __init__(self, recorder: "StepRecorder", run: Run, site: Site, lane: Lane, inner: Region | None) -> None:  # no group
        self._inner = inner
        self._recorder = recorder
        self._run = run
        self._place = Place(site, str(lane.place))
        self._tag = site.tag

    def __call__(self, tensor: torch.Tensor) -> KeptHandle:
        """Return the handle from which autograd gets the tensor back."""
        return self._recorder.save(tensor, self._run, self._place, self._inner)

    def take_back(self, handle: Packed) -> torch.Tensor:  # noqa: D102
        return self._recorder.take(handle)

    def __enter__(self) -> None:
        """Begin to save, and begin the segment."""
        self._recorder.enter(self._run.get_segment(self._tag, tag=self._tag))
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop, on an exception too."""
        super().__exit__(kind, error, trace)
        self._recorder.leave(self._run)

    def enter(self, tensor: torch.Tensor) -> None:
        """Note what the site is given, and put no mark of its own: what backward takes tells where it is."""
        if has_bytes(tensor):
            self._run.input_keys[self._tag] = self._run.name_storage(tensor)
        if self._inner is not None:
            self._inner.enter(tensor)

    def end(self, tensor: torch.Tensor | None = None, *, is_held: bool = False) -> None:
        """Let the engine's group leave, if there is one."""
        if self._inner is not None:
            with self._recorder.apart():  # the host waits where the window is full
                self._inner.end(tensor, is_held=is_held)


class _RecordedWatch(Saving):
    """A layer, or a model, in a measured step: what is saved between its regions belongs to the segment that forward is in."""

    __slots__ = ("_inner", "_recorder", "_run")

    def __init__(self, recorder: "StepRecorder", run: Run, inner: Saving | None = None) -> None:  # no lane, and no engine
        self._inner = inner
        self._recorder = recorder
        self._run = run

    def __call__(self, tensor: torch.Tensor) -> KeptHandle:
        """Return the handle from which autograd gets the tensor back."""
        return self._recorder.save(tensor, self._run, Place(None, f"mb={self._run.microbatch}"), self._inner)

    def take_back(self, handle: Packed) -> torch.Tensor:
        """Return the tensor of `handle`."""
        return self._recorder.take(handle)


class StepRecorder:
    """Records one step.

    Args:
        device: Whose events tell the time.
        memory: Counts device bytes; None where nobody does.
        observers: Are told of what is saved and taken, as those of an engine are.
    """

    def __init__(self, device: Device, *, memory: DeviceMemory | None, observers: Sequence[ActivationLedger] = ()) -> None:
        self._device = device
        self._observers = observers
        self._memory = memory
        self.runs: list[Run] = []
        """Of layers and of models, in the order of forward."""
        self.live_bytes = 0
        """Saved bytes that backward has not come to, as far as this step recorded them."""
        self.largest_layer_bytes = 0
        """The most that one layer saved."""
        self._start_bytes = 0 if memory is None else memory.read().allocated_bytes
        self._stack: list[SegmentRecord] = []
        self._layer: Run | None = None
        self._model: Run | None = None
        self._forwards: dict[int, int] = {}
        """By chunk."""
        self._open: tuple[SegmentRecord, bool] | None = None
        """The segment that runs now, and whether it is in backward."""
        self._opened_at: Event = None
        self._is_stalled = False
        """Whether the device is stalled before each segment of the forward that runs."""
        self.stalls: list[tuple[Event, Event]] = []
        """When it was."""
        self._live_at_start = 0
        self._graph_task = -1
        self._known: set[int] = set()
        """Keys of the storages that were saved in this step."""

    # Forward.

    @contextlib.contextmanager
    def model(self, chunk: int) -> Iterator[None]:
        """Record the forward of a model chunk; its layers are inside."""
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
        """Record the forward of a layer; its sites are inside.

        Args:
            chunk: That it is in.
            number: Of the layer in the whole model, from 0.
            hidden: Its input.
            inner: What watches the layer for the engine, which offloads it; None where everything is kept.
        """
        run = self._add_run(chunk, number=number)
        if inner is not None:
            run.is_leaving, run.is_sampled = True, False
        run.input_key, run.input_bytes = run.name_storage(hidden), hidden.untyped_storage().nbytes()
        outer, self._layer = self._layer, run
        self._switch(run.get_segment("start"), is_backward=False)
        try:
            with _RecordedWatch(self, run, inner):
                yield
        finally:
            self._layer = outer
            size_bytes = sum(record.size_bytes for record in run.saved.values())
            self.largest_layer_bytes = max(self.largest_layer_bytes, size_bytes)
            self._switch(None if self._model is None else self._model.get_segment(LAST), is_backward=False)

    @property
    def current_layer(self) -> Run | None:
        """The layer that forward is in."""
        return self._layer

    def find_region(self, site: Site, lane: Lane, *, inner: Region | None = None) -> Region | None:
        """Return what stands for a region of the engine, or None outside of a recorded layer.

        Args:
            site: In the layer that forward is in.
            lane: Of the microbatch.
            inner: A region of the engine, which offloads the site; None where it is kept.
        """
        run = self._layer
        return inner if run is None or run.number != site.layer else RecordedRegion(self, run, site, lane, inner)

    def enter(self, segment: SegmentRecord) -> None:
        """Forward enters a region."""
        self._stack.append(segment)
        self._switch(segment, is_backward=False)

    def leave(self, run: Run) -> None:
        """Forward leaves the region that it entered last."""
        left = self._stack.pop()
        segment = run.current = self._stack[-1] if self._stack else run.get_segment(f"after {left.name}")
        self._switch(segment, is_backward=False)

    # What autograd saves and takes.

    def save(self, tensor: torch.Tensor, run: Run, place: Place, inner: Saving | None) -> KeptHandle:
        """Return the handle for a tensor that autograd saves in `run`, and that `inner` keeps or offloads, if there is one."""
        segment = self._open[0] if self._open is not None else run.get_segment(FIRST)
        if self._is_activation(tensor):
            storage = StorageRef(tensor)
            record = run.saved.get(storage.key)
            if record is None:
                size_bytes = tensor.untyped_storage().nbytes()
                record = run.saved[storage.key] = SavedRecord(storage, size_bytes, tensor.element_size(), run.open_modules)
                if storage.key not in self._known and not run.is_leaving:
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
        """Return a saved tensor; in backward it tells where backward is."""
        if isinstance(handle, RecordedHandle) and is_in_backward():
            task = get_graph_task()
            if task != self._graph_task:
                self._graph_task = task
                # Runs when this backward is through, on the thread that called it.
                queue_after_backward(self._end_backward)
            if self._open != (handle.segment, True):
                self._switch(handle.segment, is_backward=True)
        waits = isinstance(handle, RecordedHandle) and handle.may_wait
        with self.apart() if waits else contextlib.nullcontext():
            tensor = handle.take()
        if isinstance(handle, RecordedHandle) and handle.is_kept:
            for ledger in self._observers:
                ledger.count_take(place=handle.place)
        return tensor

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keep what happens inside out of the segment that runs now, which goes on behind it."""
        if self._open is not None:
            self._close(*self._open, self._mark(), 0)
        try:
            yield
        finally:
            self._opened_at = self._mark()

    def measure_seconds(self, spans: list[tuple[Event, Event]]) -> float:
        """Return the seconds of some spans that are over. The host blocks until the device has come so far."""
        for _, end in spans:
            self._device.synchronize(end)
        return sum(self._device.measure_seconds(start, end) for start, end in spans)

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        """Return whether the bytes of `tensor` are there because autograd saves them: no parameter, and in this memory."""
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
        if isinstance(base, torch.nn.Parameter):
            return False
        return has_bytes(tensor) and self._device.owns(tensor) and tensor.numel() > 0

    def _add_run(self, chunk: int, *, number: int) -> Run:
        microbatch = max(0, self._forwards.get(chunk, 0) - 1)
        # Bytes are read in the first microbatch alone, whose times do not count where there are others: to read the counters
        # takes the host longer than to launch a small kernel.
        is_sampled = self._memory is not None and microbatch == 0
        run = Run(chunk=chunk, microbatch=microbatch, number=number, is_sampled=is_sampled)
        self._is_stalled = microbatch < STALLED_MICROBATCHES
        self.runs.append(run)
        return run

    def _end_backward(self) -> None:
        self._graph_task = -1
        self._switch(None, is_backward=True)

    def _switch(self, segment: SegmentRecord | None, *, is_backward: bool) -> None:
        """What runs now is over, and `segment` runs from now on, if any."""
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
