"""Trains a tiny Llama with `Trainer` and DeepSpeed in several processes, without and with the callback.

Tests import `run_ranks`, which runs this file as a script in cases process. The processes connect through a file, not a port.
"""

import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 110
"""The timeout of a whole run. DeepSpeed compiles a CPU operator at its first use on a machine."""
STAGES = (2, 3)


def run_ranks(*, processes: int, imports: tuple[str, ...] = ()) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the results of cases rank without and with the callback, for cases ZeRO stage, without and with checkpointing."""
    from support.processes import run_processes  # not at the top, since a script has no package

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_processes(__file__, folder, processes=processes, timeout_seconds=TIMEOUT_SECONDS, imports=imports)
        for rank in range(processes):
            found = json.loads((folder / f"result-{rank}.json").read_text())
            yield from zip(found[::2], found[1::2], strict=True)


def _train(stage: int, *, checkpointing: bool, is_offloaded: bool) -> dict[str, Any]:
    import deepspeed
    import torch

    from fgoffload.integrations.transformers import OffloadCallback
    from support.huggingface import ALL, list_losses, make_llama, make_trainer

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}  # all parameters are sharded
    options = {
        "deepspeed": {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": "auto",
        },
        "use_cpu": False,  # accelerate would use DDP; DeepSpeed gets its device from the environment
        "gradient_checkpointing": checkpointing,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama()
        trainer = make_trainer(model, Path(folder), *[OffloadCallback(config=ALL)] * is_offloaded, **options)
        trainer.train()
    digests = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digests.append(hashlib.sha256(parameter.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
    return {
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "losses": list_losses(trainer),
        "parameters": digests,
        "saved_gib": trainer.state.log_history[0].get("offload/saved_gib"),
    }


def _main(rank: int, processes: int, folder: Path) -> None:
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="localhost", MASTER_PORT="0")
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=processes)
    cases = itertools.product(STAGES, (False, True), (False, True))
    found = [_train(stage, checkpointing=checkpointing, is_offloaded=offloaded) for stage, checkpointing, offloaded in cases]
    (folder / f"result-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
