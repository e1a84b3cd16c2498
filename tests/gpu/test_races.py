"""Runs 200 random steps with delayed copies, compute and unpacks: bitwise identical, and different if a wait is missing."""

import itertools

import pytest
import torch
from support.hostile import HostileGpu, poison_blocks
from support.programs import Runner, are_bitwise_identical, check_can_reveal_faults, draw_program

from fgoffload.engine import Hazard, OffloadEngine

pytestmark = pytest.mark.usefixtures("_deterministic", "_any_stream_may_accumulate")

STEPS_OF_EACH_DELAY = 50
STEPS_OF_AN_ENGINE = 5
"""An engine has one policy and one budget, and several steps, so that host blocks are used again."""
SIZES = (256, 512)
BUDGETS_BYTES = (8 << 20, 24 << 20, 96 << 20)
DELAYS = {
    "copies to the host": {"d2h"},
    "copies to the device": {"h2d"},
    "compute": {"compute"},
    "all": {"d2h", "h2d", "compute"},
}


def find_wrong_steps(device: HostileGpu, seeds: range, *, first_only: bool = False) -> list[int]:
    """Return the seeds of the programs whose results differ with an engine on `device`; with `first_only` stop at some."""
    torch.cuda.empty_cache()  # what earlier tests left would be used instead of what is poisoned here
    runner = Runner("cuda")
    wrong = []
    for engine_index, start in enumerate(seeds[::STEPS_OF_AN_ENGINE]):
        policy = draw_program(start, sizes=SIZES).policy
        budget_bytes = BUDGETS_BYTES[engine_index % len(BUDGETS_BYTES)]
        engine = poison_blocks(OffloadEngine(device=device, policy=policy, host_budget_bytes=budget_bytes))
        for seed in itertools.takewhile(lambda seed: seed in seeds, range(start, start + STEPS_OF_AN_ENGINE)):
            program = draw_program(seed, sizes=SIZES)
            expected = runner.run(program, None)
            check_can_reveal_faults(expected)
            found = runner.run(program, engine, pause=lambda: device.nap(device.current_stream()))
            torch.cuda.synchronize()  # a copy that nobody waited for must not write into what the next program expects
            if not are_bitwise_identical(expected, found):
                wrong.append(seed)
        moved_bytes = engine.finish_step().d2h_bytes
        engine.close()
        assert moved_bytes > 0
        if wrong and first_only:
            break
    return wrong


@pytest.mark.parametrize("delay", DELAYS)
def test_random_steps_give_the_same_bits_however_late_things_are(delay):
    first = STEPS_OF_EACH_DELAY * list(DELAYS).index(delay)
    device = HostileGpu(late=DELAYS[delay], probability=0.15, milliseconds=1.5, seed=first)
    wrong = find_wrong_steps(device, range(first, first + STEPS_OF_EACH_DELAY))
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
def test_random_steps_differ_when_a_wait_is_left_out(left_out, late):
    device = HostileGpu(late={late}, probability=0.5, left_out=left_out)
    assert find_wrong_steps(device, range(40), first_only=True) != []
