"""Trains each of Megatron's models that it is given by its plan, and writes how many bytes are allocated where backward begins.

A script, since Transformer Engine keeps state for a process: `python measure_recompute_memory.py RANK PROCESSES FOLDER` reads
`request.json` in FOLDER and writes `result-RANK.json` there. For each training that is an error, or what `measure` returns.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def measure(arguments: Any, plan: str, folder: Path) -> dict[str, Any]:
    """Train two steps by `plan`; the first allocates workspaces, and the second is measured.

    Returns:
        `allocated_bytes` where backward begins; `d2h_bytes` and `held_elsewhere_bytes` of all tags; and the bits, as `losses`
        and `digests`.
    """
    import torch

    from fgoffload import OffloadConfig, OffloadPlan
    from fgoffload.integrations.megatron.data import TextData
    from fgoffload.integrations.megatron.training import Trainer

    path = folder / "plan.json"
    path.write_text(plan)
    tags = tuple(sorted({site.tag for site, action in OffloadPlan.load(path).actions.items() if action.offloads}))
    # Without a window each group is gone when it has ended, so that nothing is still on its way where backward begins.
    config = OffloadConfig(offload_modules=tags, offload_plan=path, min_offloaded_tensor_size=1, offload_window_bytes=0)
    allocated_bytes = []

    def look(gradient: torch.Tensor) -> None:
        torch.cuda.synchronize()
        allocated_bytes.append(torch.cuda.memory_allocated())

    def look_when_backward_begins(module: torch.nn.Module, args: Any, loss: torch.Tensor) -> None:
        loss.register_hook(look)

    with contextlib.closing(Trainer(arguments, TextData.load(), offload=config)) as trainer:
        trainer.chunks[0].register_forward_hook(look_when_backward_begins)
        results = [trainer.run_step() for _ in range(2)]
        stats = trainer.integration.last_step
        return {
            "allocated_bytes": allocated_bytes[-1],
            "d2h_bytes": sum(found.d2h_bytes for found in stats.tags.values()),
            "held_elsewhere_bytes": sum(found.held_elsewhere_bytes for found in stats.tags.values()),
            "losses": [loss.hex() for result in results for loss in result.losses],
            "digests": [result.gradient_digests for result in results],
        }


def main(rank: int, processes: int, folder: Path) -> None:
    """Run all trainings of the request, one after another. They differ in the plan alone."""
    import torch

    from fgoffload.integrations.megatron.arguments import parse_arguments
    from fgoffload.integrations.megatron.training import Trainer

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=processes)
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    arguments = parse_arguments(request["flags"].split(), source="test", world_size=processes)
    Trainer.initialize_parallel(arguments)
    results: dict[str, dict[str, Any] | str] = {}
    for name, plan in request["plans"].items():
        try:
            results[name] = measure(arguments, plan, folder)
        except Exception:  # noqa: BLE001 - whatever it is, the test says it
            results[name] = traceback.format_exc()
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    # Destructors of what a failed training has left could wait for ever.
    os._exit(0)


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
