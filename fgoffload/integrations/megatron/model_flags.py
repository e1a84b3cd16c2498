"""The flags of Megatron that a plan is made from, and those that it does not depend on.

A small table of its own, so that planning needs neither Megatron-Core nor torch. Spellings are those of Megatron-LM, with the
names of Megatron-Core's config fields beside them where they differ; `tests/unit/megatron/test_model_shapes.py` compares the
table with those fields.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from fgoffload.integrations.megatron.flags import FlagParser, layer_pattern, number, one_of, size_pair, whole_number
from fgoffload.planner.model.layer_shape import FP8_RECIPES

OWN_FLAGS = ("--num-gpus",)
"""Flags that Megatron does not have: it asks the launcher how many processes there are."""

_NUMBERS: tuple[tuple[str, ...], ...] = (
    ("--num-layers",),
    ("--hidden-size",),
    ("--ffn-hidden-size",),
    ("--num-attention-heads",),
    ("--num-query-groups",),
    ("--kv-channels",),
    ("--vocab-size",),
    ("--make-vocab-size-divisible-by",),
    ("--seq-length",),
    ("--max-position-embeddings",),
    ("--mtp-num-layers",),
    ("--q-lora-rank",),
    ("--kv-lora-rank",),
    ("--qk-head-dim",),
    ("--qk-pos-emb-head-dim",),
    ("--v-head-dim",),
    ("--num-experts", "--num-moe-experts"),
    ("--moe-router-topk",),
    ("--moe-ffn-hidden-size",),
    ("--moe-shared-expert-intermediate-size",),
    ("--tensor-model-parallel-size", "--tp"),
    ("--pipeline-model-parallel-size", "--pp"),
    ("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size", "--vp"),
    ("--num-layers-per-virtual-pipeline-stage",),
    ("--context-parallel-size", "--cp"),
    ("--expert-model-parallel-size", "--ep"),
    ("--expert-tensor-parallel-size", "--etp"),
    ("--microbatch-group-size-per-virtual-pipeline-stage", "--microbatch-group-size-per-vp-stage"),
    ("--decoder-first-pipeline-num-layers", "--num-layers-in-first-pipeline-stage"),
    ("--decoder-last-pipeline-num-layers", "--num-layers-in-last-pipeline-stage"),
    ("--micro-batch-size",),
    ("--global-batch-size",),
    OWN_FLAGS,
)
"""Whole numbers. The short ones are ours, and those of other launchers."""

_SWITCHES: tuple[tuple[str, ...], ...] = (
    ("--swiglu",),
    ("--quick-geglu",),
    ("--gated-linear-unit",),
    ("--disable-bias-linear",),
    ("--add-qkv-bias",),
    ("--group-query-attention",),
    ("--multi-latent-attention",),
    ("--qk-layernorm",),
    ("--untie-embeddings-and-output-weights",),
    ("--sequence-parallel",),
    ("--use-distributed-optimizer",),
    ("--overlap-moe-expert-parallel-comm",),
    ("--moe-shared-expert-overlap",),
    ("--moe-permute-fusion",),
    ("--moe-router-pre-softmax",),
    ("--moe-router-enable-expert-bias",),
    ("--moe-router-force-load-balancing",),
    ("--account-for-embedding-in-pipeline-split",),
    ("--account-for-loss-in-pipeline-split",),
    ("--rope-fusion", "--apply-rope-fusion"),
    ("--bf16",),
    ("--fp16",),
)
"""On where they are given, and off as `--no-...`."""

_OTHERS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("--rotary-percent",): {"type": number},
    ("--hidden-dropout",): {"type": number},
    ("--moe-aux-loss-coeff",): {"type": number, "nargs": "+"},
    ("--moe-router-load-balancing-type",): {"nargs": "+"},
    ("--moe-layer-freq",): {"type": layer_pattern},
    ("--window-attn-skip-freq",): {"type": layer_pattern},
    ("--window-size",): {"type": size_pair},
    ("--normalization",): {"type": one_of(("RMSNorm", "LayerNorm"))},
    ("--position-embedding-type",): {},
    ("--softmax-type",): {"type": one_of(("vanilla", "off-by-one", "learnable"))},
    ("--moe-router-score-function",): {"type": one_of(("softmax", "sigmoid"))},
    ("--moe-router-dtype",): {"type": one_of(("fp32", "fp64"))},
    ("--fp8-format",): {},
    ("--fp8-recipe",): {"type": one_of(FP8_RECIPES)},
    ("--pipeline-model-parallel-layout",): {},
}
"""Each with how argparse reads it."""

_PREFIXES_WITHOUT_EFFECT = (
    "--adam-",
    "--check",
    "--cuda-graph",
    "--data-",
    "--ddp-",
    "--dist",
    "--eval-",
    "--exit-",
    "--log-",
    "--lr",
    "--manual-gc",
    "--min-lr",
    "--offload-",
    "--recompute-",
    "--save",
    "--sgd-",
    "--tensorboard-",
    "--timing-",
    "--tokenizer-",
    "--train-",
    "--wandb-",
)
"""Of flags about learning rates, data, logs and checkpoints, and of offload and recompute, which the plan itself decides."""

_WITHOUT_EFFECT = frozenset(
    {
        "--activation-offload-fraction",
        "--attention-backend",
        "--attention-dropout",
        "--clip-grad",
        "--delta-offload-bytes-across-pp-ranks",
        "--enable-experimental",
        "--fine-grained-activation-offloading",
        "--init-method-std",
        "--load",
        "--min-offloaded-tensor-size",
        "--mock-data",
        "--moe-grouped-gemm",
        "--moe-per-layer-logging",
        "--moe-router-bias-update-rate",
        "--moe-router-group-topk",
        "--moe-router-num-groups",
        "--moe-router-topk-scaling-factor",
        "--moe-token-dispatcher-type",
        "--mscale",
        "--mscale-all-dim",
        "--mtp-loss-scaling-factor",
        "--no-mmap-bin-files",
        "--norm-epsilon",
        "--num-workers",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--rope-type",
        "--rotary-base",
        "--rotary-scaling-factor",
        "--rotary-seq-len-interpolation-factor",
        "--seed",
        "--split",
        "--transformer-impl",
        "--use-flash-attn",
        "--use-mcore-models",
        "--use-rope-scaling",
        "--weight-decay",
    }
)
"""Flags that change neither what is saved nor, to the planner, how long it takes."""


def build_model_parser(source: str) -> FlagParser:
    """Return a parser of the flags that a plan is made from. A flag that is absent leaves no value.

    Args:
        source: Where the flags come from, for errors.
    """
    parser = FlagParser(source=source)
    for flags in _NUMBERS:
        parser.add_argument(*flags, type=whole_number)
    for flags in _SWITCHES:
        parser.add_argument(*flags, action=argparse.BooleanOptionalAction)
    for flags, options in _OTHERS.items():
        parser.add_argument(*flags, **options)
    return parser


def list_unknown(words: Sequence[str]) -> list[str]:
    """Return the flags among `words` that nothing is known of, each once.

    Args:
        words: What the parser left: flags that it does not have, with their values.
    """
    flags = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    return [flag for flag in flags if flag not in _WITHOUT_EFFECT and not flag.startswith(_PREFIXES_WITHOUT_EFFECT)]
