"""`fgoffload run`: runs an unmodified training script of Megatron-LM, transformers or TRL with offload."""

import argparse
import contextlib
import difflib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fgoffload.cli.errors import show_line
from fgoffload.cli.launch import find_launch, set_up_process
from fgoffload.cli.options import suggest, suggest_file
from fgoffload.cli.script import EXIT_FAILED, find_fault, imports_any, run_script, script_folder_first
from fgoffload.cli.streams import collect_info
from fgoffload.errors import BudgetError, ConfigError, OffloadError
from fgoffload.units import SIZE_UNITS

if TYPE_CHECKING:
    from fgoffload.integrations.megatron import MegatronOffload
    from fgoffload.integrations.megatron.launch import OwnFlags

NAME = "run"
SUMMARY = "run an unmodified training script with offload"
DESCRIPTION = """\
Runs an unmodified training script with offload. For Megatron-LM, add the flags
below to those of the script. For a transformers or TRL Trainer, no flags are
required: the command adds OffloadCallback. Rank 0 prints a short summary of
the offload.

Put options for torchrun before `--`. These commands are equivalent:
  fgoffload run --nproc-per-node 8 -- pretrain_gpt.py ...
  torchrun --nproc-per-node 8 -m fgoffload run pretrain_gpt.py ..."""
USAGE = """\
fgoffload run [TORCHRUN OPTIONS --] SCRIPT.py
                     [FLAGS OF THE SCRIPT AND FGOFFLOAD]"""
EXAMPLE = "fgoffload run --nproc-per-node 8 -- pretrain_gpt.py FLAGS"
OWN_EXAMPLE = "fgoffload run train.py --offload-memory-budget 60GiB"
NOTES = f"{SIZE_UNITS} The exit code is that of the script, or 2 if a flag of fgoffload is invalid."
OWN_FLAGS: Mapping[str, str] = {
    "--fine-grained-activation-offloading": "enable offload",
    "--offload-modules TAG ...": "tags to offload, or auto",
    "--offload-memory-budget SIZE": "GPU memory to plan for, with auto or a Trainer",
    "--offload-plan FILE": "plan file with the actions for each layer",
    "--offload-host-budget SIZE": "host memory limit of each rank",
    "--offload-window SIZE": "bytes in flight to the host before compute waits",
    "--offload-prefetch SIZE": "bytes to reload before backward needs them",
    "--min-offloaded-tensor-size ELEMENTS": "smaller storages stay on the GPU",
    "--activation-offload-fraction FRACTION": "fraction of each chunk's sites to offload, 0 to 1",
    "--delta-offload-bytes-across-pp-ranks BYTES": "offload fewer bytes on each later pipeline rank",
    "--delay-offload-until-cuda-graph": "start copies after the next CUDA graph is launched",
}
"""Our flags and their meanings, repeated here because the real parser loads torch. A test compares both."""


class RunRequest(NamedTuple):
    """Parsed arguments of `fgoffload run`."""

    torchrun_options: tuple[str, ...]
    """Arguments before `--`. If empty, the script runs in this process."""
    script: str
    """Path of the script, as typed."""
    words: tuple[str, ...]
    """Arguments after the script."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add our flags to `parser`, which shows them in its help. `read_request` parses the arguments."""
    both = parser.add_argument_group("flag for Megatron-LM and for a transformers Trainer")
    megatron = parser.add_argument_group("flags for Megatron-LM")
    for flag, meaning in OWN_FLAGS.items():
        name, _, value = flag.partition(" ")
        group = both if name == "--offload-memory-budget" else megatron
        if value:
            group.add_argument(name, metavar=value, help=meaning)
        else:
            group.add_argument(name, action="store_true", help=meaning)


def run(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the script in this process or under torchrun, and return its exit code."""
    request = read_request(words)
    if request.torchrun_options:
        _take_own_flags(request)  # check them here, since later each rank would print the error
        return run_torchrun([*request.torchrun_options, "-m", "fgoffload", NAME, request.script, *request.words])
    # A Trainer uses DDP if the environment sets a rank, so set it only for Megatron-LM, which requires it.
    is_megatron = next(iter(OWN_FLAGS)) in request.words or imports_any(request.script, ("megatron",))
    rank = set_up_process(os.environ) if is_megatron and not _makes_trainers(request) else find_launch().rank
    with _rank_in_errors(rank):
        return _run_here(request, is_first=rank == 0)


def read_request(words: Sequence[str]) -> RunRequest:
    """Parse the arguments of `fgoffload run`."""
    options: Sequence[str] = ()
    if words and words[0].startswith("-"):
        own = [flag.partition(" ")[0] for flag in OWN_FLAGS]
        for flag in (word.partition("=")[0] for word in (words[: words.index("--")] if "--" in words else words[:1])):
            if near := difflib.get_close_matches(flag, own, n=1, cutoff=0.9):
                raise ConfigError(f"{flag} comes before the script. Put {near[0]} after it, for example: {OWN_EXAMPLE}.")
        if "--" not in words:
            raise ConfigError(
                f"{words[0]} comes before the script.{suggest(words[0], ('--help',))} Put the script's flags after it and "
                f"torchrun's options before --, for example: {EXAMPLE}."
            )
        end = list(words).index("--")
        options, words = words[:end], words[end + 1 :]
    if not words or words[0].startswith("-"):
        raise ConfigError(f"SCRIPT.py is missing. Pass it before its flags, for example: {EXAMPLE}.")
    script = words[0]
    why = find_fault(script)
    if why is not None:
        raise ConfigError(f"script {script!r} {why}.{suggest_file(script)} Pass a Python training script, as in: {EXAMPLE}.")
    return RunRequest(torchrun_options=tuple(options), script=script, words=tuple(words[1:]))


def run_torchrun(words: Sequence[str]) -> int:
    """Run torchrun in this process, and return the exit code of the first failed rank, or 0.

    torchrun itself exits with 1 whenever a rank fails.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, main, parse_args

    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            options = parse_args(list(words))  # type: ignore[no-untyped-call]
        if config_from_args(options)[0].nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node {options.nproc_per_node} is below 1")
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"torchrun rejects its options: {error}. See `torchrun --help`.") from error
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        why = shown.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"torchrun rejects its options: {why}. See `torchrun --help`.") from ended
    try:
        main(list(words))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        code = failure.exitcode
        return 128 - code if code < 0 else code or EXIT_FAILED  # shells report a signal as 128 + its number
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _run_here(request: RunRequest, *, is_first: bool) -> int:
    with script_folder_first(request.script):
        own = _take_own_flags(request)
        if is_first:
            for remark in own.remarks:
                show_line(f"warning: {remark}")
        if own.offload is None:
            return _run_trainers(request, own, is_first=is_first)
        from fgoffload.integrations.megatron.launch import apply_to_script, describe_megatron

        with collect_info("fgoffload.integrations.megatron") as messages:
            offload = apply_to_script(own.offload, own.script_words)
        if is_first:
            show_line(" ".join((*messages, describe_megatron())))
        try:
            exit_code = run_script(request.script, own.script_words)
            if is_first and exit_code == 0 and not offload.list_sites():
                show_line(
                    f"warning: {request.script} ran no model of the patched Megatron-Core, so nothing was offloaded. Use a "
                    "script that trains such a model, or remove fgoffload's flags."
                )
        finally:
            _remove(offload)
        return exit_code


def _makes_trainers(request: RunRequest) -> bool:
    """Return whether the script imports transformers or TRL, and its flags do not enable offload for Megatron-Core."""
    return next(iter(OWN_FLAGS)) not in request.words and imports_any(request.script, ("transformers", "trl"))


def _run_trainers(request: RunRequest, own: "OwnFlags", *, is_first: bool) -> int:
    """Run the script, and add OffloadCallback to each Trainer that it creates."""
    from fgoffload.integrations.transformers.launch import offload_trainers

    makes_trainers = _makes_trainers(request)
    if is_first and not makes_trainers:
        show_line(
            f"waiting for {request.script} to create a transformers Trainer. For Megatron-Core, add {next(iter(OWN_FLAGS))}."
        )
    with offload_trainers(own.trainer_budget) as made:
        errors = (BudgetError, ConfigError) if own.trainer_budget else (BudgetError,)
        exit_code = run_script(request.script, own.script_words, own_errors=errors)
    if is_first and not made and exit_code == 0 and (own.trainer_budget or makes_trainers):
        flag = " --offload-memory-budget had no effect." if own.trainer_budget else ""
        show_line(f"warning: {request.script} created no Trainer, so nothing was offloaded.{flag}")
    return exit_code


def _take_own_flags(request: RunRequest) -> "OwnFlags":
    from fgoffload.integrations.megatron.patching.imports import require_torch

    require_torch()
    import torch

    from fgoffload.integrations.megatron.launch import take_own_flags

    text = Path(request.script).read_text(encoding="utf-8", errors="ignore")
    own = take_own_flags(request.words, makes_trainers=_makes_trainers(request), script_text=text)
    if own.trainer_budget == "auto" and not torch.cuda.is_available():
        raise ConfigError("--offload-memory-budget auto needs a CUDA GPU. Use a size instead, for example 60GiB.")
    return own


def _remove(offload: "MegatronOffload") -> None:
    try:
        offload.remove()
    except (OffloadError, RuntimeError) as error:  # after a CUDA error, removal fails too, but must not hide it
        show_line(f"warning: offload could not be removed after the script: {error}")


@contextlib.contextmanager
def _rank_in_errors(rank: int) -> Iterator[None]:
    """Prefix our errors with the rank, unless it is rank 0."""
    try:
        yield
    except OffloadError as error:
        if rank == 0:
            raise
        if isinstance(error, BudgetError):
            raise BudgetError(f"rank {rank}: {error.why}", error.least_bytes) from error
        raise type(error)(f"rank {rank}: {error}") from error
