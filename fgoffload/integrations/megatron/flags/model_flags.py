"""Parses the Megatron flags that a plan depends on, without Megatron-Core or torch.

Each flag has Megatron-LM's spelling and, if different, a second spelling from the Megatron-Core field.
`tests/unit/megatron/test_model_shapes.py` compares these tables with Megatron-LM's parser.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fgoffload.integrations.megatron.flags.assumption_flags import DTYPE_BYTES, SHARDING_STRATEGIES
from fgoffload.integrations.megatron.flags.field_flags import (
    FlagParser,
    layer_pattern,
    number,
    one_of,
    size_pair,
    to_flag,
    whole_number,
)
from fgoffload.integrations.megatron.flags.graph_flags import add_graph_flags
from fgoffload.integrations.megatron.flags.other_flags import WITHOUT_EFFECT, has_no_effect
from fgoffload.planner.model.layer_shape import DISPATCHERS, FP8_RECIPES

_NUMBERS = """
num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels
vocab-size padded-vocab-size make-vocab-size-divisible-by seq-length max-position-embeddings mtp-num-layers
q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
num-experts,num-moe-experts moe-router-topk moe-ffn-hidden-size moe-router-group-topk moe-router-num-groups
moe-shared-expert-intermediate-size
tensor-model-parallel-size,tp pipeline-model-parallel-size,pp context-parallel-size,cp
expert-model-parallel-size,ep expert-tensor-parallel-size,etp
num-virtual-stages-per-pipeline-rank,virtual-pipeline-model-parallel-size,vp num-layers-per-virtual-pipeline-stage
microbatch-group-size-per-virtual-pipeline-stage,microbatch-group-size-per-vp-stage
decoder-first-pipeline-num-layers,num-layers-in-first-pipeline-stage
decoder-last-pipeline-num-layers,num-layers-in-last-pipeline-stage
micro-batch-size global-batch-size min-offloaded-tensor-size
num-gpus
"""
"""Flags with integer values. Commas separate the spellings of a flag. Megatron lacks the short spellings and `--num-gpus`."""

_SWITCHES = """
bf16 fp16 swiglu quick-geglu gated-linear-unit bias-swiglu-fusion,bias-activation-fusion disable-bias-linear add-qkv-bias
group-query-attention multi-latent-attention qk-layernorm untie-embeddings-and-output-weights
use-rotary-position-embeddings rope-fusion,apply-rope-fusion
sequence-parallel account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
overlap-moe-expert-parallel-comm moe-shared-expert-overlap moe-grouped-gemm moe-permute-fusion
moe-router-pre-softmax moe-router-enable-expert-bias moe-router-force-load-balancing moe-pad-expert-input-to-capacity
use-distributed-optimizer use-precision-aware-optimizer optimizer-cpu-offload use-megatron-fsdp use-torch-fsdp2
grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 gradient-accumulation-fusion bias-dropout-fusion
fp8-param-gather,fp8-param
"""
"""Boolean flags, each with a `--no-...` form."""

_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "moe-aux-loss-coeff": {"type": number, "nargs": "+"},
    "moe-router-load-balancing-type": {"nargs": "+"},
    "moe-layer-freq": {"type": layer_pattern},
    "window-attn-skip-freq": {"type": layer_pattern},
    "window-size": {"type": size_pair},
    "normalization": {"type": one_of(("RMSNorm", "LayerNorm"))},
    "position-embedding-type": {"type": one_of(("learned_absolute", "rope", "mrope", "yarn", "none"))},
    "softmax-type": {"type": one_of(("vanilla", "off-by-one", "learnable"))},
    "moe-router-score-function": {"type": one_of(("softmax", "sigmoid"))},
    "moe-router-dtype": {"type": one_of(("fp32", "fp64"))},
    "fp8-format": {"type": one_of(("e4m3", "hybrid"))},
    "fp8-recipe": {"type": one_of(FP8_RECIPES)},
    "moe-token-dispatcher-type": {"type": one_of(("alltoall", "allgather", "flex"))},
    "moe-flex-dispatcher-backend": {"type": one_of(DISPATCHERS[1:])},
    "attention-backend": {"type": one_of(("flash", "fused", "unfused", "local", "auto"))},
    "transformer-impl": {"type": one_of(("local", "transformer_engine", "inference_optimized"))},
    "data-parallel-sharding-strategy": {"type": one_of(SHARDING_STRATEGIES)},
    "main-grads-dtype": {"type": one_of(("fp32", "bf16"))},
    "main-params-dtype": {"type": one_of(("fp32", "fp16"))},
    "exp-avg-dtype": {"type": one_of(DTYPE_BYTES)},
    "exp-avg-sq-dtype": {"type": one_of(DTYPE_BYTES)},
}
"""Keyword arguments of `add_argument` for flags that are in none of the other tables."""

_REALS = """
rotary-percent hidden-dropout moe-expert-capacity-factor moe-expert-rank-capacity-factor optimizer-offload-fraction
"""
"""Flags with float values."""

_TEXTS = "pipeline-model-parallel-layout optimizer offload-window offload-prefetch"
"""Flags whose values this parser leaves as text, for other code to parse."""


def build_model_parser(source: str, *, own_flags: Collection[str] = ()) -> FlagParser:
    """Return a parser for the flags that a plan depends on. Absent flags set no value.

    Errors begin with `source` (see `add_source`). Typo suggestions include `own_flags`, which other code parses.
    """
    parser = FlagParser(source=source, known_elsewhere=(*WITHOUT_EFFECT, *own_flags))
    shared: dict[str, dict[str, Any]] = {
        _NUMBERS: {"type": whole_number},
        _SWITCHES: {"action": argparse.BooleanOptionalAction},
        _REALS: {"type": number},
        _TEXTS: {},
    }
    for table, keywords in shared.items():
        for spellings in table.split():
            parser.add_argument(*map(to_flag, spellings.split(",")), **keywords)
    for name, options in _OTHERS.items():
        parser.add_argument(to_flag(name), **options)
    add_graph_flags(parser)
    return parser


def drop_unset(flags: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return `flags` without those whose value contains an unset variable and that `typed` overrides."""
    given, kept = build_model_parser("").find_given(typed), list(flags)
    for place in reversed(range(len(kept) - 1)):
        if kept[place] in given and "$" in kept[place + 1]:
            del kept[place : place + 2]
    return kept


def list_unknown(words: Sequence[str]) -> list[str]:
    """Return the flags in `words`, which no parser recognized, except flags that cannot change a plan."""
    flags = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    return [flag for flag in flags if not has_no_effect(flag)]
