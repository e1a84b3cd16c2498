"""Warns about flags that are missing or not modeled."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fgoffload.cuda_graphs import NO_GRAPHS
from fgoffload.integrations.megatron.flags.field_flags import FlagParser
from fgoffload.integrations.megatron.flags.model_flags import list_unknown
from fgoffload.integrations.megatron.flags.other_flags import find_effect
from fgoffload.integrations.megatron.flags.parallel_flags import MICROBATCHES_OF_A_CHUNK
from fgoffload.integrations.megatron.graphs.graph_checks import read_graphs
from fgoffload.planner.model.parallelism import Parallelism

logger = logging.getLogger(__name__)

_TOKENIZER_FLAGS = frozenset({"--tokenizer-type", "--tokenizer-model", "--vocab-file"})
_TOKENIZERS: Mapping[str, int] = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_LARGE_VOCAB_SIZE = 131072
"""Assumed vocabulary size of all other tokenizers. Most recent vocabularies have 128,000 to 202,000 tokens."""

_SCORE_SAVING_BACKENDS = ("unfused", "local")
"""Attention backends that save the attention scores for backward. Source: `AttnBackend` of megatron-core 0.16.1."""


def warn_of_flags(values: Mapping[str, Any], parallelism: Parallelism, source: str) -> None:
    """Warn about missing flags whose defaults are unusual, and about flags that the planner's formulas do not cover.

    The keys of `values` are flag names, with `_` for `-`. Absent flags have no entry.
    """
    for message in _list_warnings(values, parallelism):
        logger.warning("%s: %s", source, message)


def _list_warnings(values: Mapping[str, Any], parallelism: Parallelism) -> Iterator[str]:
    if "num_experts" in values and "moe_token_dispatcher_type" not in values:
        yield "without --moe-token-dispatcher-type, a plan assumes alltoall. Megatron's default, allgather, is not modeled."
    if "num_experts" in values and not values.get("moe_grouped_gemm"):
        yield (
            "without --moe-grouped-gemm, a plan still assumes the saved bytes of grouped experts, so memory may differ. It "
            "can recompute experts only as a whole. Measure a profile to get the actual bytes."
        )
    if (layers := values.get("transformer_impl", "transformer_engine")) != "transformer_engine":
        yield (
            f"--transformer-impl {layers} saves different tensors, but a plan assumes Transformer Engine's layers. Measure a "
            "profile to get the actual bytes."
        )
    if read_graphs(values).impl != NO_GRAPHS:
        yield "a plan does not count unused memory in CUDA graph pools, so a step reserves more memory than predicted."
    if (backend := values.get("attention_backend")) in _SCORE_SAVING_BACKENDS:
        yield (
            f"--attention-backend {backend} saves the attention scores, but a plan assumes fused attention, which saves "
            "none. Measure a profile to get the actual bytes."
        )
    if "global_batch_size" not in values and parallelism.pipeline_parallel_size > 1:
        chunks = parallelism.pipeline_parallel_size * parallelism.chunks
        sequences = MICROBATCHES_OF_A_CHUNK * chunks * parallelism.micro_batch_size * parallelism.data_parallel_size
        yield (
            "without --global-batch-size, a step has 1 microbatch, as in Megatron, which leaves pipeline ranks idle. Pass, for "
            f"example, --global-batch-size {sequences}."
        )


def find_vocab_size(flags: Sequence[str], source: str) -> int | None:
    """Guess the vocabulary size of the tokenizer in `flags` without loading it. Return None if no flag selects a tokenizer."""
    if not any(word in _TOKENIZER_FLAGS for word in flags):
        return None
    kind = flags[flags.index("--tokenizer-type") + 1] if "--tokenizer-type" in flags[:-1] else "GPT2BPETokenizer"
    size = _TOKENIZERS.get(kind, _LARGE_VOCAB_SIZE)
    logger.warning(
        "%s: without --vocab-size, a plan assumes %d tokens for %s. Pass --vocab-size if yours differs.", source, size, kind
    )
    return size


def warn_of_unparsed(words: Sequence[str], parser: FlagParser, source: str) -> None:
    """Warn about flags that `parser` did not parse: one warning per effect of unmodeled flags, and one for unknown flags."""
    effects: dict[str, list[str]] = {}
    unknown = []
    for flag in list_unknown(words):
        if (effect := find_effect(flag)) is not None:
            effects.setdefault(effect, []).append(flag)
        else:
            nearest = parser.find_nearest(flag)
            unknown.append(flag if nearest is None else f"{flag} ({nearest}?)")
    for effect, found in effects.items():
        logger.warning("%s: not modeled (%s): %s.", source, effect, " ".join(found))
    if unknown:
        logger.warning("%s: unknown flags, which a plan ignores: %s.", source, ", ".join(unknown))
