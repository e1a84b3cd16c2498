"""Megatron-Core in code: apply, train, read the statistics, remove.

    python examples/02_megatron_in_code.py

Expected output: the losses of three steps, then one line per tag with the bytes offloaded and reloaded in the last step. The
script trains the model of `arguments/tiny_moe.sh` with Megatron-Core's own schedule. Without a GPU, it runs on the CPU.
"""

import contextlib
import statistics
from pathlib import Path

from fgoffload.integrations.megatron.flags.argument_files import read_argument_file
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.parallel import destroy_parallel, initialize_parallel
from fgoffload.trainer.trainer import Trainer
from fgoffload.units import format_bytes

ARGUMENTS = Path(__file__).parents[1] / "arguments" / "tiny_moe.sh"


def main() -> None:
    """Train three steps with offload."""
    arguments = parse_arguments(read_argument_file(ARGUMENTS), source=str(ARGUMENTS))
    initialize_parallel(arguments)
    # The trainer calls `megatron.apply(arguments.offload)` before it builds the model, and `remove` when it is closed. Add
    # these two calls to your own training script.
    with contextlib.closing(Trainer(arguments, TextData.load(), offload=arguments.offload)) as trainer:
        for _ in range(3):
            result = trainer.run_step()
            print(f"step {result.step + 1}: loss {statistics.fmean(result.losses):.4f}")
        for tag, tag_stats in trainer.integration.last_step.tags.items():
            print(f"{tag}: {format_bytes(tag_stats.d2h_bytes)} offloaded, {format_bytes(tag_stats.h2d_bytes)} reloaded")
    destroy_parallel()


if __name__ == "__main__":
    main()
