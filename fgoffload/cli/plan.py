"""`fgoffload plan`: finds the fastest plan for a model within a memory budget, and predicts its memory and step time."""

import argparse
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.errors import show_line
from fgoffload.cli.options import read_count, read_path, read_size
from fgoffload.cli.plan_device import choose_budget, choose_host_budget, find_device
from fgoffload.cli.plan_options import EXAMPLE as EXAMPLE
from fgoffload.cli.plan_options import FRONTIER, SHORT_FLAGS, PlanOptions, check_options
from fgoffload.cli.shipped_models import list_models, read_summary
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import BudgetError, ConfigError, PlanError
from fgoffload.units import SIZE_UNITS, format_bytes

if TYPE_CHECKING:
    from fgoffload.cli.console import PipeConsole
    from fgoffload.cli.plan_device import PlannedDevice
    from fgoffload.cli.plan_tables import Subject
    from fgoffload.planner.model.model_shape import ModelShape
    from fgoffload.planner.model.parallelism import Parallelism
    from fgoffload.planner.model_ranks import Assumptions
    from fgoffload.planner.ranks.rank_model import RankModel
    from fgoffload.planner.timing.hardware import Hardware

logger = logging.getLogger(__name__)

NAME = "plan"
SUMMARY = "find the fastest plan within a memory budget"
DESCRIPTION = (
    "Finds the fastest way to train a model within a memory budget. Decides for each module of each layer whether to keep, "
    "recompute or offload its activations. Predicts memory and step time. Needs neither a GPU nor torch."
)
USAGE = """\
fgoffload plan MODEL --gpu NAME [OPTIONS] [MEGATRON FLAGS]
       fgoffload plan --list"""
NOTES = f"All other flags are Megatron's and override the file, for example --seq-length 8192 or --num-gpus 256. {SIZE_UNITS}"

SWEEP_POINTS = 12
"""Number of evenly spaced budgets in a sweep, from the smallest feasible budget to the baseline's peak."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    # nargs="?", so that `check_options` reports a missing model with its own message.
    model_help = "a Megatron argument file, a Hugging Face config.json, or a model name from --list"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model_help)
    parser.add_argument("--list", action="store_true", help="show the models that come with fgoffload")
    hardware = parser.add_argument_group("hardware")
    add = hardware.add_mutually_exclusive_group().add_argument
    add("--gpu", metavar="NAME", help="device, for example h100, b200 or gb300 (all: docs/reference/hardware.md)")
    add("--hardware", metavar="FILE", type=read_path, help="JSON file describing another device (docs/reference/hardware.md)")
    add = hardware.add_argument
    add("--profile", metavar="FILE", type=read_path, help="output of `fgoffload profile`, for the model or only for the link")
    reserve_help = "GPU memory for the CUDA context, NCCL and fragmentation"
    add("--reserve", metavar="SIZE", dest="reserve_bytes", type=read_size, help=reserve_help)
    add = hardware.add_mutually_exclusive_group().add_argument
    add("--launch-bound", action="store_true", help="plan for a launch-bound run, in which offload costs more time")
    add("--not-launch-bound", action="store_true", help="with --profile: plan as if the run were not launch-bound")
    add = parser.add_argument_group("budget and search").add_argument
    budget_help = "GPU memory of each rank (default: all of the device's memory)"
    add("--offload-memory-budget", metavar="SIZE", dest="budget_bytes", type=read_size, help=budget_help)
    host_help = "host memory of each rank (default: its share of 60%% of the node's memory)"
    add("--offload-host-budget", metavar="SIZE", dest="host_budget_bytes", type=read_size, help=host_help)
    add("--sweep", action="store_true", help="plan for many budgets, and show step time against memory")
    add("--thorough", action="store_true", help="search about ten times as long")
    group = parser.add_argument_group("parallel sizes and optimizer")
    for short, flag in SHORT_FLAGS.items():
        default = " (default: same as --tp)" if short == "--etp" else ""
        group.add_argument(short, metavar="N", type=read_count, help=flag + default)
    add = group.add_mutually_exclusive_group().add_argument
    optimizer_help = "count Adam's states (default, unless the profile has no optimizer)"
    add("--with-optimizer", action="store_true", dest="has_optimizer", default=None, help=optimizer_help)
    add("--no-optimizer", action="store_false", dest="has_optimizer", help="do not count optimizer states")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write the plan (for --offload-plan) or the results of the sweep")
    plot_help = f"plot memory over a step or, with --sweep, step time against memory (default with --sweep: {FRONTIER})"
    add("--plot", metavar="FILE", help=plot_help)
    add("--timeline", metavar="FILE", help="write a Chrome trace of the rank with the highest peak")
    add("--verbose", action="store_true", help="also show the cost of each action, and the memory and time of each rank")


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Plan, print the tables, write the files, and return the exit code."""
    if options.list:
        for path in list_models():
            print(f"{path.stem:24}  {read_summary(path)}")
        return 0
    checked = check_options(options, megatron_flags)
    # Show warnings about assumptions after the plan. If planning fails, show only the error.
    with hold_messages():
        return _plan(checked)


def _plan(checked: PlanOptions) -> int:
    from fgoffload.cli.console import PipeConsole
    from fgoffload.cli.plan_report import show_plan, show_sweep
    from fgoffload.cli.plan_summary import WIDTH
    from fgoffload.cli.plan_tables import Subject
    from fgoffload.cuda_graphs import NO_CAPTURE

    found = find_device(checked)
    hardware = found.hardware
    budget_bytes = None if checked.sweep else choose_budget(checked.budget_bytes, hardware)
    console = PipeConsole()
    model, parallelism = _read_model_or_suggest(console, checked, hardware)
    _check_ignored(checked)
    assumptions = _make_assumptions(checked)
    device, ranks, reserve_bytes = _build_ranks(checked, found, model, parallelism, assumptions)
    host_budget_bytes, host_words = choose_host_budget(checked.host_budget_bytes, hardware, parallelism.world_size)
    subject = Subject(
        model=model,
        parallelism=parallelism,
        hardware=hardware,
        device=device,
        reserve_bytes=reserve_bytes,
        host_budget=host_words,
        takes_auto=assumptions.graphs == NO_CAPTURE,
        link_line=found.link_line,
    )
    if not console.is_terminal:
        console.width = 160 if checked.verbose or checked.sweep else WIDTH
    with _explain_too_little_memory(console, checked, subject, assumptions):
        if budget_bytes is None:
            show_sweep(console, subject, ranks, checked, points=SWEEP_POINTS, host_budget_bytes=host_budget_bytes)
        else:
            show_plan(console, subject, ranks, checked, budget_bytes=budget_bytes, host_budget_bytes=host_budget_bytes)
    return 0


def _read_model_or_suggest(
    console: "PipeConsole", checked: PlanOptions, hardware: "Hardware | None"
) -> "tuple[ModelShape, Parallelism]":
    """Return the model and its parallel sizes. If `--num-gpus` is invalid for them, show layouts that fit."""
    has_count = "--num-gpus" in checked.megatron_flags
    try:
        model, parallelism = _read_model(checked)
    except ConfigError:
        if hardware is not None and has_count:
            _suggest_layouts(console, checked, hardware, ("--ep", "--etp"), tuple(SHORT_FLAGS))
        raise
    if checked.model.suffix == ".json" and parallelism.world_size == 1 and not has_count:
        show_line(
            f"{checked.model} does not set the number of GPUs, so 1 is assumed. For more, pass --num-gpus, --tp, --pp and --ep."
        )
    return model, parallelism


def _suggest_layouts(console: "PipeConsole", checked: PlanOptions, hardware: "Hardware", *tried: Sequence[str]) -> None:
    """Show layouts that fit, on at least as many GPUs as the command line or the file sets.

    Each of `tried` is a group of short flags to set to 1. The first group that makes the number of GPUs valid is used.
    """
    from fgoffload.cli.plan_fits import show_layouts

    for flags in tried:
        spread = _add_flags(checked, [word for flag in flags for word in (SHORT_FLAGS[flag], "1")])
        with contextlib.suppress(ConfigError):  # other sizes are invalid too, or the error has another cause
            shape, assumptions = _read_model(spread), _make_assumptions(spread)
            show_layouts(console, *shape, hardware, assumptions, lambda words: _read_model(_add_flags(checked, words)))
            return


def _add_flags(checked: PlanOptions, flags: Sequence[str]) -> PlanOptions:
    return dataclasses.replace(checked, megatron_flags=(*checked.megatron_flags, *flags))


def _build_ranks(
    checked: PlanOptions, found: "PlannedDevice", model: "ModelShape", parallelism: "Parallelism", assumptions: "Assumptions"
) -> "tuple[str, Sequence[RankModel], int]":
    """Return a description of the device, the pipeline ranks, and the reserved bytes of each rank."""
    from fgoffload.planner.host_overhead import assume_host
    from fgoffload.planner.model_ranks import build_ranks

    hardware, profile = found.hardware, found.profile
    if hardware is not None:
        device, reserve_bytes = hardware.name, assumptions.reserve_bytes
        ranks = build_ranks(model, parallelism, hardware, assumptions=assumptions)
        if profile is not None:  # the profile also sets copy latency and compute slowdown
            link = profile.link.to_model()
            ranks = tuple(dataclasses.replace(rank, link=link) for rank in ranks)
    elif profile is not None and checked.profile is not None:
        from fgoffload.cli.plan_profile import build_profiled_ranks

        reserve_bytes = checked.reserve_bytes or 0
        ranks = build_profiled_ranks(profile, checked.profile, checked, model, parallelism, assumptions)
        device = f"{profile.device}, profiled {'with' if profile.has_optimizer else 'without'} an optimizer"
    if checked.host is not None:
        device, ranks = f"{device}, {checked.host.value.removeprefix('a ')}", assume_host(ranks, checked.host)
    return device, ranks, reserve_bytes


@contextlib.contextmanager
def _explain_too_little_memory(
    console: "PipeConsole", checked: PlanOptions, subject: "Subject", assumptions: "Assumptions"
) -> Iterator[None]:
    """Raise a clearer error if even all of the device's memory is too little. If no budget is given, also suggest layouts."""
    from fgoffload.cli.plan_fits import show_fits

    hardware = subject.hardware
    try:
        yield
    except BudgetError as error:
        if hardware is None or error.least_bytes <= hardware.device_memory_bytes:
            raise
        if checked.budget_bytes is None:
            show_fits(console, subject.model, subject.parallelism, hardware, assumptions)
            # By default, tensor-parallel ranks split each expert, which may require more GPUs than the run has.
            _suggest_layouts(console, checked, hardware, ("--etp",), ())
        fix = f"Lower --reserve {format_bytes(checked.reserve_bytes)}, spread" if checked.reserve_bytes else "Spread"
        raise PlanError(
            f"{error.why} {hardware.name} has only {format_bytes(hardware.device_memory_bytes)}. {fix} the model over more "
            "ranks, or use a larger device."
        ) from error


def _read_model(checked: PlanOptions) -> "tuple[ModelShape, Parallelism]":
    from fgoffload.integrations.megatron.flags.model_shapes import read_model_file, read_parallelism

    if checked.model.suffix != ".json":
        return read_model_file(checked.model, typed=checked.megatron_flags, own_flags=checked.own_flags)
    from fgoffload.planner.model.huggingface import read_huggingface_config

    model = read_huggingface_config(checked.model)
    return read_parallelism(checked.megatron_flags, source=str(checked.model), model=model, own_flags=checked.own_flags)


def _check_ignored(checked: PlanOptions) -> None:
    """Check the flags that the planner ignores, and warn about them unless only the file of a shipped model sets them."""
    from fgoffload.integrations.megatron.flags.other_flags import DECIDED_BY_PLAN
    from fgoffload.integrations.megatron.flags.tag_checks import check_replaced

    check_replaced(checked.megatron_flags)
    is_shipped = any(checked.model.samefile(path) for path in list_models())
    words = (*(() if is_shipped else _read_flags(checked.model)), *checked.megatron_flags)
    found = dict.fromkeys(name for word in words if (name := word.partition("=")[0]) in DECIDED_BY_PLAN)
    # This flag only enables offload, so it needs no warning.
    if ignored := [name for name in found if name != "--fine-grained-activation-offloading"]:
        logger.warning("the planner chooses what to offload and recompute, so it ignores %s.", ", ".join(ignored))


def _read_flags(path: Path) -> Sequence[str]:
    from fgoffload.integrations.megatron.flags.argument_files import read_argument_file

    return ["--bf16"] if path.suffix == ".json" else read_argument_file(path)


def _make_assumptions(checked: PlanOptions) -> "Assumptions":
    from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions
    from fgoffload.integrations.megatron.flags.other_flags import trains_adapters
    from fgoffload.planner.memory.static_memory import NO_OPTIMIZER

    flags = _read_flags(checked.model)
    assumptions = read_assumptions(
        flags, source=str(checked.model), typed=checked.megatron_flags, has_optimizer=checked.has_optimizer is not False
    )
    if trains_adapters((*flags, *checked.megatron_flags)):
        assumptions = dataclasses.replace(assumptions, state=dataclasses.replace(NO_OPTIMIZER, gradient_bytes=0))
    reserve_bytes = assumptions.reserve_bytes if checked.reserve_bytes is None else checked.reserve_bytes
    return dataclasses.replace(assumptions, reserve_bytes=reserve_bytes)
