"""How much is simulated for a plan: what it takes on any machine, where seconds would say what else the machine does."""

import collections
import cProfile
from pathlib import Path

import pytest

from fgoffload.integrations.megatron.model_shapes import read_model_file
from fgoffload.plan import Action
from fgoffload.planner.model_ranks import build_ranks
from fgoffload.planner.planning import plan_ranks
from fgoffload.planner.simulation import simulator
from fgoffload.planner.simulation.known_passes import KnownSteps
from fgoffload.planner.simulation.link_queue import LinkQueue
from fgoffload.planner.simulation.rank_run import RankRun
from fgoffload.planner.simulation.repeated_passes import RepeatingRun
from fgoffload.planner.solving import rank_searches, search
from fgoffload.planner.solving.prices import price_decisions
from fgoffload.planner.solving.program import load_solver
from fgoffload.planner.timing.hardware import get_hardware
from fgoffload.units import GIB

ARGUMENTS = Path(__file__).parents[3] / "arguments"


@pytest.fixture
def counts(monkeypatch):
    """Return what is counted while a test runs, by name."""
    found = collections.Counter()

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(RankRun, "run_pass")
    count(RepeatingRun, "_run")
    count(LinkQueue, "submit")
    count(simulator, "compile_rank")
    count(rank_searches, "simulate")
    count(search, "list_ladders")
    return found


def test_a_plan_of_deepseek_v3_and_its_prices_take_no_more_than_they_did(counts):
    model, parallelism = read_model_file(ARGUMENTS / "deepseek_v3.sh")
    ranks = build_ranks(model, parallelism, get_hardware("h100"))
    report = plan_ranks(ranks, budget_bytes=76 * GIB)
    rows = {
        (one.kind, one.tag, one.action): [other for other in report.solution.decisions if other.tag == one.tag]
        for one in report.solution.decisions
        if one.action is not Action.KEEP
    }
    solved = counts["run_pass"]
    counts["_run"] = 0
    known = KnownSteps()
    simulator.simulate(ranks, report.solution.plan, known=known)
    for (kind, _, action), decisions in rows.items():
        own = [one for one in decisions if (one.kind, one.action) == (kind, action)]
        price_decisions(report.ranks, report.solution.plan, report.solution.result, own, budget_bytes=76 * GIB, known=known)
    priced = counts["_run"]
    # A twentieth more than on 26 November 2026, when one round came to be enough to see that all to come are alike: 37 168,
    # 45 316 before, and 90 200 before chunks and ranks that do the same shared what passes come to.
    assert solved < 39_000
    # Each row is one step, of which what passes of the whole plan come to is known: of 13 and of the plan itself 566 are run
    # where anything leaves. Before that was known 1174 were of eight rows.
    assert priced < 595 < len(rows) * sum(len(rank.passes) for rank in ranks)
    assert counts["simulate"] <= 8
    assert counts["compile_rank"] < 1_600


def test_a_plan_for_sixteen_stages_runs_no_pass_twice_that_begins_alike(counts):
    flags = ["--pipeline-model-parallel-size", "16", "--num-gpus", "2048"]
    model, parallelism = read_model_file(ARGUMENTS / "deepseek_v3.sh", typed=flags)
    ranks = build_ranks(model, parallelism, get_hardware("h100"))
    assert (len(ranks), {len(rank.chunks) for rank in ranks}) == (16, {2})
    report = plan_ranks(ranks, budget_bytes=70 * GIB)
    assert report.solution.result.peak_bytes < 70 * GIB
    # A twentieth more than on 26 November 2026, when alike chunks and ranks came to share what passes come to: 65 526, and
    # 233 221 before.
    assert counts["submit"] < 68_900
    # Where no simulations are left for rules of thumb, nobody thinks of any: 16 ranks, of which 9 differ.
    assert counts["list_ladders"] <= 3


def test_of_a_step_with_many_microbatches_few_are_simulated(counts):
    model, parallelism = read_model_file(ARGUMENTS / "kimi_k2.sh")
    report = plan_ranks(build_ranks(model, parallelism, get_hardware("h100")), budget_bytes=76 * GIB)
    passes = sum(len(rank.passes) for rank in report.ranks)
    assert report.solution.result.peak_bytes < 76 * GIB
    # Four baselines and the nearest flags, of all ranks. Two simulated pass by pass would be as many.
    assert counts["run_pass"] < 2 * passes


def test_a_plan_of_mixtral_takes_no_more_calls_than_it_did():
    # All that the planner does is Python, but for programs: what it calls is its time, and no other process is in that.
    model, parallelism = read_model_file(ARGUMENTS / "mixtral_8x7b.sh")
    ranks = build_ranks(model, parallelism, get_hardware("h100"))
    load_solver()
    profile = cProfile.Profile()
    profile.runcall(plan_ranks, ranks, budget_bytes=60 * GIB)
    # A twentieth more than on 26 November 2026, 2.65 million on Python 3.11: 4.58 million before alike chunks and ranks came to
    # share what passes come to, and 6.25 before chunks, choices and registries of tags were made once.
    assert sum(function.callcount for function in profile.getstats()) < 2_790_000


def test_not_all_ways_to_treat_a_layer_are_simulated_on_each_of_48_stages(counts):
    flags = ["--pipeline-model-parallel-size", "48", "--num-gpus", "384", "--global-batch-size", "800"]
    model, parallelism = read_model_file(ARGUMENTS / "qwen3_30b_a3b.sh", typed=flags)
    report = plan_ranks(build_ranks(model, parallelism, get_hardware("h100")), budget_bytes=20 * GIB)
    assert report.solution.result.peak_bytes < 20 * GIB
    # A layer has 2754, which are few for one rank; on all of these, each of another depth, they would be seven million passes.
    # A twentieth more than in November 2026: 143 131.
    assert counts["run_pass"] < 150_300


def test_few_ways_to_treat_each_layer_of_some_stages_are_not_all_simulated(counts):
    # Where everything fits nothing is looked for, and else no more than what a longer pipeline takes.
    words = ["--num-layers", "8", "--pp", "8", "--num-gpus", "64", "--global-batch-size", "512"]
    model, parallelism = read_model_file(ARGUMENTS / "qwen3_30b_a3b.sh", typed=words)
    ranks = build_ranks(model, parallelism, get_hardware("h100"))
    assert not plan_ranks(ranks, budget_bytes=15 * GIB).solution.plan.actions
    assert counts["compile_rank"] < 500
    counts.clear()
    assert plan_ranks(ranks, budget_bytes=round(11.6 * GIB)).solution.plan.actions
    assert counts["compile_rank"] < 3000
