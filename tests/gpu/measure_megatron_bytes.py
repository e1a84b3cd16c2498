"""Trains a step of each of Megatron's models that it is given and writes what each tag saved.

A script, since Transformer Engine keeps state for a process: `python measure_megatron_bytes.py RANK PROCESSES FOLDER` reads
`request.json` in FOLDER and writes `result-RANK.json` there. For each training that is an error, or the bytes of each tag in
one step: those that left and those that another tag had taken away.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_NVLS_ENABLE": "0",
}


def measure(arguments: Any, tags: list[str], *, is_deterministic: bool) -> dict[str, int]:
    """Return the bytes of each of `tags` in one step."""
    import torch

    from fgoffload import OffloadConfig
    from fgoffload.integrations.megatron.data import TextData
    from fgoffload.integrations.megatron.training import Trainer

    config = OffloadConfig(offload_modules=tuple(tags), min_offloaded_tensor_size=1)
    with contextlib.closing(Trainer(arguments, TextData.load(), offload=config)) as trainer:
        # The trainer chooses deterministic algorithms. Megatron and torch look at this for every operator; attention, which
        # looked when it was built, saves the same either way.
        torch.use_deterministic_algorithms(mode=is_deterministic, warn_only=True)
        trainer.run_step(with_digests=False)
        stats = trainer.integration.last_step.tags
        return {tag: found.d2h_bytes + found.shared_bytes for tag, found in stats.items()}


def main(rank: int, processes: int, folder: Path) -> None:
    """Run all trainings of the request, one after another. They differ in the model alone."""
    import torch

    from fgoffload.integrations.megatron.arguments import parse_arguments
    from fgoffload.integrations.megatron.imports import load_module
    from fgoffload.integrations.megatron.training import Trainer

    parallel_state = load_module("megatron.core.parallel_state")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=processes)
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    results: dict[str, dict[str, int] | str] = {}
    for name, training in request["trainings"].items():
        try:
            arguments = parse_arguments(training["flags"].split(), source="test", world_size=processes)
            if not parallel_state.model_parallel_is_initialized():
                Trainer.initialize_parallel(arguments)
            results[name] = measure(arguments, training["tags"], is_deterministic=request["is_deterministic"])
        except Exception:  # noqa: BLE001 - whatever it is, the test says it
            results[name] = traceback.format_exc()
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    # Destructors of what a failed training has left could wait for another rank for ever.
    os._exit(0)


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
