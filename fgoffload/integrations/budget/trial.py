"""Reruns a layer right after its forward, to measure its parts and to check whether they can be recomputed.

[Note: Trials] A module may be recomputed if its real run changes no buffer, input, attribute or random state of Python or
NumPy, and if a second run on detached inputs, with torch's random state restored, returns bitwise identical outputs and ends in
the same random state. A trial uses `autograd.grad`, so it changes no `.grad` and runs no hook of a gradient accumulator. It
skips the hooks of submodules, since a hook might keep an output of the second run. Forward pre-hooks run, since they may set
weights.
"""

import collections
import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fgoffload.engine import Device
from fgoffload.engine.identity import get_key, get_version
from fgoffload.engine.torch_internals import skip, tree_map_only
from fgoffload.integrations.pytorch.outputs import find_tensor, list_tensors
from fgoffload.planner.ranks.measured_layers import LAYER_INPUT

REST = "rest"
"""Tag for all ops of a layer outside its submodules."""

_CHANGES_BUFFER = "it changes a buffer"

_HEAD_START_S = 2e-3
"""Seconds for which the device is stalled, so that the CPU can queue a module's kernels before the first one runs."""

_PLAIN = (torch.Tensor, torch.dtype, torch.device, bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes of every module."""


@dataclasses.dataclass(slots=True)
class Measured:
    """Measurements of one module that ran alone, for one microbatch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    backward_extra_bytes: int = 0
    input: int | None = None
    """Index of the storage that a recompute of the module starts from, in `MeasuredBlock.storages`."""
    refusal: str | None = None
    """Reason why the module cannot be recomputed. None if it can."""


@dataclasses.dataclass(slots=True)
class MeasuredBlock:
    """Measurements of a layer and its parts."""

    name: str
    whole: Measured
    parts: dict[str, Measured]
    storages: list[tuple[int, tuple[str, ...]]]
    """Bytes of each saved storage and each input, with the tags of the parts that save it."""
    gradient_bytes: int = 0
    """Bytes of parameter gradients that the layer's backward allocates."""

    @property
    def is_measured(self) -> bool:
        """Whether the layer could be rerun and measured. If not, all of it is offloaded."""
        return self.whole.forward_s > 0


class State:
    """State that a run may change: random states, buffers, inputs and attributes."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(self, module: torch.nn.Module, inputs: Any) -> None:
        self.random = _get_random_states()
        self.python = _get_python_states()
        self.buffers = [buffer.clone() for buffer in module.buffers()]
        self.versions = [get_version(tensor) for tensor in list_tensors(inputs)]
        self._held: list[Any] = []
        self.attributes = [
            (name, self._freeze(value))
            for one in module.modules()
            for owner in (one, *(kind for kind in type(one).__mro__ if kind not in torch.nn.Module.__mro__))
            for name, value in vars(owner).items()
            if name not in _OF_TORCH and not name.startswith("__")
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def find_change(self, module: torch.nn.Module, inputs: Any) -> str | None:
        """Return a message about a change since this object was created, or None. Ignores torch's random states."""
        now = State(module, inputs)
        if now.python != self.python:
            return "it uses random numbers of Python or NumPy"
        if not _are_equal(self.buffers, now.buffers):
            return _CHANGES_BUFFER
        if now.versions != self.versions:
            return "it changes its input in place"
        changed = (name for name, value in now.attributes if (name, value) not in self.attributes)
        return f"it changes its attribute {next(changed, '')}" if now.attributes != self.attributes else None

    def _freeze(self, value: Any, *, depth: int = 4) -> Any:
        """Return a copy of `value` to compare later. Containers are copied up to `depth`. Most other objects are ignored."""
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, random.Random):
            return value.getstate()
        if type(value) in (dict, list, tuple, set) and depth:
            parts = value.items() if isinstance(value, dict) else value
            return [self._freeze(one, depth=depth - 1) for one in parts]
        if isinstance(value, torch.Tensor):
            self._held.append(value)  # otherwise, another tensor could get the same id
            return id(value)
        return value if isinstance(value, _PLAIN) else type(value)


def _get_python_states() -> list[Any]:
    numpy = sys.modules.get("numpy.random")
    return [random.getstate(), None if numpy is None else str(numpy.get_state(legacy=False)["state"])]


def _get_random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_available() else states


def _set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def _are_equal(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    ones, others = list(first), list(second)
    return len(ones) == len(others) and all(_is_same(one, other) for one, other in zip(ones, others, strict=True))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach().contiguous(), other.detach().contiguous()
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class Trial:
    """Measures one layer right after its real forward.

    `parameters` are keys of storages that never count as saved. `count_peak` returns the allocated bytes, and their peak since
    its last call.
    """

    def __init__(
        self, device: Device, layer: torch.nn.Module, parameters: set[int], count_peak: Callable[[], tuple[int, int]]
    ) -> None:
        self._device = device
        self._layer = layer
        self._parameters = parameters
        self._count_peak = count_peak
        self._open: list[str] = []
        self._records_parts = False
        self._saved: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self._runs: dict[str, list[_Run]] = {}

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, output: Any, before: State) -> MeasuredBlock:
        """Rerun the layer, then each part alone. The real forward began in the state `before` and returned `output`."""
        after, buffers = _get_random_states(), [buffer.clone() for buffer in self._layer.buffers()]
        refusal = before.find_change(self._layer, (args, kwargs)) or _find_unrepeatable(args, kwargs)
        whole, parts = Measured(refusal=refusal), {}
        try:
            with _without_hooks(self._layer):
                if refusal in (None, _CHANGES_BUFFER):
                    whole = self._measure(_Run(self._layer, forward, (args, kwargs), before.random, output, after), saves=True)
                    whole.refusal = refusal or whole.refusal
                for tag, runs in self._runs.items():
                    parts[tag] = self._measure(runs[0])
                    if len(runs) > 1:
                        parts[tag].refusal = "it runs more than once in a layer"
            whole.input = self._find_input((args, kwargs), LAYER_INPUT)
            for tag, part in parts.items():
                part.input = self._find_input(self._runs[tag][0].inputs)
        finally:
            _set_random_states(after)
            for buffer, value in zip(self._layer.buffers(), buffers, strict=True):
                if not _is_same(buffer, value):
                    buffer.data.copy_(value)  # without changing its version counter, since the real graph may have saved it
        storages = [(tensor.untyped_storage().nbytes(), tuple(tags)) for tensor, tags in self._saved.values()]
        return MeasuredBlock(type(self._layer).__name__, whole, parts, storages)

    @skip
    def run_part(self, module: torch.nn.Module, tag: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a part of the layer during the trial, and record the call."""
        if tag in self._open or not self._records_parts:
            return forward(*args, **kwargs)
        state = State(module, (args, kwargs))
        self._open.append(tag)
        output = forward(*args, **kwargs)
        self._open.pop()
        refusal = state.find_change(module, (args, kwargs)) or _find_unrepeatable(args, kwargs)
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        run = _Run(module, forward, _detach((args, kwargs)), state.random, kept, _get_random_states(), refusal)
        self._runs.setdefault(tag, []).append(run)
        return output

    def _measure(self, run: "_Run", *, saves: bool = False) -> Measured:
        """Run a module twice. The first run may load kernels and choose algorithms, so the second run is timed."""
        if run.refusal is not None:
            return Measured(refusal=run.refusal)
        first = self._run_once(run, saves=saves)
        return first if first.refusal is not None else self._run_once(run, saves=False)

    def _run_once(self, run: "_Run", *, saves: bool) -> Measured:
        self._records_parts, keep = saves, self._save if saves else torch.Tensor.detach
        args, kwargs = _detach(run.inputs)
        _set_random_states(run.before)
        device, stream = self._device, self._device.current_stream()
        device.stall(_HEAD_START_S)
        times = [device.record_event(stream, is_timed=True)]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run.forward(*args, **kwargs)
        times.append(device.record_event(stream, is_timed=True))
        same_random = _are_equal(run.after, _get_random_states())
        outputs = [tensor for tensor in list_tensors(output) if tensor.requires_grad]
        leaves = [tensor for tensor in list_tensors((args, kwargs)) if tensor.requires_grad]
        leaves += [one for one in run.module.parameters() if one.requires_grad and not one._backward_hooks]  # noqa: SLF001
        measured = Measured()
        if not _are_equal(list_tensors(run.output), list_tensors(output)):
            measured.refusal = "a second run returns different outputs"
        elif not same_random:
            measured.refusal = "a second run draws different random numbers"
        allocated_bytes, _ = self._count_peak()
        device.stall(_HEAD_START_S)
        times.append(device.record_event(stream, is_timed=True))
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(one) for one in outputs], allow_unused=True)
        times.append(device.record_event(stream, is_timed=True))
        device.synchronize(times[-1])
        measured.backward_extra_bytes = max(0, self._count_peak()[1] - allocated_bytes)
        measured.forward_s = device.measure_seconds(times[0], times[1])
        measured.backward_s = device.measure_seconds(times[2], times[3])
        return measured

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        if tensor.layout is torch.strided and (key := get_key(tensor)) not in self._parameters:
            self._add_saved(key, kept, self._open[-1] if self._open else REST)
        return kept

    def _add_saved(self, key: int, tensor: torch.Tensor, *new: str) -> None:
        _, tags = self._saved.setdefault(key, (tensor, []))
        tags.extend(tag for tag in new if tag not in tags)

    def _find_input(self, inputs: Any, *tags: str) -> int | None:
        """Return the storage index of the first input that requires a gradient, or None. Add its storage if it is missing."""
        tensor = find_tensor(inputs)
        if tensor is None:
            return None
        key = get_key(tensor)
        self._add_saved(key, tensor.detach(), *tags)
        return list(self._saved).index(key)


@dataclasses.dataclass(slots=True)
class _Run:
    module: torch.nn.Module
    forward: Callable[..., Any]
    inputs: tuple[Any, Any]
    before: list[torch.Tensor]
    output: Any
    after: list[torch.Tensor]
    refusal: str | None = None


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    inner = [vars(one) for one in module.modules() if one is not module]
    hooks = [(attributes, name, attributes[name]) for attributes in inner for name in _HOOKS if attributes.get(name)]
    for attributes, name, _ in hooks:
        attributes[name] = collections.OrderedDict()
    try:
        yield
    finally:
        for attributes, name, kept in hooks:
            attributes[name] = kept


def _detach(inputs: Any) -> Any:
    """Detach all tensors. A tensor that is passed twice, such as query and key, is one tensor in the result too."""
    made: dict[int, torch.Tensor] = {}

    def detach(one: torch.Tensor) -> torch.Tensor:
        return made.setdefault(id(one), one.detach().requires_grad_(one.requires_grad))

    return tree_map_only(torch.Tensor, detach, inputs)


def _find_unrepeatable(args: Any, kwargs: Any) -> str | None:
    """Return why an argument prevents a second run, or None."""
    waiting = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (tuple, list)):
            waiting.extend(value)
        elif isinstance(value, dict) and type(value) is dict:
            waiting.extend(value.values())
        elif not isinstance(value, _PLAIN):
            return f"it has a {type(value).__name__} argument, which a second run might change"
    return None
