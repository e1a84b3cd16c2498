"""Checks the options of `fgoffload plan` without heavy imports."""

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fgoffload.cli.options import check_output_file, explain_unusable_file, suggest_model
from fgoffload.cli.shipped_models import find_model
from fgoffload.errors import ConfigError

if TYPE_CHECKING:
    from fgoffload.planner.host_overhead import HostGuess

EXAMPLE = "fgoffload plan mixtral_8x7b --gpu h100 --offload-memory-budget 70GiB"

_CONFIG = "config.json"
"""File name of a Hugging Face model's configuration."""

OUTPUTS = ("json", "plot", "timeline")

SHORT_FLAGS: Mapping[str, str] = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--vp": "--num-virtual-stages-per-pipeline-rank",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--etp": "--expert-tensor-parallel-size",
}
"""Short flags for parallel sizes, mapped to Megatron's flags."""

FRONTIER = "frontier.png"
"""Default file for the plot of a sweep, in the current folder."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The checked options of `fgoffload plan`."""

    model: Path
    """An argument file, or a config.json."""
    megatron_flags: tuple[str, ...]
    """Megatron's flags from the command line, with short flags replaced. They override the file's flags."""
    own_flags: tuple[str, ...]
    """This command's own flags. If a flag is misspelled, the error suggests the closest one."""
    gpu: str | None
    hardware: Path | None
    profile: Path | None
    budget_bytes: int | None
    """GPU memory budget of each rank. None means all of the device's memory."""
    host_budget_bytes: int | None
    """Host memory budget of each rank. None means the rank's share of 60% of the node's memory."""
    reserve_bytes: int | None
    has_optimizer: bool | None
    """Whether to count optimizer states. None uses the profile's setting; without a profile, Adam's states are counted."""
    sweep: bool
    thorough: bool
    verbose: bool
    host: "HostGuess | None"
    """Whether to assume that the step is launch-bound. None follows the profile or, without one, assumes that it is not."""
    json: Path | None
    plot: Path | None
    timeline: Path | None


def check_options(options: argparse.Namespace, megatron_flags: Sequence[str]) -> PlanOptions:
    """Return the checked options. `megatron_flags` are the arguments that the parser does not recognize."""
    options.model = _find_model_path(options.model)
    if options.gpu is options.hardware is options.profile is None:
        raise ConfigError(f"--gpu is missing. Use --gpu, --hardware or --profile, for example: {EXAMPLE}.")
    _check_sweep(options)
    if options.sweep and options.plot is None:
        options.plot = FRONTIER
    _check_outputs(options)
    for flag, long in SHORT_FLAGS.items():
        if getattr(options, flag.removeprefix("--")) and any(word.partition("=")[0] == long for word in megatron_flags):
            raise ConfigError(f"{flag} and {long} set the same size. Use only one of them.")
    short = [(long, getattr(options, flag.removeprefix("--"))) for flag, long in SHORT_FLAGS.items()]
    options.megatron_flags = (*megatron_flags, *(word for long, size in short if size for word in (long, str(size))))
    options.own_flags = tuple(flag for flag in options.own_flags if flag not in SHORT_FLAGS)
    options.host = _find_host(options)
    return PlanOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(PlanOptions)})


def _find_model_path(name: str | None) -> Path:
    if not name:
        raise ConfigError(
            "MODEL is missing. Pass a Megatron argument file, a config.json or a model name from `fgoffload plan --list` "
            f"first, for example: {EXAMPLE}."
        )
    path = Path(name)
    # Path.is_file would raise on a name that is too long.
    if os.path.isfile(path / _CONFIG):  # accept a model's folder, as transformers does
        path /= _CONFIG
    if not os.path.isfile(path):
        if (shipped := find_model(name)) is None:
            raise ConfigError(
                f"model {name!r} {explain_unusable_file(name)}.{suggest_model(name)} Pass a file or a shipped model, for "
                f"example: {EXAMPLE}."
            )
        path = shipped
    if path.suffix in (".py", ".yaml", ".yml"):
        raise ConfigError(
            f"model {name!r} is neither a bash script nor a config.json. Use one of them, for example: {EXAMPLE}."
        )
    return path


def _check_sweep(options: argparse.Namespace) -> None:
    """Reject options that apply only to a single plan if `--sweep` is set."""
    single = {"--offload-memory-budget": options.budget_bytes, "--timeline": options.timeline}
    for flag, value in (single | {"--thorough": options.thorough, "--verbose": options.verbose}).items():
        if options.sweep and value not in (None, False):
            raise ConfigError(f"--sweep plans for many budgets, but {flag} is for a single plan. Use only one of them.")


def _check_outputs(options: argparse.Namespace) -> None:
    """Check the output files, and replace their names in `options` with paths. No two options may name the same file."""
    inputs = {"the model": options.model, "the --profile file": options.profile, "the --hardware file": options.hardware}
    for name in OUTPUTS:
        if (file := getattr(options, name)) is not None:
            setattr(options, name, check_output_file(file, flag=f"--{name}", inputs=inputs))
            inputs[f"the --{name} file"] = file


def _find_host(options: argparse.Namespace) -> "HostGuess | None":
    """Return the assumption selected by `--launch-bound` or `--not-launch-bound`, or None without these flags."""
    if not (options.launch_bound or options.not_launch_bound):
        return None
    from fgoffload.planner.host_overhead import HostGuess

    return HostGuess.LAUNCH_BOUND if options.launch_bound else HostGuess.NOT_LAUNCH_BOUND
