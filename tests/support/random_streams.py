"""Small random runs on several streams, for Hypothesis."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from support.sites import Sites
from support.streams import FAR, NBYTES, Function, Program

STREAMS = ("compute", "side", "third")


class Kind(enum.Enum):
    SITE = enum.auto()  # an op in a region, on the stream of its input
    WATCHED = enum.auto()  # an op that is watched
    PLAIN = enum.auto()  # an op outside all regions
    TWO_STREAMS = enum.auto()  # two regions on two streams that save one storage
    MOVE = enum.auto()  # an op on another stream that saves nothing
    JOIN = enum.auto()  # one stream waits for another
    FLUSH = enum.auto()


FUNCTIONS: dict[str, Function] = {
    "sine": lambda h: h.sin(),
    "square": lambda h: h * h,
    "columns": lambda h: h[:, ::8].sin().repeat(1, 8),
    "rows": lambda h: h[:3].sin().sum() + h.cos(),
}


@dataclasses.dataclass(frozen=True)
class Step:
    kind: Kind
    source: int
    stream: str
    function: str
    is_held: bool
    keeps_source: bool


class Ending(enum.Enum):
    BACKWARD = enum.auto()
    TWICE = enum.auto()  # two backward passes of a retained graph
    DROP = enum.auto()
    DROP_REACHED = enum.auto()  # when backward has reached the last region, with reloads in flight


@dataclasses.dataclass(frozen=True)
class Microbatch:
    steps: list[Step]
    ending: Ending
    ends_late: bool
    """Run the backward after the forwards of all microbatches."""


@dataclasses.dataclass(frozen=True)
class Setup:
    window: int
    prefetch: int
    budget: int
    sees_done: int | None
    """The seed of the copies that the host sees as done. None sees none."""
    microbatches: list[Microbatch]


def steps() -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        kind=st.sampled_from([Kind.SITE, Kind.SITE, Kind.TWO_STREAMS, *Kind]),
        source=st.integers(0, 3),
        stream=st.sampled_from(STREAMS),
        function=st.sampled_from(["sine", *FUNCTIONS]),
        is_held=st.booleans(),
        keeps_source=st.booleans(),
    )


def setups() -> st.SearchStrategy[Setup]:
    microbatch = st.builds(
        Microbatch, steps=st.lists(steps(), min_size=2, max_size=7), ending=st.sampled_from(Ending), ends_late=st.booleans()
    )
    return st.builds(
        Setup,
        window=st.sampled_from([0, NBYTES, FAR]),
        prefetch=st.sampled_from([0, 2 * NBYTES, FAR]),
        budget=st.sampled_from([2 * NBYTES, 1 << 20]),
        sees_done=st.none() | st.integers(0, 9),
        microbatches=st.lists(microbatch, min_size=3, max_size=3),
    )


def make_sees_done(setup: Setup) -> Callable[[], bool]:
    if setup.sees_done is None:
        return lambda: False
    generator = random.Random(setup.sees_done)
    return lambda: generator.random() < 0.3


def run_setup(program: Program, setup: Setup) -> None:
    engine = program.make_engine(window=setup.window, prefetch=setup.prefetch, budget=setup.budget)
    weight = program.leaf()
    pending: list[tuple[torch.Tensor, Sites, Ending]] = []
    for number, microbatch in enumerate(setup.microbatches):
        sites = Sites(engine, microbatch=number)
        forward = _Forward(program, sites)
        pending.append((forward.run(weight, microbatch.steps), sites, microbatch.ending))
        if not microbatch.ends_late:
            _end(program, *pending.pop())
    while pending:
        _end(program, *pending.pop())
    if weight.grad is not None:
        program.results.append(weight.grad)


def _end(program: Program, output: torch.Tensor, sites: Sites, ending: Ending) -> None:
    if ending is Ending.TWICE:
        program.backward(output, retain_graph=True)
    if ending in (Ending.TWICE, Ending.BACKWARD):
        program.backward(output)
    program.device.record_all_streams()  # a user who drops a graph must keep its memory until all streams are done
    if ending is Ending.DROP_REACHED and sites.engine and sites.lane.groups:
        sites.engine.approach_backward(sites.lane, sites.lane.groups[-1])


class _Forward:
    def __init__(self, program: Program, sites: Sites) -> None:
        self._program = program
        self._device = program.device
        self._sites = sites
        self._live: list[tuple[torch.Tensor, str]] = []

    def run(self, weight: torch.Tensor, forward_steps: list[Step]) -> torch.Tensor:
        self._live = [(self._program.run(lambda w: w * 2, weight), "compute")]
        for step in forward_steps:
            self._run_step(step)
        self._flush()
        (total, home), *others = self._live
        self._live = []
        total = self._move(total, home, "compute", is_joined=False)
        for other, home in others:
            other = self._move(other, home, "compute", is_joined=False)
            total = self._program.run(lambda a, b: a + b, total, other)
        return total

    def _run_step(self, step: Step) -> None:
        index = step.source % len(self._live)
        tensor, home = self._live[index]
        function = self._program.wrap(FUNCTIONS[step.function])
        result = None
        if step.kind is Kind.JOIN:
            self._device.join(step.stream, home)
        elif step.kind is Kind.FLUSH:
            with self._device.on(step.stream):
                self._flush()
        elif step.kind is Kind.MOVE:
            result, home = self._move(tensor, home, step.stream, is_joined=step.is_held), step.stream
        elif step.kind is Kind.TWO_STREAMS:
            result = self._save_on_two_streams(tensor, home, step)
        else:
            with self._device.on(home):
                if step.kind is Kind.PLAIN:
                    result = function(tensor)
                elif step.kind is Kind.WATCHED:
                    with self._sites.watched():
                        result = function(tensor)
                else:
                    result = self._sites(function, tensor, is_held=step.is_held)
        del tensor
        if result is not None:
            if not step.keeps_source:
                del self._live[index]
            self._live.append((result, home))

    def _save_on_two_streams(self, tensor: torch.Tensor, home: str, step: Step) -> torch.Tensor:
        function = FUNCTIONS[step.function]
        with self._device.on(home):
            shared = self._program.run(lambda h: h * 3, tensor)
            result = self._sites(self._program.wrap(function), shared, is_held=step.is_held)
            other = self._sites(self._program.on(step.stream, function), shared, is_held=step.is_held)
        self._live.append((other, step.stream))
        return result

    def _move(self, tensor: torch.Tensor, home: str, stream: str, *, is_joined: bool) -> torch.Tensor:
        with self._device.on(home):
            moved = self._program.on(stream, lambda h: h * 2)(tensor)
        if is_joined:
            self._device.join(home, stream)
        else:
            self._device.record_stream(tensor, stream)
        return moved

    def _flush(self) -> None:
        if self._sites.engine:
            self._sites.engine.flush()
