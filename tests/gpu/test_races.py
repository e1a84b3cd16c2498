"""Runs 200 random steps with delayed copies, compute and unpacks: bitwise identical, and different if a wait is missing."""

import itertools

import pytest
import torch
from support.hostile import HostileGpu, poison_blocks
from support.programs import Runner, are_bitwise_identical, check_can_reveal_faults, draw_program

from fgoffload.engine import Hazard, OffloadEngine

pytestmark = pytest.mark.usefixtures("_deterministic", "_any_stream_may_accumulate")

STEPS_PER_DELAY = 50
STEPS_PER_ENGINE = 5
"""Each engine has one policy and one budget, and runs several steps, so that host blocks are reused."""
SIZES = (256, 512)
BUDGETS_BYTES = (8 << 20, 24 << 20, 96 << 20)
DELAYS = {
    "copies to the host": {"d2h"},
    "copies to the device": {"h2d"},
    "compute": {"compute"},
    "all": {"d2h", "h2d", "compute"},
}


def find_wrong_steps(device: HostileGpu, seeds: range, *, first_only: bool = False) -> list[int]:
    """Return the seeds of programs whose results differ with an engine on `device`; `first_only` stops early."""
    torch.cuda.empty_cache()  # cached blocks of earlier tests would replace the poisoned ones
    runner = Runner("cuda")
    wrong = []
    for engine_index, start in enumerate(seeds[::STEPS_PER_ENGINE]):
        policy = draw_program(start, sizes=SIZES).policy
        budget_bytes = BUDGETS_BYTES[engine_index % len(BUDGETS_BYTES)]
        engine = poison_blocks(OffloadEngine(device=device, policy=policy, host_budget_bytes=budget_bytes))
        for seed in itertools.takewhile(lambda seed: seed in seeds, range(start, start + STEPS_PER_ENGINE)):
            program = draw_program(seed, sizes=SIZES)
            expected = runner.run(program, None)
            check_can_reveal_faults(expected)
            found = runner.run(program, engine, pause=lambda: device.nap(device.current_stream()))
            torch.cuda.synchronize()  # a pending copy must not overwrite the expected results of the next program
            if not are_bitwise_identical(expected, found):
                wrong.append(seed)
        moved_bytes = engine.finish_step().d2h_bytes
        engine.close()
        assert moved_bytes > 0
        if wrong and first_only:
            break
    return wrong


@pytest.mark.parametrize("delay", DELAYS)
def test_random_steps_are_bitwise_identical_under_delays(delay):
    first = STEPS_PER_DELAY * list(DELAYS).index(delay)
    device = HostileGpu(late=DELAYS[delay], probability=0.15, milliseconds=1.5, seed=first)
    wrong = find_wrong_steps(device, range(first, first + STEPS_PER_DELAY))
    assert wrong == [], [draw_program(seed, sizes=SIZES) for seed in wrong[:2]]


@pytest.mark.parametrize(
    ("left_out", "late"),
    [
        (Hazard.SOURCE_UNWRITTEN, "compute"),
        (Hazard.SOURCE_STILL_COPIED, "d2h"),
        (Hazard.BLOCK_UNWRITTEN, "d2h"),
        (Hazard.BUFFER_STILL_USED, "compute"),
        (Hazard.BUFFER_UNFILLED, "h2d"),
    ],
    ids=lambda value: value.name if isinstance(value, Hazard) else value,
)
def test_random_steps_differ_if_a_wait_is_missing(left_out, late):
    device = HostileGpu(late={late}, probability=0.5, left_out=left_out)
    assert find_wrong_steps(device, range(40), first_only=True) != []
