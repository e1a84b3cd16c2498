"""Trains small Megatron-Core models on the CPU, with and without offload."""

import contextlib
import gc
from collections.abc import Mapping
from pathlib import Path

from fgoffload import Action, OffloadConfig, OffloadPlan, Site
from fgoffload.trainer.arguments import parse_arguments
from fgoffload.trainer.data import TextData
from fgoffload.trainer.steps import StepResult
from fgoffload.trainer.trainer import Trainer

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    "--swiglu --disable-bias-linear --lr 1e-2 --position-embedding-type rope --normalization RMSNorm"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2"
DENSE = SHAPE
MOE = f"{SHAPE} {EXPERTS}"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 32"
MIXED = f"{SHARED} --moe-layer-freq [0]*1+[1]*1"
TOKENS = 32 * 2
"""Tokens of a microbatch."""
HIDDEN_BYTES = TOKENS * 32 * 4
"""Bytes of hidden states, [s, b, h] in fp32."""

ATTENTION_TAGS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
MLP_TAGS = ("mlp_fc1", "mlp_act", "mlp_fc2")
EXPERT_TAGS = ("router", "expert_fc1", "moe_act", "expert_fc2", "moe_combine")
MIXED_TAGS = (*ATTENTION_TAGS, *MLP_TAGS, "shared_expert", *EXPERT_TAGS)


def make_config(*tags: str, **options: object) -> OffloadConfig:
    options.setdefault("min_offloaded_tensor_size", 64)
    options.setdefault("offload_prefetch_bytes", 64 * 1024)
    return OffloadConfig(offload_modules=tags, **options)


def make_trainer(flags: str, offload: OffloadConfig | None) -> contextlib.closing[Trainer]:
    arguments = parse_arguments(flags.split(), source="test")
    return contextlib.closing(Trainer(arguments, TextData.load(), offload=offload))


def train(flags: str, offload: OffloadConfig | None = None, *, steps: int = 2) -> tuple[list[object], dict[str, int]]:
    """Return losses and gradient digests of all steps, and the bytes offloaded in the last step by tag."""
    with make_trainer(flags, offload) as trainer:
        results: list[StepResult] = [trainer.run_step() for _ in range(steps)]
        stats = trainer.integration.last_step.tags if offload else {}
    gc.collect()
    return [(r.losses, r.gradient_digests) for r in results], {tag: numbers.d2h_bytes for tag, numbers in stats.items()}


def write_plan(path: Path, actions: Mapping[tuple[int, str], Action]) -> Path:
    """Write a plan file for a model of one chunk, with actions by layer and tag."""
    plan = OffloadPlan(actions={Site(chunk=0, layer=layer, tag=tag): action for (layer, tag), action in actions.items()})
    path.write_text(plan.to_json())
    return path
