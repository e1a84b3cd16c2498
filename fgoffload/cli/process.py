"""The processes of a training: reads their environment, and starts them with torchrun."""

import contextlib
import io
import socket
import sys
from collections.abc import MutableMapping, Sequence

from fgoffload.cli.script import EXIT_FAILED
from fgoffload.errors import ConfigError

_SIZES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def set_up_process(environment: MutableMapping[str, str]) -> int:
    """Return this process's rank. Without a launcher, set up `environment` for a single process.

    Raises:
        ConfigError: Variables of the launcher are missing or not numbers.
    """
    given = [name for name in _SIZES if name in environment]
    if not given:
        for name, value in _SINGLE.items():
            environment.setdefault(name, value)
        environment.setdefault("MASTER_PORT", str(_find_free_port()))
        return 0
    missing = [name for name in _SIZES if name not in environment]
    if missing:
        raise ConfigError(
            f"The environment has {' and '.join(given)} and no {' nor '.join(missing)}. Start with torchrun, which sets all of "
            f"them, or unset {' and '.join(given)} to train in one process."
        )
    for name in _SIZES:
        if not (environment[name].isascii() and environment[name].isdigit()):
            raise ConfigError(f"The environment has {name}={environment[name]!r}, which is not a number. Start with torchrun.")
    return int(environment["RANK"])


def run_torchrun(words: Sequence[str]) -> int:
    """Run torchrun in this process with `words`, and return the exit code of the rank that failed first, or 0.

    torchrun itself always exits with 1 if a rank fails.

    Raises:
        ConfigError: torchrun does not know an option, or cannot use its value.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, main, parse_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = parse_args(list(words))  # type: ignore[no-untyped-call]
        if config_from_args(options)[0].nproc_per_node < 1:
            raise ValueError(f"--nproc-per-node {options.nproc_per_node} is below 1")
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"torchrun refuses its options: {error}. See `torchrun --help`.") from error
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
        why = said.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(f"torchrun refuses its options: {why}. See `torchrun --help`.") from ended
    try:
        main(list(words))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        return _to_exit_code(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _to_exit_code(code: int) -> int:
    """Return the exit code that a shell reports for `code`, which is negative for a signal."""
    return 128 - code if code < 0 else code or EXIT_FAILED


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
