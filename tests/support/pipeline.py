"""Runs the command line's trainer in several processes, and returns the results of each process.

Tests import `run_trainings`, `run_pipeline` for a single run, or `train` for a run in this process. Each process runs this file
as a script, and they connect through a file, not a port. The parent ends all processes on a failure or timeout. One start of
the processes serves many runs, since it takes most of the time.
"""

import contextlib
import dataclasses
import gc
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 90
"""The timeout of one training run."""

IMPORTS = ("fgoffload.trainer.trainer", "megatron.core.models.gpt")
"""The slow imports of a short training run: nearly all of Megatron."""

SIZES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)
"""Training runs with the same sizes share process groups."""


@dataclasses.dataclass(frozen=True)
class Training:
    """One training run."""

    argv: tuple[str, ...]
    """Megatron flags."""
    steps: int = 2
    """Optimizer steps."""
    offload: bool = False
    """Train with the offload flags of `argv`, which are ignored otherwise."""
    evaluates_before: tuple[int, ...] = ()
    """Evaluate before these steps, from 0."""
    has_reference_attention: bool = False
    """Let local layers use the attention of `support.attention`."""
    sets_weights: bool = False
    """Set each weight from its name in the whole model, so that all layouts start with the same weights."""


@dataclasses.dataclass(frozen=True)
class StageResult:
    """Results of one process."""

    losses: list[list[float]]
    """By step and microbatch. Only the last stage has losses."""
    gradient_digests: list[dict[str, str]]
    """By step and parameter. With `sets_weights`, names have the layer's number in the whole model, to compare layouts."""
    transfers: dict[str, int]
    """Bytes offloaded in the last step, by tag. Empty without offload."""
    evaluations: list[list[float]]
    """Losses of each evaluation."""
    prefetch_misses: list[int]
    """Storages that backward waited for, by step. Empty without offload."""


def run_pipeline(
    argv: Sequence[str], *, processes: int, steps: int = 2, offload: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[StageResult]:
    """Train in `processes` processes and return their results by rank.

    All layouts start with the same weights.

    Args:
        argv: Megatron flags.
        processes: The number of processes for one copy of the model.
        steps: Optimizer steps.
        offload: Train with the offload flags of `argv`, which are ignored otherwise.
        timeout_seconds: The timeout of the whole run.
    """
    training = Training(tuple(argv), steps=steps, offload=offload, sets_weights=True)
    return run_trainings([training], processes=processes, timeout_seconds=timeout_seconds)[0]


def run_trainings(
    trainings: Sequence[Training], *, processes: int, timeout_seconds: float = TIMEOUT_SECONDS, imports: Sequence[str] = IMPORTS
) -> list[list[StageResult]]:
    """Train one after another in `processes` processes, and return the results by training and rank.

    Args:
        trainings: The training runs.
        processes: The number of processes for one copy of the model.
        timeout_seconds: The timeout of all runs together.
        imports: See `run_processes`.
    """
    from support.processes import run_processes  # not at the top, since a script has no package

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps([dataclasses.asdict(training) for training in trainings]))
        run_processes(__file__, folder, processes=processes, timeout_seconds=timeout_seconds, imports=imports)
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]
        return [[StageResult(**rank[index]) for rank in found] for index in range(len(trainings))]


def train(training: Training, *, text: Any, processes: int = 1) -> StageResult:
    """Run `training` in this process, which is one of `processes` with a process group."""
    from fgoffload.trainer.arguments import parse_arguments
    from fgoffload.trainer.trainer import Trainer
    from support.attention import reference_attention

    arguments = parse_arguments(training.argv, source="test", world_size=processes)
    with contextlib.ExitStack() as stack:
        if training.has_reference_attention:
            stack.enter_context(reference_attention())
        trainer = Trainer(arguments, text, offload=arguments.offload if training.offload else None)
        stack.enter_context(contextlib.closing(trainer))
        names = set_weights_by_name(trainer) if training.sets_weights else {}
        results, evaluations, misses = [], [], []
        for step in range(training.steps):
            if step in training.evaluates_before:
                evaluations.append(list(trainer.evaluate()))
            results.append(trainer.run_step())
            misses += [trainer.integration.last_step.prefetch_misses] if trainer.integration else []
        tags = trainer.integration.last_step.tags if trainer.integration else {}
        return StageResult(
            losses=[list(result.losses) for result in results],
            gradient_digests=[
                {names.get(name, name): digest for name, digest in result.gradient_digests.items()} for result in results
            ],
            transfers={tag: moved.d2h_bytes for tag, moved in tags.items()},
            evaluations=evaluations,
            prefetch_misses=misses,
        )


def set_weights_by_name(trainer: Any) -> dict[str, str]:
    """Set each weight from its name in the whole model, and return these names by the trainer's names."""
    import torch

    names = {}
    with torch.no_grad():
        for index, chunk in enumerate(trainer.chunks):
            for name, parameter in chunk.named_parameters():
                whole = re.sub(
                    r"^decoder\.layers\.(\d+)\.",
                    lambda match, chunk=chunk: f"layers.{chunk.decoder.layers[int(match[1])].layer_number}.",
                    name,
                )
                if whole == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                    # The first and the last stage have a copy of a tied embedding.
                    whole = "embedding.word_embeddings.weight"
                names[f"{index}.{name}"] = whole
                if parameter.dim() > 1:
                    generator = torch.Generator().manual_seed(int.from_bytes(whole.encode()[-8:], "big") % 2**31 + len(whole))
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return names


def _main(rank: int, processes: int, folder: Path) -> None:
    import torch

    from fgoffload.integrations.megatron.patching.imports import load_module
    from fgoffload.trainer.arguments import parse_arguments
    from fgoffload.trainer.data import TextData
    from fgoffload.trainer.parallel import initialize_parallel
    from support.attention import reference_attention

    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    text = TextData.load()
    results, previous_sizes = [], None
    for request in json.loads((folder / "request.json").read_text()):
        training = Training(**request)
        arguments = parse_arguments(training.argv, source="test", world_size=processes)
        sizes = [getattr(arguments, f"{name}_size") for name in SIZES]
        if sizes != previous_sizes:
            load_module("megatron.core.parallel_state").destroy_model_parallel()
            initialize_parallel(arguments)
            gc.freeze()  # trainers collect garbage when they close, and need not scan imported modules
            previous_sizes = sizes
        with reference_attention() if training.has_reference_attention else contextlib.nullcontext():
            results.append(dataclasses.asdict(train(training, text=text, processes=processes)))
    (folder / f"result-{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
