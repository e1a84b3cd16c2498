"""Arguments of a training run, with the checks that Megatron's own config lacks."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from fgoffload.config import OffloadConfig
from fgoffload.cuda_graphs import NO_GRAPHS, TRANSFORMER_ENGINE
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags.field_flags import to_flag
from fgoffload.integrations.megatron.flags.flag_sources import FlagSources
from fgoffload.integrations.megatron.flags.graph_flags import GRAPH_FIELDS
from fgoffload.integrations.megatron.flags.tag_checks import check_tags

_BYTE_VALUES = 256
"""Minimum vocabulary size, because each byte of the text is a token."""

_ROUTER_TOPK = 2
"""Default number of experts per token. Source: `TransformerConfig.moe_router_topk`, megatron-core 0.16.1."""

_GRAPH_WARMUP_STEPS = 3
"""Default number of eager steps. Source: `TransformerConfig.cuda_graph_warmup_steps`, megatron-core 0.16.1 to 0.19.2."""

_MAX_SEED = 2**32 - 1
"""NumPy's largest seed. Other generators accept larger seeds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArguments:
    """A training run, as described by Megatron's flags."""

    transformer: Mapping[str, Any]
    """Fields of Megatron's TransformerConfig that flags set. The other fields keep their defaults."""
    offload: OffloadConfig | None
    """Activation offload options, or None without offload."""
    source: FlagSources
    world_size: int
    seq_length: int
    """Tokens per sequence."""
    max_position_embeddings: int
    micro_batch_size: int
    """Sequences per microbatch."""
    global_batch_size: int
    """Sequences per step, over all microbatches and data-parallel ranks."""
    train_iters: int = 10
    lr: float = 1e-3
    seed: int = 1234
    """Seed for weight initialization, dropout and data order. Source: Megatron-LM's default."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_base: int = 10000
    """Base period of rotary embeddings."""
    rotary_percent: float = 1.0
    """Fraction of each attention head's channels that rotary embeddings rotate."""
    vocab_size: int = _BYTE_VALUES
    """Vocabulary size before padding."""
    make_vocab_size_divisible_by: int = 128
    """The padded vocabulary is a multiple of this number times the tensor-parallel size. Source: Megatron-LM's default."""
    untie_embeddings_and_output_weights: bool = False
    rampup_batch_size: list[int] | None = None
    """START, INCREMENT and SAMPLES: the global batch grows from START by INCREMENT until SAMPLES sequences are seen."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32, regardless of the parameters' dtype."""
    packed_sequences: bool = False
    """Pack several shorter sequences, which do not attend to each other, into one. Megatron-LM has no flag for this."""

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid settings that Megatron's own config does not detect."""
        checks = (self._check_sizes, self._check_ranges, self._check_layers, self._check_processes, self._check_batch)
        for check in checks:
            for fault in check():
                raise self.source.refuse(fault)
        if self.offload is not None:
            try:
                check_tags(self.offload, self.transformer)
            except ConfigError as error:
                raise self.source.refuse(str(error)) from error

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that share each layer."""
        return int(self.transformer.get("tensor_model_parallel_size", 1))

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of pipeline stages."""
        return int(self.transformer.get("pipeline_model_parallel_size", 1))

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Number of model chunks per stage under the interleaved schedule, or None without it."""
        return self.transformer.get("virtual_pipeline_model_parallel_size")

    @property
    def context_parallel_size(self) -> int:
        """Number of processes that share each sequence."""
        return int(self.transformer.get("context_parallel_size", 1))

    @property
    def expert_parallel_size(self) -> int:
        """Number of processes that share the experts of a layer."""
        return int(self.transformer.get("expert_model_parallel_size", 1))

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Number of processes that share each expert. The default is the tensor-parallel size."""
        return int(self.transformer.get("expert_tensor_parallel_size") or self.tensor_parallel_size)

    @property
    def data_parallel_size(self) -> int:
        """Number of copies of the model."""
        return self.world_size // count_processes(self.transformer)[0]

    @property
    def uses_transformer_engine(self) -> bool:
        """Whether the model uses Transformer Engine's layers."""
        return bool(self.transformer.get("transformer_impl", "local") == TRANSFORMER_ENGINE)

    @property
    def cuda_graph_impl(self) -> str:
        """Implementation that captures CUDA graphs, one of `GRAPH_IMPLS`."""
        return str(self.transformer.get("cuda_graph_impl", NO_GRAPHS))

    @property
    def captures_graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        return self.cuda_graph_impl != NO_GRAPHS

    @property
    def steps_until_replay(self) -> int:
        """Number of eager steps and capture steps before every step replays graphs. 0 without graphs."""
        return self.cuda_graph_warmup_steps + 1 if self.captures_graphs else 0

    @property
    def cuda_graph_warmup_steps(self) -> int:
        """Number of eager steps before graphs are captured."""
        return int(self.transformer.get("cuda_graph_warmup_steps", _GRAPH_WARMUP_STEPS))

    @property
    def uses_te_rng_tracker(self) -> bool:
        """Whether Transformer Engine tracks the random states. Required if it captures graphs or graphs contain its layers."""
        has_te_graphs = self.cuda_graph_impl == TRANSFORMER_ENGINE or (self.captures_graphs and self.uses_transformer_engine)
        return has_te_graphs or bool(self.transformer.get("use_te_rng_tracker", False))

    @property
    def has_variable_lengths(self) -> bool:
        """Whether each microbatch has its own sequence length, from half of `seq_length` up to `seq_length`."""
        return bool(self.transformer.get("variable_seq_lengths", False))

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per rank and step, after the batch-size ramp-up."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary size after padding."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def sequence_shares(self) -> int:
        """Number of parts into which sequence- and context-parallel ranks split a sequence. It must divide `seq_length`."""
        shares = self.tensor_parallel_size if self.transformer.get("sequence_parallel") else 1
        return shares * (2 * self.context_parallel_size if self.context_parallel_size > 1 else 1)

    def count_microbatches(self, consumed_samples: int) -> int:
        """Return the number of microbatches per rank in the step after `consumed_samples` sequences, including any ramp-up.

        Source: `RampupBatchsizeNumMicroBatchesCalculator` of megatron-core 0.16.1.
        """
        batch_size = self.global_batch_size
        if self.rampup_batch_size is not None:
            start, increment, samples = self.rampup_batch_size
            increments = (batch_size - start) // increment
            batch_size = min(batch_size, start + increment * (consumed_samples * increments // samples))
        return batch_size // (self.micro_batch_size * self.data_parallel_size)

    def without_graphs(self) -> "TrainingArguments":
        """Return the arguments of the same run without CUDA graphs."""
        fields = {name: value for name, value in self.transformer.items() if name not in GRAPH_FIELDS}
        return dataclasses.replace(self, transformer=MappingProxyType(fields))

    # Each check yields error messages. `__post_init__` raises the first one.

    def _check_sizes(self) -> Iterator[str]:
        training = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "vocab_size")
        sizes = {name: getattr(self, name) for name in (*training, "make_vocab_size_divisible_by", "rotary_base")}
        sizes |= {name: self.transformer.get(name, 0) for name in ("num_layers", "hidden_size", "num_attention_heads")}
        others = ("kv_channels", "num_query_groups", "num_moe_experts", "moe_router_topk", "moe_layer_freq")
        sizes |= {name: size for name, size in self.transformer.items() if name.endswith("_size") or name in others}
        for name, size in (*sizes.items(), ("world_size", self.world_size)):
            if isinstance(size, int) and size < 1:
                yield f"{_name_flag(name)} {size} is below 1. Use 1 or more."

    def _check_ranges(self) -> Iterator[str]:
        if not (math.isfinite(self.lr) and self.lr >= 0):
            yield f"--lr {self.lr} is not a valid learning rate. Use a finite number that is at least 0, for example 1e-3."
        if not 0 <= self.seed <= _MAX_SEED:
            yield f"--seed {self.seed} is not between 0 and {_MAX_SEED}. Use a seed in that range, for example 1234."
        if not 0 < self.rotary_percent <= 1:
            yield f"--rotary-percent {self.rotary_percent} is not a valid fraction. Use a number above 0 and at most 1."
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= self.transformer.get(name, 0) <= 1:
                yield f"{to_flag(name)} {self.transformer[name]} is not between 0 and 1. Use a probability, for example 0.1."
        if self.padded_vocab_size < _BYTE_VALUES:
            yield (
                f"--vocab-size {self.vocab_size}, padded to {self.padded_vocab_size} by --make-vocab-size-divisible-by "
                f"{self.make_vocab_size_divisible_by}, is below {_BYTE_VALUES}, but each byte of the text is a token. "
                f"Use --vocab-size {_BYTE_VALUES}."
            )

    def _check_layers(self) -> Iterator[str]:
        heads, hidden = self.transformer["num_attention_heads"], self.transformer["hidden_size"]
        groups = self.transformer.get("num_query_groups")
        if groups is not None and heads % groups:
            yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}. Use a divisor of {heads}."
        channels = self.transformer.get("kv_channels") or hidden // heads
        is_rotary = self.position_embedding_type == "rope" and not self.transformer.get("multi_latent_attention")
        if channels < 1 or (is_rotary and channels % 2):
            yield (
                f"--kv-channels {channels} (default: --hidden-size / --num-attention-heads) must be above 0 and, with "
                f"--position-embedding-type rope, even. Use --kv-channels {channels + 1}."
            )
        experts = self.transformer.get("num_moe_experts")
        topk = self.transformer.get("moe_router_topk", _ROUTER_TOPK)
        if experts is not None and topk > experts:
            default = "" if "moe_router_topk" in self.transformer else " (the default)"
            yield (
                f"--moe-router-topk {topk}{default} is above --num-experts {experts}. "
                f"Use --moe-router-topk {experts} or less, or more experts."
            )

    def _check_processes(self) -> Iterator[str]:
        model, experts = count_processes(self.transformer)
        for subject, size, factors in (
            ("one copy of the model needs", model, "tensor x pipeline x context"),
            ("the experts of a model need", experts, "expert-tensor x expert x pipeline"),
        ):
            if self.world_size % size:
                needed = math.lcm(model, experts)
                yield (
                    f"{subject} {size} processes ({factors} parallel sizes), but this run has {self.world_size}. "
                    f"Start a multiple of {needed} processes with torchrun --nproc-per-node {needed} -m fgoffload train, "
                    "or plan without GPUs with fgoffload plan."
                )

    def _check_batch(self) -> Iterator[str]:
        one_microbatch = self.micro_batch_size * self.data_parallel_size
        one = f"--micro-batch-size {self.micro_batch_size} x data-parallel size {self.data_parallel_size} = {one_microbatch}"
        if self.global_batch_size % one_microbatch:
            yield (
                f"--global-batch-size {self.global_batch_size} is not a multiple of {one}. "
                f"Use {max(1, self.global_batch_size // one_microbatch) * one_microbatch}."
            )
        if self.packed_sequences and self.micro_batch_size > 1:
            yield (
                f"--micro-batch-size {self.micro_batch_size} and --packed-sequences are mutually exclusive: a packed "
                "microbatch is one long sequence. Use --micro-batch-size 1."
            )
        if self.seq_length > self.max_position_embeddings:
            yield (
                f"--seq-length {self.seq_length} is above --max-position-embeddings "
                f"{self.max_position_embeddings}. Use --max-position-embeddings {self.seq_length} or more."
            )
        shares = self.sequence_shares
        if self.seq_length % shares:
            yield (
                f"--seq-length {self.seq_length} is not a multiple of {shares}, the number of parts into which "
                f"--sequence-parallel and --context-parallel-size {self.context_parallel_size} split a sequence. "
                f"Use {max(1, self.seq_length // shares) * shares}."
            )
        if self.rampup_batch_size is None:
            return
        start, increment, samples = (*self.rampup_batch_size, 0, 0, 0)[:3]
        batch_sizes = range(start, self.global_batch_size + 1, max(1, increment))
        multiples = start % one_microbatch == increment % one_microbatch == 0
        is_three = len(self.rampup_batch_size) == 3 and min(start, increment, samples) > 0
        given = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if not is_three:
            yield f"{given} is not three positive numbers. Use START, INCREMENT and SAMPLES."
        elif not multiples:
            yield f"{given}: START or INCREMENT is not a multiple of {one}. Use multiples of it."
        elif self.global_batch_size not in batch_sizes[1:]:
            yield (
                f"{given} never reaches --global-batch-size {self.global_batch_size}. Choose a START below it, and an "
                "INCREMENT that divides the difference."
            )


def count_processes(transformer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of processes that one copy of the model needs, and the number that its experts need."""
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    tensor, pipeline, context, expert = (max(1, int(transformer.get(f"{name}_parallel_size", 1))) for name in names)
    expert_tensor = int(transformer.get("expert_tensor_parallel_size") or tensor)
    return tensor * pipeline * context, max(1, expert_tensor) * expert * pipeline


def _name_flag(name: str) -> str:
    # Megatron-LM's name, which users type.
    return "--num-experts" if name == "num_moe_experts" else to_flag(name)
