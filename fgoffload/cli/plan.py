"""`fgoffload plan`: finds the fastest plan for a model within a memory budget, and predicts its memory and step time."""

import argparse
import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.errors import show_line
from fgoffload.cli.options import check_output_file, read_count, say_why_no_file
from fgoffload.cli.plan_device import (
    check_device,
    check_static,
    choose_budget,
    choose_host_budget,
    describe_too_small,
    find_device,
)
from fgoffload.cli.plan_host import check_host_of_link, find_host
from fgoffload.cli.shipped_models import find_model, list_models, suggest_model
from fgoffload.cli.streams import hold_messages
from fgoffload.errors import BudgetError, ConfigError, PlanError
from fgoffload.units import SIZE_UNITS, parse_bytes

if TYPE_CHECKING:
    from fgoffload.planner.late_host import HostGuess
    from fgoffload.planner.model.model_shape import ModelShape
    from fgoffload.planner.model.parallelism import Parallelism
    from fgoffload.planner.model_ranks import Assumptions
    from fgoffload.planner.timing.hardware import Hardware

NAME = "plan"
SUMMARY = "find the fastest plan within a memory budget"
DESCRIPTION = (
    "Predicts memory and step time of a training, and chooses for each module and layer: keep, recompute or offload, so that a "
    "memory budget is met at the smallest step time. Needs no GPU and no torch."
)
USAGE = """\
fgoffload plan MODEL --gpu NAME [--profile FILE]
                      [--offload-memory-budget SIZE]
                      [--offload-host-budget SIZE] [--json FILE] [--plot FILE]
                      [--timeline FILE] [--thorough]
                      [--launch-bound | --not-launch-bound] [MEGATRON FLAGS]
       fgoffload plan MODEL --gpu NAME --sweep [--offload-host-budget SIZE]
                      [--plot FILE] [--launch-bound | --not-launch-bound]
                      [MEGATRON FLAGS]
       fgoffload plan --list"""
EXAMPLE = "fgoffload plan mixtral_8x7b --gpu h100 --offload-memory-budget 70GiB"
NOTES = f"Any other flag goes to the model and overrides its file: --seq-length 8192, --num-gpus 256. {SIZE_UNITS}"
EXAMPLE_VALUES: Mapping[str, str] = {
    "--gpu": "h100",
    "--hardware": "hardware.json",
    "--profile": "profile.json",
    "--offload-memory-budget": "76GiB",
    "--offload-host-budget": "1TiB",
    "--reserve": "4GiB",
    "--json": "plan.json",
    "--plot": "plan.png",
    "--timeline": "trace.json",
}
_CONFIG = "config.json"
"""File name of a Hugging Face model's configuration."""
_OUTPUTS = ("json", "plot", "timeline")
"""Options that name a file to write."""
RUNS_A_SCRIPT = False
EXIT_PLANNED = 0

SHORT_FLAGS: Mapping[str, str] = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--vp": "--num-virtual-stages-per-pipeline-rank",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--etp": "--expert-tensor-parallel-size",
}
"""Short names of the parallel sizes, with Megatron's flag for each."""

OWN_FLAGS = (
    *EXAMPLE_VALUES,
    "--with-optimizer",
    "--no-optimizer",
    "--list",
    "--sweep",
    "--thorough",
    "--launch-bound",
    "--not-launch-bound",
)
"""This command's own flags without the short ones, for suggestions."""

FRONTIER = "frontier.png"
"""Default file for the picture of a sweep, in the current folder."""

SWEEP_POINTS = 12
"""Number of budgets in a sweep, from the smallest feasible one to the baseline's peak. The peaks of the other baselines are
added."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `fgoffload plan`, checked."""

    model: Path
    """An argument file, or a config.json."""
    megatron_flags: tuple[str, ...]
    """Flags typed on the command line, short ones spelled out; they override those of the file."""
    gpu: str | None
    hardware: Path | None
    profile: Path | None
    budget_bytes: int | None
    """GPU memory of each rank; None takes all of the device's."""
    host_budget_bytes: int | None
    """Host memory of each rank."""
    reserve_bytes: int | None
    has_optimizer: bool | None
    """None takes what the profile measured, or Adam without a profile."""
    sweeps: bool
    is_thorough: bool
    host: "HostGuess | None"
    """None takes what the profile measured, or a step that is not launch-bound."""
    json: Path | None
    plot: Path | None
    timeline: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to `parser`."""
    # nargs="?", so that our own error reports a missing file.
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a Megatron argument file, a Hugging Face config.json, or a name of --list"
    )
    parser.add_argument("--list", action="store_true", help="show the models that come with fgoffload")
    add = parser.add_argument_group("hardware").add_argument
    add("--gpu", metavar="NAME", help="a device of the table, as h100, b200 or gb300 (all: docs/reference/hardware.md)")
    add("--hardware", metavar="FILE", help="another device, as JSON (docs/reference/hardware.md)")
    add("--profile", metavar="FILE", help="what `fgoffload profile` measured, of the model or of the link alone")
    add("--reserve", metavar="SIZE", help="GPU memory for the CUDA context, NCCL and fragmentation")
    add("--launch-bound", action="store_true", help="plan for kernels that wait for the CPU: copies slow its launches")
    add("--not-launch-bound", action="store_true", help="with --profile: plan as if kernels did not wait for the CPU")
    add = parser.add_argument_group("budget and search").add_argument
    add("--offload-memory-budget", metavar="SIZE", help="GPU memory of each rank (default: all of the device's)")
    add("--offload-host-budget", metavar="SIZE", help="host memory of each rank (default: its share of 60%% of the node's)")
    add("--sweep", action="store_true", help="plan for many budgets, and show step time against memory")
    add("--thorough", action="store_true", help="search about ten times as long")
    add = parser.add_argument_group("parallel sizes and optimizer").add_argument
    for short, flag in SHORT_FLAGS.items():
        add(short, metavar="N", help=flag + (" (default: as --tp, as in Megatron)" if short == "--etp" else ""))
    add("--with-optimizer", action="store_true", default=None, help="count Adam's states (default, unless profiled without)")
    add("--no-optimizer", action="store_false", dest="with_optimizer", help="count no optimizer states")
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="FILE", help="write the plan, for --offload-plan")
    add("--plot", metavar="FILE", help=f"write a picture of memory over the step, or of the sweep (default: {FRONTIER})")
    add("--timeline", metavar="FILE", help="write the simulated streams as a Chrome trace")


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> PlanOptions:
    """Return the checked options, without heavy imports.

    Args:
        options: The parsed options.
        megatron_flags: Words that the parser does not know.

    Raises:
        ConfigError: An option has a wrong value.
    """
    if not options.model:
        raise ConfigError(
            "MODEL is missing. Give a Megatron argument file, a config.json or a name of `fgoffload plan --list` first, as in: "
            f"{EXAMPLE}."
        )
    path = Path(options.model)
    # os.path, since Path.is_file raises on a name that is too long.
    if os.path.isfile(path / _CONFIG):  # the folder of a model, as transformers accepts it
        path /= _CONFIG
    if not os.path.isfile(path):
        if (shipped := find_model(options.model)) is None:
            raise ConfigError(
                f"model {options.model!r} {say_why_no_file(options.model)}.{suggest_model(options.model)} Give a file or a "
                f"shipped model, as in: {EXAMPLE}."
            )
        path = shipped
    check_device(options, EXAMPLE)
    _check_sweep(options)
    if options.sweep and options.plot is None:
        options.plot = FRONTIER
    sizes = {name: _read_size(options, name) for name in ("offload_memory_budget", "offload_host_budget", "reserve")}
    outputs = {name: _find_output(options, name, path) for name in _OUTPUTS}
    _check_outputs_differ(outputs)
    short = []
    for flag, long in SHORT_FLAGS.items():
        if (text := getattr(options, flag.removeprefix("--"))) is not None:
            short += [long, str(read_count(text, flag=flag, example=8))]
    return PlanOptions(
        model=path,
        megatron_flags=(*megatron_flags, *short),
        gpu=options.gpu,
        hardware=_find_path(options.hardware),
        profile=_find_path(options.profile),
        budget_bytes=sizes["offload_memory_budget"],
        host_budget_bytes=sizes["offload_host_budget"],
        reserve_bytes=sizes["reserve"],
        has_optimizer=options.with_optimizer,
        sweeps=options.sweep,
        is_thorough=options.thorough,
        host=find_host(options),
        **outputs,
    )


def run(options: argparse.Namespace, megatron_flags: Sequence[str]) -> int:
    """Plan, print the tables, write the files, and return the exit code."""
    if options.list:
        _show_models()
        return EXIT_PLANNED
    checked = check_options(options, megatron_flags)
    if checked.plot is not None:
        from fgoffload.cli.plan_pictures import check_picture

        try:
            check_picture(checked.plot)
        except ImportError as error:  # the numbers need no picture
            show_line(f"warning: {checked.plot} is not written: {error}. Install matplotlib.")
            checked = dataclasses.replace(checked, plot=None)
    # Warnings about assumptions follow the plan. Without a plan there is only the error.
    with hold_messages():
        return _plan(checked)


def _show_models() -> None:
    models = list_models()
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:{width}}  {model.summary}")


def _plan(checked: PlanOptions) -> int:
    from fgoffload.captured_tags import NO_CAPTURE
    from fgoffload.cli.console import PipeConsole
    from fgoffload.cli.plan_fits import show_fits
    from fgoffload.cli.plan_report import show_plan, show_sweep
    from fgoffload.cli.plan_tables import Subject
    from fgoffload.planner.late_host import assume_host
    from fgoffload.planner.model_ranks import build_ranks
    from fgoffload.planner.solving.search_limits import THOROUGH
    from fgoffload.planner.worker_processes import share_work

    found = find_device(checked.gpu, checked.hardware, checked.profile)
    hardware, profile = found.hardware, found.profile
    if hardware is not None and profile is not None:
        check_host_of_link(checked.host)
    budget_bytes = None if checked.sweeps else choose_budget(checked.budget_bytes, hardware)
    model, parallelism = _read_model(checked)
    assumptions = _make_assumptions(checked)
    if hardware is not None:
        device = hardware.name
        reserve_bytes = assumptions.reserve_bytes
        ranks = found.use_link(build_ranks(model, parallelism, hardware, assumptions=assumptions))
    elif profile is not None and checked.profile is not None:
        from fgoffload.cli.plan_profile import PlannedTraining, build_profiled_ranks

        reserve_bytes = checked.reserve_bytes or 0
        planned = PlannedTraining(
            source=str(checked.model),
            model=model,
            parallelism=parallelism,
            assumptions=assumptions,
            has_optimizer=checked.has_optimizer,
        )
        ranks = build_profiled_ranks(profile, planned, path=checked.profile, reserve_bytes=reserve_bytes)
        device = f"{profile.device}, profiled {'with' if profile.has_optimizer else 'without'} an optimizer"
    if checked.host is not None:
        device, ranks = f"{device}, {checked.host.value.removeprefix('a ')}", assume_host(ranks, checked.host)
    host_budget_bytes, host_words = choose_host_budget(checked.host_budget_bytes, hardware, parallelism.world_size)
    subject = Subject(
        model=model,
        parallelism=parallelism,
        hardware=hardware,
        node=found.find_node(),
        device=device,
        reserve_bytes=reserve_bytes,
        host_budget=host_words,
        takes_auto=assumptions.graphs == NO_CAPTURE,
        link_line=found.link_line,
    )
    console = PipeConsole()
    if not console.is_terminal:
        console.width = max(console.width, 160)

    def show_lack() -> None:
        if hardware is not None and checked.budget_bytes is None:
            show_fits(console, model, parallelism, hardware, assumptions)

    with share_work(), _without_cycle_collection(), _explain_lack(hardware, checked.reserve_bytes, show_lack):
        if hardware is not None:
            check_static(ranks, budget_bytes, hardware, typed_reserve_bytes=checked.reserve_bytes)
        if budget_bytes is None:
            show_sweep(console, subject, ranks, points=SWEEP_POINTS, host_budget_bytes=host_budget_bytes, plot=checked.plot)
            return EXIT_PLANNED
        show_plan(
            console,
            subject,
            ranks,
            budget_bytes=budget_bytes,
            host_budget_bytes=host_budget_bytes,
            files={name: getattr(checked, name) for name in _OUTPUTS},
            limits=THOROUGH if checked.is_thorough else None,
        )
    return EXIT_PLANNED


@contextlib.contextmanager
def _explain_lack(hardware: "Hardware | None", reserve_bytes: int | None, show_lack: Callable[[], None]) -> Iterator[None]:
    """If the whole device is too small, show what each rank needs and raise that error in place of one about the budget."""
    try:
        yield
    except BudgetError as error:
        if hardware is None or error.least_bytes <= hardware.device_memory_bytes:
            raise
        show_lack()
        raise PlanError(describe_too_small(error.why, hardware, reserve_bytes)) from error
    except PlanError:
        show_lack()
        raise


@contextlib.contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Switch the garbage collector off: simulations create millions of objects and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_sweep(options: argparse.Namespace) -> None:
    """Refuse options for a single plan beside `--sweep`."""
    for name in ("offload_memory_budget", "json", "timeline", "thorough"):
        if options.sweep and getattr(options, name) not in (None, False):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--sweep plans for many budgets, but {flag} is for a single plan. Leave one of them out.")


def _read_size(options: argparse.Namespace, name: str) -> int | None:
    text = getattr(options, name)
    # Sizes need a unit: nobody's budget is 76 bytes.
    return None if text is None else parse_bytes(text, name="--" + name.replace("_", "-"), needs_unit=True)


def _find_output(options: argparse.Namespace, name: str, model: Path) -> Path | None:
    inputs = {"the model": model, "the file of --profile": options.profile, "the file of --hardware": options.hardware}
    return check_output_file(getattr(options, name), flag=f"--{name}", example=EXAMPLE_VALUES[f"--{name}"], inputs=inputs)


def _check_outputs_differ(outputs: Mapping[str, Path | None]) -> None:
    """Refuse one file for two outputs: the second would overwrite the first."""
    named: dict[str, str] = {}
    for name, path in outputs.items():
        if path is not None and (earlier := named.setdefault(os.path.realpath(path), name)) != name:
            raise ConfigError(f"--{earlier} and --{name} both name {str(path)!r}. Give each its own file.")


def _find_path(name: str | None) -> Path | None:
    return None if name is None else Path(os.path.expanduser(name))


def _read_model(checked: PlanOptions) -> "tuple[ModelShape, Parallelism]":
    from fgoffload.integrations.megatron.flags.model_shapes import read_model_file, read_parallelism

    if checked.model.suffix != ".json":
        return read_model_file(checked.model, typed=checked.megatron_flags, own_flags=OWN_FLAGS)
    from fgoffload.planner.model.huggingface import read_huggingface_config

    model = read_huggingface_config(checked.model)
    found = read_parallelism(checked.megatron_flags, source=str(checked.model), model=model, own_flags=OWN_FLAGS)
    if found[1].world_size == 1 and "--num-gpus" not in checked.megatron_flags:
        experts = " --ep 8" if model.experts is not None else ""
        show_line(
            f"{checked.model} gives no number of GPUs, so 1 is assumed. Spread the model with --num-gpus 8 --tp 2 --pp "
            f"2{experts}."
        )
    return found


def _make_assumptions(checked: PlanOptions) -> "Assumptions":
    from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
    from fgoffload.integrations.megatron.flags.model_shapes import read_assumptions

    flags = ["--bf16"] if checked.model.suffix == ".json" else read_argument_file(checked.model)
    assumptions = read_assumptions(
        flags, source=str(checked.model), typed=checked.megatron_flags, has_optimizer=checked.has_optimizer is not False
    )
    if checked.reserve_bytes is None:
        return assumptions
    return dataclasses.replace(assumptions, reserve_bytes=checked.reserve_bytes)
