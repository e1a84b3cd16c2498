"""Random programs of operators, regions, microbatches and backwards: the same bits with and without the engine, nothing left.

A program is drawn as data, run without an engine, and then run with one. So what torch itself would refuse is seen first, and
what differs is the engine's.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sites import has_hooks, make_engine
from support.tensors import assert_same_bits, leaf

from fgoffload import Site, TransferPolicy
from fgoffload.engine import DelayedCpuDevice, Lane, OffloadEngine

N = 16
NBYTES = N * N * 4


class SaveMany(torch.autograd.Function):
    """Saves an input, views of both inputs, one view twice, and its own output."""

    @staticmethod
    def forward(ctx, h, k):
        output = h * k
        ctx.save_for_backward(h, k, h[2:9], k.t()[:, 1::3], h[2:9], output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        h, k, rows, columns, again, output = ctx.saved_tensors
        scale = rows.mean() + columns.mean() - again.mean() + output.mean()
        return gradient * k + scale, gradient * h


def change_a_clone(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    clone = h.clone()
    clone[: N // 2].mul_(0.5)  # in place, and before anything saves it
    clone.add_(k)
    return clone.sin()


def fill_rows(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(N, N)
    for index, part in enumerate(h.split([3, 0, 8, 5])):
        start = (0, 3, 3, 11)[index]
        rows[start : start + part.shape[0]] = part.sin() * k[: part.shape[0]]
    return rows


def use_complex_numbers(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(h.contiguous().view(N, N // 2, 2))
    return torch.view_as_real(numbers.conj() * numbers * numbers).reshape(N, N).tanh()


TABLE = torch.linspace(-1, 1, N * N).reshape(N, N)
"""Without a gradient, and used by all microbatches."""

OPERATIONS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda h, k: h.tanh().exp() * 0.3,
    lambda h, k: (h @ h.t() / N).sin(),
    lambda h, k: h * TABLE,
    lambda h, k: h + k,
    lambda h, k: h.t(),
    lambda h, k: (h.detach() * k * k.detach().cos()).sin(),
    lambda h, k: (h[::2].repeat(2, 1) * k).sin(),
    lambda h, k: torch.cat([part.sin() for part in h.split([1, 9, 0, 6])]),
    lambda h, k: h[3:4].expand(N, N) * k[:, 2:3].cos(),
    lambda h, k: h.reshape(-1).unfold(0, N, 5)[:N].sin(),
    lambda h, k: (h[torch.arange(N) % 7] * k).sin(),
    lambda h, k: torch.nn.functional.layer_norm(h, (N,), TABLE[0], TABLE[1]),
    lambda h, k: h.to(torch.bfloat16).sin().to(torch.float32) + k.to(torch.float64).cos().to(torch.float32),
    use_complex_numbers,
    lambda h, k: torch.nn.functional.gelu(h @ k / N) * h.sigmoid(),
    change_a_clone,
    fill_rows,
    lambda h, k: SaveMany.apply(h, k).sin(),
)

# The program, as data. A register is counted from the last one that was written.


@dataclasses.dataclass(frozen=True)
class Compute:
    operation: int
    first: int
    second: int


@dataclasses.dataclass(frozen=True)
class InRegion:
    tag: str
    is_held: bool
    ends_late: bool
    is_marked: bool
    body: tuple["Instruction", ...]


@dataclasses.dataclass(frozen=True)
class Watched:
    body: tuple["Instruction", ...]


@dataclasses.dataclass(frozen=True)
class Flush:
    pass


@dataclasses.dataclass(frozen=True)
class Backward:
    outputs: tuple[int, ...]
    leaves: tuple[int, ...] | None
    """Those that `torch.autograd.grad` is asked for; None accumulates into all."""


Instruction = Compute | InRegion | Watched | Flush


@dataclasses.dataclass(frozen=True)
class Program:
    forwards: tuple[tuple[Instruction, ...], ...]
    """Of each microbatch."""
    backwards: tuple[tuple[Backward, ...], ...]
    """Of each microbatch, all but the last with `retain_graph`."""
    order: tuple[int, ...]
    """The microbatch that goes on next; when the list is used up, the first that is not done."""


REGISTERS = st.integers(0, 5)
COMPUTE = st.builds(Compute, operation=st.integers(0, len(OPERATIONS) - 1), first=REGISTERS, second=REGISTERS)


def nest(instructions: st.SearchStrategy[Instruction]) -> st.SearchStrategy[Instruction]:
    body = st.lists(instructions, min_size=1, max_size=4).map(tuple)
    return st.builds(
        InRegion,
        tag=st.sampled_from(["core_attn", "moe_act", "expert_fc1"]),
        is_held=st.booleans(),
        ends_late=st.booleans(),
        is_marked=st.booleans(),
        body=body,
    ) | st.builds(Watched, body=body)


FORWARDS = st.lists(st.recursive(COMPUTE | st.just(Flush()), nest, max_leaves=8), min_size=1, max_size=5).map(tuple)
BACKWARDS = st.lists(
    st.builds(
        Backward,
        outputs=st.lists(REGISTERS, min_size=1, max_size=3, unique=True).map(tuple),
        leaves=st.none() | st.sampled_from([(0,), (1,), (0, 1)]),
    ),
    max_size=3,
).map(tuple)


@st.composite
def make_programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(1, 3))
    return Program(
        forwards=tuple(draw(FORWARDS) for _ in range(count)),
        backwards=tuple(draw(BACKWARDS) for _ in range(count)),
        order=tuple(draw(st.lists(st.integers(0, count - 1), max_size=16))),
    )


class Microbatch:
    """One microbatch on its way through its forward and its backwards."""

    def __init__(self, engine: OffloadEngine | None, index: int, leaves: list[torch.Tensor]) -> None:
        self.engine = engine
        self.leaves = leaves
        self.found: list[torch.Tensor | None] = []
        self._lane = Lane(chunk=0, microbatch=index)
        self._registers = [leaves[0] * (0.5 + index), leaves[1] * 0.5]
        self._late: list[Callable[[], None]] = []
        self._count = 0

    def run(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            first, second = self._get(instruction.first), self._get(instruction.second)
            self._registers.append(OPERATIONS[instruction.operation](first, second))
        elif isinstance(instruction, Flush):
            if self.engine:
                self.engine.flush()
        elif isinstance(instruction, Watched):
            with self.engine.watch(self._lane) if self.engine else contextlib.nullcontext():
                self._run_all(instruction.body)
        else:
            self._run_region(instruction)

    def end_late_regions(self) -> None:
        while self._late:
            self._late.pop()()

    def run_backward(self, backward: Backward, *, is_last: bool) -> None:
        outputs = [output for output in map(self._get, backward.outputs) if output.requires_grad]
        if not outputs:
            return
        seeds = [(TABLE + number).to(output.dtype) for number, output in enumerate(outputs)]
        if backward.leaves is None:
            torch.autograd.backward(outputs, seeds, retain_graph=not is_last)
            self.found += [leaf.grad if leaf.grad is None else leaf.grad.clone() for leaf in self.leaves]
        else:
            leaves = [self.leaves[index] for index in backward.leaves]
            self.found += torch.autograd.grad(outputs, leaves, seeds, retain_graph=not is_last, allow_unused=True)

    def _run_all(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            self.run(instruction)

    def _run_region(self, instruction: InRegion) -> None:
        self._count += 1
        site = Site(chunk=0, layer=self._count, tag=instruction.tag)
        region = self.engine.find_region(site, self._lane) if self.engine else None
        if region is None:
            self._run_all(instruction.body)
            return
        region.enter(self._registers[-1])
        with region.saving():
            self._run_all(instruction.body)
        output = self._registers[-1] if instruction.is_marked else None
        end = functools.partial(region.end, output, is_held=instruction.is_held)
        if instruction.ends_late:
            self._late.append(end)
        else:
            end()

    def _get(self, register: int) -> torch.Tensor:
        return self._registers[-1 - register % len(self._registers)]


def run(program: Program, engine: OffloadEngine | None) -> list[torch.Tensor | None]:
    """Return all gradients that the program asks for, in their order."""
    leaves = [leaf(N, N), leaf(N, N, seed=1)]
    microbatches = [Microbatch(engine, index, leaves) for index in range(len(program.forwards))]
    found: list[torch.Tensor | None] = []

    def list_steps(index: int) -> Iterable[None]:
        microbatch = microbatches[index]
        for instruction in program.forwards[index]:
            yield microbatch.run(instruction)
        microbatch.end_late_regions()
        for number, backward in enumerate(program.backwards[index]):
            yield microbatch.run_backward(backward, is_last=number == len(program.backwards[index]) - 1)

    steps = [iter(list_steps(index)) for index in range(len(microbatches))]
    for index in (*program.order, *range(len(steps))):
        next(steps[index], None)
    for rest in steps:
        for _ in rest:
            pass
    for microbatch in microbatches:
        found += microbatch.found
    return found + [one.grad for one in leaves]


SIZES = st.sampled_from([0, NBYTES, 3 * NBYTES, 1 << 20])
CASES = {
    "program": make_programs(),
    "is_delayed": st.booleans(),
    "window_bytes": SIZES,
    "prefetch_bytes": SIZES,
    "min_offloaded_numel": st.sampled_from([0, 64, N * N, N * N + 1]),
    "host_budget_bytes": st.sampled_from([0, 512, 3 * NBYTES, 1 << 20]),
}


def check(
    program: Program,
    *,
    is_delayed: bool,
    window_bytes: int,
    prefetch_bytes: int,
    min_offloaded_numel: int,
    host_budget_bytes: int,
) -> None:
    expected = run(program, None)
    assert all(gradient is None or gradient.isfinite().all() for gradient in expected)  # a NaN would hide another
    engine = make_engine(
        DelayedCpuDevice() if is_delayed else None,
        policy=TransferPolicy(window_bytes=window_bytes, prefetch_bytes=prefetch_bytes),
        min_offloaded_numel=min_offloaded_numel,
        host_budget_bytes=host_budget_bytes,
    )
    for _ in range(2):  # the second step begins with what the engine has learned in the first
        assert_same_bits(expected, run(program, engine))
        assert not has_hooks()
        assert engine.arena.used_bytes == 0
        assert engine.arena.peak_bytes <= host_budget_bytes
    engine.close()
    assert engine.arena.reserved_bytes == 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**CASES)
def test_random_programs_give_the_same_bits(program, **options):
    check(program, **options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**CASES)
def test_thousands_of_random_programs_give_the_same_bits(program, **options):
    check(program, **options)
