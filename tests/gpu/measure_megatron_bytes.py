"""Trains one step of each requested Megatron model and writes the bytes that each tag saved.

This is a script, since Transformer Engine keeps state per process. `python measure_megatron_bytes.py RANK PROCESSES FOLDER`
reads `request.json` in FOLDER and writes `result-RANK.json` there, with an error or the result of `measure` for each model.
Megatron's local layers get stand-ins for the kernels that need a GPU.
"""

import collections
import contextlib
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0"}


def measure(arguments: Any, tags: list[str], *, is_deterministic: bool) -> dict[str, Any]:
    """Train one step, and another one that records every save.

    Returns:
        `bytes`: bytes per tag that the first step offloads, including storages that another tag offloaded first. `rows`: rows
        of each expert in each MoE layer, as routed. `storages`: the tensors that each tag saved, for error messages.
    """
    from fgoffload import OffloadConfig
    from fgoffload.trainer.data import TextData
    from fgoffload.trainer.trainer import Trainer, TrainingPolicy

    config = OffloadConfig(offload_modules=tuple(tags), min_offloaded_tensor_size=1)
    # Ops read this setting in each call, attention when it is built: with sinks it is only fused if not deterministic.
    policy = TrainingPolicy(is_deterministic=is_deterministic)
    with contextlib.closing(Trainer(arguments, TextData.load(), offload=config, policy=policy)) as trainer:
        rows = record_rows(trainer)
        trainer.run_step(with_digests=False)
        stats = trainer.integration.last_step.tags
        return {
            "bytes": {tag: found.d2h_bytes + found.shared_bytes for tag, found in stats.items()},
            "rows": rows[:],
            "storages": list_storages(trainer),
        }


def record_rows(trainer: Any) -> list[list[int]]:
    """Return a list to which each forward of experts appends the unpadded rows of each expert of this rank."""
    found: list[list[int]] = []

    def record(module: Any, inputs: tuple[Any, ...]) -> None:
        _, tokens_per_expert, _ = inputs
        found.append(tokens_per_expert.tolist())

    for chunk in trainer.chunks:
        for module in chunk.modules():
            if type(module).__name__ == "TEGroupedMLP":
                module.register_forward_pre_hook(record)
    return found


def list_storages(trainer: Any) -> dict[str, list[dict[str, Any]]]:
    """Train a step and return the shape, dtype, storage bytes and count of the tensors that each tag saves.

    A storage counts once per execution of a site. Parameters are left out; tensors that layers share are included.
    """
    import torch

    from fgoffload.engine import ActivationLedger
    from fgoffload.engine.identity import get_key, is_of_leaf

    counts: collections.Counter[tuple[str, tuple[int, ...], str, int]] = collections.Counter()
    seen = set()

    class SaveRecorder(ActivationLedger):
        def count_save(self, tensor: torch.Tensor, *, place: object = "") -> None:
            site, separator, _ = str(place).partition(" mb=")
            if not separator or type(tensor) is not torch.Tensor or is_of_leaf(tensor):
                return
            key = (site, get_key(tensor))
            if key not in seen:
                seen.add(key)
                nbytes = tensor.untyped_storage().nbytes()
                counts[site.rpartition(".")[2], tuple(tensor.shape), str(tensor.dtype), nbytes] += 1

        def count_take(self, *, place: object = "") -> None: ...

        def observe(self, tensor: torch.Tensor) -> None: ...

    with trainer.integration.engine.observe(SaveRecorder(parameters=())):
        trainer.run_step(with_digests=False)
    found: dict[str, list[dict[str, Any]]] = {}
    for (tag, shape, dtype, nbytes), count in counts.items():
        found.setdefault(tag, []).append({"shape": shape, "dtype": dtype, "size_bytes": nbytes, "count": count})
    return found


def main(rank: int, processes: int, folder: Path) -> None:
    """Run all models of the request, one after another. They all have the same parallel layout."""
    import torch
    from support.fused_kernels import fused_kernels
    from support.shrunk_models import balanced_routing

    from fgoffload.integrations.megatron.patching.imports import load_module
    from fgoffload.trainer.arguments import parse_arguments
    from fgoffload.trainer.parallel import initialize_parallel

    parallel_state = load_module("megatron.core.parallel_state")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=processes)
    request: dict[str, Any] = json.loads((folder / "request.json").read_text())
    results: dict[str, dict[str, Any] | str] = {}
    for name, training in request["trainings"].items():
        sys.stdout.write(f"{name}\n")  # the last name in the log is the one that hung or crashed
        sys.stdout.flush()
        try:
            arguments = parse_arguments(training["flags"].split(), source="test", world_size=processes)
            kernels = contextlib.nullcontext() if arguments.uses_transformer_engine else fused_kernels()
            with kernels, balanced_routing():
                if not parallel_state.model_parallel_is_initialized():
                    initialize_parallel(arguments)
                    gc.freeze()  # closing a trainer collects garbage; this skips imported modules
                results[name] = measure(arguments, training["tags"], is_deterministic=request["is_deterministic"])
        except Exception:  # noqa: BLE001 - the test reports any error
            results[name] = traceback.format_exc()
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    # Destructors of a failed training could wait for another rank forever.
    os._exit(0)


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
