"""Over thousands of steps of a mixture of experts, whose shapes change with the routing, little memory is reserved in vain.

Fragmentation is `(reserved - peak) / reserved`: the share of the reserved memory that was never needed. Reserved, because
locked memory is not given back between steps; peak, because so many bytes must lie somewhere at one moment, whoever hands them
out. It counts what lies idle at the ends of slabs, between blocks, and in slabs that are too large or too small.
"""

import collections
import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch

from fgoffload.engine import CpuDevice, HostArena, HostBlock, HostSlab
from fgoffload.engine.arena import MIN_PART_BYTES
from fgoffload.units import GIB, MIB

LIMIT = 0.1


class Unbacked(CpuDevice):
    """Host memory that has a size and no bytes."""

    def allocate_host(self, size_bytes: int) -> HostSlab:
        return HostSlab(torch.empty(size_bytes, dtype=torch.uint8, device="meta"), free=lambda: None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What one rank of a training saves in each layer and microbatch, in bfloat16, and how its schedule runs."""

    tokens: int
    hidden: int
    ffn: int
    topk: int
    experts: int
    local_experts: int
    attention_mib: tuple[int, ...]
    """What `core_attn` saves: query, key, value and the output."""
    layers: int
    in_flight: int
    """Microbatches whose forward may be ahead of their backward."""
    microbatches: int
    skew: float = 0.6
    """How unevenly tokens go to experts: the standard deviation of the logarithm of an expert's share."""


# fmt: off
MODELS = {
    # Sizes per layer and microbatch in MiB: attention, expert_fc1, and moe_act of all local experts.
    "hidden 7168, 256 experts": Model(  # 640, 448, 384
        tokens=4096, hidden=7168, ffn=2048, topk=8, experts=256, local_experts=8, attention_mib=(192, 192, 128, 128),
        layers=2, in_flight=4, microbatches=6,
    ),
    "hidden 4096, 8 wide experts": Model(  # 80, 64, 672
        tokens=4096, hidden=4096, ffn=14336, topk=2, experts=8, local_experts=2, attention_mib=(32, 8, 8, 32),
        layers=2, in_flight=4, microbatches=6,
    ),
    "hidden 4096, 32 experts": Model(
        tokens=4096, hidden=4096, ffn=1536, topk=4, experts=32, local_experts=4, attention_mib=(32, 8, 8, 32),
        layers=2, in_flight=2, microbatches=3,
    ),
}
# fmt: on


class Training:
    """Steps of a model: microbatches in the order of 1F1B, each with a routing of its own."""

    def __init__(self, model: Model, arena: HostArena, *, seed: int = 0) -> None:
        self.model = model
        self.arena = arena
        self.parts = collections.Counter()
        """How many blocks have how many parts."""
        self.refused = 0
        """The blocks that the budget did not allow."""
        self._random = random.Random(seed)

    def run_step(self) -> None:
        model = self.model
        waiting = collections.deque()
        for _ in range(model.microbatches):
            if len(waiting) == model.in_flight:
                self._run_backward(waiting.popleft())
            waiting.append([block for _ in range(model.layers) for block in self._run_layer()])
        while waiting:
            self._run_backward(waiting.popleft())

    def _run_layer(self) -> Iterator[HostBlock]:
        model = self.model
        tokens = self._route()
        sizes = [mib * MIB for mib in model.attention_mib]
        sizes.append(sum(tokens) * model.hidden * 2)  # expert_fc1: one storage, of which each expert saves a slice
        sizes += [count * 2 * model.ffn * 2 for count in tokens]  # moe_act: the input, gate and up
        sizes += [count * model.ffn * 2 for count in tokens]  # and its output, which the second linear saves
        for size_bytes in sizes:
            block = self.arena.find_block(size_bytes)
            if block is None:
                self.refused += 1
            else:
                self.parts[len(block.parts)] += 1
                yield block

    def _run_backward(self, blocks: list[HostBlock]) -> None:
        """From the last on, but for the last few, which were called back before they had left, and for the order in a group."""
        del blocks[len(blocks) - self._random.randrange(4) :]
        while blocks:
            blocks.pop(max(0, len(blocks) - 1 - self._random.randrange(4)))

    def _route(self) -> list[int]:
        """Return the tokens of each local expert, those of the other ranks' data included."""
        model, draw = self.model, self._random
        popularity = [draw.lognormvariate(0, model.skew) for _ in range(model.experts)]
        # As many ranks as it takes for all experts bring their tokens here.
        tokens = model.tokens * model.topk * (model.experts // model.local_experts)
        means = [tokens * share / sum(popularity) for share in popularity[: model.local_experts]]
        return [max(0, round(draw.gauss(mean, mean**0.5))) for mean in means]


def make_arena(**options: int) -> HostArena:
    return HostArena(Unbacked(), **{"budget": 1 << 50, "min_part_bytes": MIN_PART_BYTES, **options})


def get_fragmentation(arena: HostArena) -> float:
    return (arena.reserved_bytes - arena.peak_bytes) / arena.reserved_bytes


LONG = pytest.param("hidden 4096, 32 experts", 10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


@pytest.mark.parametrize(("name", "steps"), [*((name, 40) for name in MODELS), LONG])
def test_models_of_all_sizes_stay_below_a_tenth(name, steps):
    arena = make_arena()
    training = Training(MODELS[name], arena)
    for _ in range(steps):
        training.run_step()
        assert get_fragmentation(arena) < LIMIT
    # A copy for each part: few blocks have more than one, and none has very many.
    mean = sum(parts * count for parts, count in training.parts.items()) / training.parts.total()
    assert mean < 1.2
    assert max(training.parts) <= 32
    assert arena.used_bytes == 0


def test_a_budget_is_used_nearly_to_its_end_and_the_rest_stays_on_the_device():
    model = MODELS["hidden 4096, 8 wide experts"]
    arena = make_arena(budget=4 * GIB)
    training = Training(model, arena)
    for _ in range(40):
        training.run_step()
        assert arena.reserved_bytes <= 4 * GIB
    assert training.refused > 0
    assert arena.peak_bytes > (1 - LIMIT) * 4 * GIB
    assert arena.used_bytes == 0
