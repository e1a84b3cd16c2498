"""The options of `fgoffload plan`, checked before anything heavy is imported."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.options import check_output_file, read_count, say_why_no_file
from fgoffload.cli.shipped_models import find_model, suggest_model
from fgoffload.errors import ConfigError
from fgoffload.units import parse_bytes

if TYPE_CHECKING:
    from fgoffload.planner.host_overhead import HostGuess

EXAMPLE = "fgoffload plan mixtral_8x7b --gpu h100 --offload-memory-budget 70GiB"

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

OUTPUTS = ("json", "plot", "timeline")
"""Options that name a file to write."""

SHORT_FLAGS: Mapping[str, str] = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--vp": "--num-virtual-stages-per-pipeline-rank",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--etp": "--expert-tensor-parallel-size",
}
"""Short names of the parallel sizes, with Megatron's flag for each."""

FRONTIER = "frontier.png"
"""Default file for the picture of a sweep, in the current folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `fgoffload plan`, checked."""

    model: Path
    """An argument file, or a config.json."""
    megatron_flags: tuple[str, ...]
    """Flags typed on the command line, short ones spelled out; they override the file's flags."""
    gpu: str | None
    hardware: Path | None
    profile: Path | None
    budget_bytes: int | None
    """GPU memory of each rank; None takes all memory of the device."""
    host_budget_bytes: int | None
    """Host memory of each rank."""
    reserve_bytes: int | None
    has_optimizer: bool | None
    """Whether optimizer states count. None takes the profile's, or Adam without a profile."""
    sweeps: bool
    is_thorough: bool
    is_verbose: bool
    host: "HostGuess | None"
    """Assumed host. None takes the profile's measurement, or a step that is not launch-bound."""
    json: Path | None
    plot: Path | None
    timeline: Path | None


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> PlanOptions:
    """Return the checked options, without heavy imports. `megatron_flags` are the words that the parser does not know.

    Raises:
        ConfigError: An option has a wrong value.
    """
    path = _find_model_path(options.model)
    _check_device(options)
    _check_sweep(options)
    if options.sweep and options.plot is None:
        options.plot = FRONTIER
    sizes = {name: _read_size(options, name) for name in ("offload_memory_budget", "offload_host_budget", "reserve")}
    outputs = {name: _find_output(options, name, path) for name in OUTPUTS}
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
        is_verbose=options.verbose,
        host=_find_host(options),
        **outputs,
    )


def _find_model_path(name: str | None) -> Path:
    if not name:
        raise ConfigError(
            "MODEL is missing. Give a Megatron argument file, a config.json or a model name from `fgoffload plan --list` "
            f"first, as in: {EXAMPLE}."
        )
    path = Path(name)
    # os.path, since Path.is_file raises on a name that is too long.
    if os.path.isfile(path / _CONFIG):  # the folder of a model, as transformers accepts it
        path /= _CONFIG
    if not os.path.isfile(path):
        if (shipped := find_model(name)) is None:
            raise ConfigError(
                f"model {name!r} {say_why_no_file(name)}.{suggest_model(name)} Give a file or a "
                f"shipped model, as in: {EXAMPLE}."
            )
        path = shipped
    if path.suffix in (".py", ".yaml", ".yml"):
        raise ConfigError(f"model {name!r} is neither a bash script nor a config.json. Give one of them, as in: {EXAMPLE}.")
    return path


def _check_device(options: argparse.Namespace) -> None:
    """Refuse options that name two devices or none. Only reading a profile shows whether it describes a whole device."""
    if options.gpu is not None and options.hardware is not None:
        raise ConfigError("--gpu and --hardware both name the device. Give one of them.")
    if options.gpu is options.hardware is options.profile is None:
        raise ConfigError(f"--gpu is missing. Give it, as in --gpu h100, or give --hardware or --profile. Example: {EXAMPLE}.")


def _check_sweep(options: argparse.Namespace) -> None:
    """Refuse options for a single plan together with `--sweep`."""
    for name in ("offload_memory_budget", "timeline", "thorough", "verbose"):
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


def _find_host(options: argparse.Namespace) -> "HostGuess | None":
    """Return the host that `--launch-bound` or `--not-launch-bound` asks for, or None without them."""
    if options.not_launch_bound and options.launch_bound:
        raise ConfigError("--launch-bound and --not-launch-bound exclude each other. Give one of them.")
    if options.not_launch_bound and options.profile is None:
        raise ConfigError(
            "--not-launch-bound is the default with a device from the table. Leave it out, or give --profile FILE."
        )
    if not (options.not_launch_bound or options.launch_bound):
        return None
    from fgoffload.planner.host_overhead import HostGuess

    return HostGuess.LATE if options.launch_bound else HostGuess.IN_TIME
