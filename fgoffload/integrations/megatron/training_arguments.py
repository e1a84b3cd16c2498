"""A training as Megatron's flags describe it, checked for what Megatron's own config does not check."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from fgoffload.config import OffloadConfig
from fgoffload.errors import ConfigError
from fgoffload.integrations.megatron.flags import to_flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArguments:
    """A training, as Megatron's flags describe it."""

    transformer: Mapping[str, Any]
    """Fields of Megatron's TransformerConfig that were given; the rest keep their defaults."""
    offload: OffloadConfig | None
    """Fine-grained activation offload, or None where it is off."""
    source: str
    """Where the flags came from, for errors."""
    world_size: int
    """Processes of the training."""
    seq_length: int
    """Tokens of a sequence."""
    max_position_embeddings: int
    """Positions that the model can tell apart."""
    micro_batch_size: int
    """Sequences of a microbatch."""
    global_batch_size: int
    """Sequences of a step, over all microbatches and data-parallel ranks."""
    train_iters: int = 10
    """Steps."""
    lr: float = 1e-3
    """Learning rate."""
    seed: int = 1234
    """Of weights, dropout and the order of the data. Source: Megatron-LM's default."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: int = 10000
    """Base period of rotary embeddings."""
    rotary_percent: float = 1.0
    """The part of a head that rotary embeddings turn."""
    vocab_size: int = 256
    """Tokens of the vocabulary, before padding. 256 is one for each byte."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size. Source: Megatron-LM's default."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""

    def __post_init__(self) -> None:
        """Check what Megatron's own config does not.

        Raises:
            ConfigError: With the flag, the value, the limit and the fix.
        """
        self._check_sizes()
        self._check_layer_pattern()
        if self.world_size % self.model_parallel_size:
            raise ConfigError(
                f"{self.source}: one copy of the model takes {self.model_parallel_size} processes (tensor x pipeline x context "
                f"parallel sizes), and there are {self.world_size}. Start a multiple of {self.model_parallel_size}."
            )
        one_microbatch = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % one_microbatch:
            raise ConfigError(
                f"{self.source}: --global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size "
                f"{self.micro_batch_size} x data-parallel size {self.data_parallel_size} = {one_microbatch}. "
                f"Give {max(1, self.global_batch_size // one_microbatch) * one_microbatch}."
            )
        if self.seq_length > self.max_position_embeddings:
            raise ConfigError(
                f"{self.source}: --seq-length {self.seq_length} is above --max-position-embeddings "
                f"{self.max_position_embeddings}. Give --max-position-embeddings {self.seq_length} or more."
            )
        if self.offload is not None and self.transformer.get("recompute_granularity") == "selective":
            self.offload.check_recompute(self.transformer.get("recompute_modules") or ("core_attn",))

    @property
    def tensor_parallel_size(self) -> int:
        """Processes that share each layer."""
        return int(self.transformer.get("tensor_model_parallel_size", 1))

    @property
    def pipeline_parallel_size(self) -> int:
        """Pipeline stages."""
        return int(self.transformer.get("pipeline_model_parallel_size", 1))

    @property
    def virtual_pipeline_size(self) -> int | None:
        """Model chunks of each stage under the interleaved schedule, or None without it."""
        return self.transformer.get("virtual_pipeline_model_parallel_size")

    @property
    def model_parallel_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * int(self.transformer.get("context_parallel_size", 1))

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return self.world_size // self.model_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Microbatches that a rank runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def padded_vocab_size(self) -> int:
        """Tokens of the vocabulary with padding, as the embedding has them."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    def _check_sizes(self) -> None:
        required = ("num_layers", "hidden_size", "num_attention_heads")
        training = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "vocab_size")
        optional = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "moe_layer_freq",
        )
        sizes = {name: getattr(self, name) for name in (*training, "make_vocab_size_divisible_by")}
        sizes |= {name: self.transformer.get(name, 0) for name in required}
        sizes |= {name: self.transformer[name] for name in optional if name in self.transformer}
        for name, size in (*sizes.items(), ("world_size", self.world_size)):
            if isinstance(size, int) and size < 1:
                raise ConfigError(f"{self.source}: {to_flag(name)} {size} is below 1. Give 1 or more.")

    def _check_layer_pattern(self) -> None:
        pattern, layers = self.transformer.get("moe_layer_freq"), self.transformer["num_layers"]
        if isinstance(pattern, list) and (len(pattern) != layers or not set(pattern) <= {0, 1}):
            raise ConfigError(
                f"{self.source}: --moe-layer-freq {pattern} has {len(pattern)} entries for --num-layers {layers}. "
                "Give one entry a layer: 1 for experts, 0 for dense."
            )
