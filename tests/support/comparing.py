"""Measures profiles with compared steps in several processes: as a script one of them, which writes what it found.

`test_compared_steps` starts it.
"""

import json
import sys
from pathlib import Path


def _main(rank: int, processes: int, folder: Path) -> None:
    from fgoffload.integrations.megatron import compared_steps
    from fgoffload.integrations.megatron.arguments import parse_arguments
    from fgoffload.integrations.megatron.data import TextData
    from fgoffload.integrations.megatron.parallel import join_processes
    from fgoffload.integrations.megatron.profile_training import profile_training
    from fgoffload.integrations.megatron.training import Trainer
    from fgoffload.integrations.megatron.training_policy import Update
    from fgoffload.planner.timing.json_fields import to_json_value
    from fgoffload.planner.timing.link_profile import CopyRate, LinkProfile

    compared_steps.MOST_ROUNDS = compared_steps.FEWEST_ROUNDS
    # Each process has timed its own link, and the first one's counts: by the other's nothing is hidden.
    rate = CopyRate(size_bytes=2**20, d2h_bytes_per_s=1e6 if rank else 50e9, h2d_bytes_per_s=50e9, duplex_bytes_per_s=33e9)
    link = LinkProfile(copies=(rate,), compute_slowdown=0.0)
    arguments = parse_arguments((folder / "flags.txt").read_text().split(), source="test", world_size=processes)
    join_processes(rank=rank, world_size=processes, local_rank=rank, store=folder / "store")
    Trainer.initialize_parallel(arguments)
    profile = profile_training(arguments, TextData.load(), link, update=Update.ADAMW, plain_step_s=1.0, has_own_host=True)
    found = [to_json_value(step) for step in profile.compared_steps]
    (folder / f"result-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
