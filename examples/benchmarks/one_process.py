"""Setup for scripts that measure several settings one after another in one process."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fgoffload.benchmark.job import Job
from fgoffload.benchmark.loading import load_arguments
from fgoffload.benchmark.runner import Runner
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel


@contextlib.contextmanager
def open_runner(file: Path, flags: Sequence[str], *, own_flags: Sequence[str], warmup: int, steps: int) -> Iterator[Runner]:
    """Create the process groups that the model of `file` needs, and yield a runner for it.

    Args:
        file: A Megatron argument file.
        flags: Megatron's flags from the command line.
        own_flags: Names of the script's own flags.
        warmup: Untimed steps of each setting.
        steps: Timed steps of each setting.

    Raises:
        OffloadError: The file or a flag is invalid, or the model needs several processes.
    """
    with tempfile.TemporaryDirectory(prefix="fgoffload-") as folder:
        job = Job(
            source=str(file),
            file_flags=read_argument_file(file, variables=os.environ),
            typed_flags=tuple(flags),
            own_flags=tuple(own_flags),
            warmup=warmup,
            steps=steps,
            folder=Path(folder),
        )
        arguments = load_arguments(job)
        if arguments.world_size > 1:
            raise ConfigError(f"{job.source}: the model needs {arguments.world_size} processes. Use smaller parallel sizes.")
        initialize_parallel(arguments)
        try:
            yield Runner(job, on_step=lambda _: None)
        finally:
            destroy_parallel()
