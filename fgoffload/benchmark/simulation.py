"""What the planner's simulator says of a setting: the plan that its flags come to, and what a step under that takes."""

import dataclasses
from collections.abc import Sequence

from fgoffload.benchmark.prediction import Prediction
from fgoffload.benchmark.settings import FULL, NOTHING, Setting, System
from fgoffload.errors import PlanError
from fgoffload.plan import Action, OffloadPlan, Site
from fgoffload.planner.ranks.output_copies import copy_outputs
from fgoffload.planner.ranks.rank_model import RankModel, Turn
from fgoffload.planner.simulation.simulator import simulate
from fgoffload.planner.solving.megatron_flags import FullMethod, FullRecompute, MegatronFlags, SelectiveRecompute
from fgoffload.tags import find_recompute_unit

SIMULATED = (System.NOTHING, System.RECOMPUTE, System.OURS, System.PLAN, System.BUDGET)
"""Systems whose settings the planner has words for: copies of all others are scheduled by rules that it does not know."""


def predict(ranks: Sequence[RankModel], setting: Setting, *, like: Sequence[RankModel] | None = None) -> Prediction:
    """Return what a setting is predicted to take.

    Args:
        ranks: All pipeline ranks, with the setting's window and sizes.
        setting: Of a system in `SIMULATED`; one of a budget has its plan.
        like: The same ranks, as the model's shape says. What they run again, `ranks` have to be able to: a profile has fewer
            units than the model where bits were not sure to stay. Without them, each module has to run again somewhere.

    Raises:
        ConfigError: A module of the setting is none that the planner knows.
        PlanError: The plan file cannot be read, or `ranks` cannot do what the setting does.
    """
    plan = make_plan(ranks, setting)
    _check_reruns(plan, setting, None if like is None else make_plan(like, setting))
    # Megatron's own recompute runs without this package.
    has_engine = setting.system is not System.RECOMPUTE
    ranks = [dataclasses.replace(rank, has_engine=has_engine, turn=Turn.CALL_BACK) for rank in ranks]
    if setting.plan is None:
        ranks = [copy_outputs(rank) for rank in ranks]
    result, nothing = simulate(ranks, plan), simulate(ranks, make_plan(ranks, NOTHING))
    return Prediction(
        step_s=result.step_s,
        ratio=result.step_s / nothing.step_s,
        peak_bytes=result.peak_bytes,
        static_bytes=result.worst_rank.static_bytes,
    )


def make_plan(ranks: Sequence[RankModel], setting: Setting) -> OffloadPlan:
    """Return what a setting does on `ranks`, site by site.

    Of a plan file, tags that leave and that save nothing in a layer of `ranks` are left out, as the engine finds nothing there.

    Raises:
        ConfigError: A module of the setting is none that the planner knows.
        PlanError: The plan file cannot be read.
    """
    if setting.plan is not None:
        return _leave_out_what_saves_nothing(OffloadPlan.load(setting.plan), ranks)
    return _make_flags(setting).make_plan(ranks)


def _make_flags(setting: Setting) -> MegatronFlags:
    recompute: FullRecompute | SelectiveRecompute | None = None
    if setting.recompute == (FULL,):
        recompute = FullRecompute(method=FullMethod.UNIFORM)
    elif setting.recompute:
        recompute = SelectiveRecompute(modules=setting.recompute)
    return MegatronFlags(offload_modules=setting.modules, activation_offload_fraction=setting.fraction, recompute=recompute)


def _leave_out_what_saves_nothing(plan: OffloadPlan, ranks: Sequence[RankModel]) -> OffloadPlan:
    saving = {
        Site(chunk=number, layer=layer.number, tag=tag)
        for rank in ranks
        for number, chunk in enumerate(rank.chunks)
        for layer in chunk.layers
        # A checkpoint saves its input under that tag, whatever the layer saves otherwise.
        for tag in ("layer_input", *layer.model.offloadable_tags)
    }
    known = {(site.chunk, site.layer) for site in saving}
    actions = {}
    for site, action in plan.actions.items():
        # What is said of layers that are not there is for the simulator to refuse.
        if site in saving or not action.offloads or (site.chunk, site.layer) not in known:
            actions[site] = action
        elif action.recomputes:
            actions[site] = Action.RECOMPUTE
    return dataclasses.replace(plan, actions=actions)


def _check_reruns(plan: OffloadPlan, setting: Setting, expected: OffloadPlan | None) -> None:
    running = {site for site, action in plan.actions.items() if action.recomputes}
    if expected is not None:
        missing = [str(site) for site, action in expected.actions.items() if action.recomputes and site not in running]
    else:
        units = (find_recompute_unit(site.tag) for site in running)
        modules = {unit.recompute_module or FULL for unit in units if unit is not None}
        missing = [module for module in setting.recompute if module not in modules]
    if missing:
        raise PlanError(f"nothing is known of what it takes to run {missing[0]} again by itself.")
