"""Runs a training in several processes, one pipeline stage each, and returns what each computed.

As a module: `run_pipeline`. As a script: one of those processes. They meet through a file, so no port is taken, and the
parent ends all of them when one fails or time is up.
"""

import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 90
"""Of a whole run. Two processes need ten seconds, most of them for imports."""


@dataclasses.dataclass(frozen=True)
class StageResult:
    """What one process computed."""

    losses: list[list[float]]
    """By step and microbatch; empty lists on all stages but the last."""
    gradient_digests: list[dict[str, str]]
    """By step: parameter names with the layer's number in the whole model, so that they can be compared between layouts."""
    transfers: dict[str, int]
    """Bytes to the host by tag, of the last step; empty without offload."""


def run_pipeline(
    argv: Sequence[str], *, processes: int, steps: int = 2, offload: bool = False, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[StageResult]:
    """Train in `processes` processes and return their results by rank.

    Weights depend on the parameter's place in the whole model alone, so every layout begins with the same ones.

    Args:
        argv: Megatron flags.
        processes: As many as one copy of the model needs.
        steps: Optimizer steps.
        offload: Train with the offload flags of `argv`; without, they are left aside.
        timeout_seconds: Of the whole run.
    """
    from support.processes import run_processes  # here: as a script this file has no package

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps({"argv": list(argv), "steps": steps, "offload": offload}))
        run_processes(__file__, folder, processes=processes, timeout_seconds=timeout_seconds)
        return [StageResult(**json.loads((folder / f"result-{rank}.json").read_text())) for rank in range(processes)]


def _train(rank: int, processes: int, folder: Path) -> StageResult:
    import torch

    from fgoffload.integrations.megatron.arguments import parse_arguments
    from fgoffload.integrations.megatron.data import TextData
    from fgoffload.integrations.megatron.training import Trainer

    request = json.loads((folder / "request.json").read_text())
    arguments = parse_arguments(request["argv"], source="test", world_size=processes)
    store = torch.distributed.FileStore(str(folder / "store"), processes)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    Trainer.initialize_parallel(arguments)
    trainer = Trainer(arguments, TextData.load(), offload=arguments.offload if request["offload"] else None)
    try:
        names = set_weights_by_place(trainer)
        results = [trainer.run_step() for _ in range(request["steps"])]
        transfers = (
            {}
            if trainer.integration is None
            else {tag: moved.d2h_bytes for tag, moved in trainer.integration.last_step.tags.items()}
        )
    finally:
        trainer.close()
        Trainer.destroy_parallel()
    return StageResult(
        losses=[list(result.losses) for result in results],
        gradient_digests=[{names[name]: digest for name, digest in result.gradient_digests.items()} for result in results],
        transfers=transfers,
    )


def set_weights_by_place(trainer: Any) -> dict[str, str]:
    """Set each weight from its name in the whole model, and return that name by the trainer's name."""
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
                    # A tied embedding exists twice: on the first stage and on the last.
                    whole = "embedding.word_embeddings.weight"
                names[f"{index}.{name}"] = whole
                if parameter.dim() > 1:
                    generator = torch.Generator().manual_seed(int.from_bytes(whole.encode()[-8:], "big") % 2**31 + len(whole))
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return names


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    result = _train(int(sys.argv[1]), int(sys.argv[2]), folder)
    (folder / f"result-{sys.argv[1]}.json").write_text(json.dumps(dataclasses.asdict(result)))
