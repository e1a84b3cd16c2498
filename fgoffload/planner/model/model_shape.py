"""Shape of a whole model, before it is sharded over ranks.

Fields use Megatron's names where they exist. Llama 3 8B:

    >>> llama = ModelShape(
    ...     name="Llama 3 8B",
    ...     num_layers=32,
    ...     hidden_size=4096,
    ...     ffn_hidden_size=14336,
    ...     num_attention_heads=32,
    ...     num_query_groups=8,
    ...     kv_channels=128,
    ...     vocab_size=128256,
    ...     seq_length=8192,
    ... )
    >>> llama.get_kind(31)
    'dense'

`make_layer_shape` in `rank_layer.py` returns the shape of one layer on a rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_choice, check_count
from fgoffload.planner.model.layer_shape import FP8_RECIPES, ExpertsShape, Fp8Recipe

MOST_LAYERS = 1000
"""Maximum number of layers. The deepest models have a few hundred, and planning for the maximum takes less than a minute."""

FUSED_CHANNELS = 8
"""Fused attention kernels require a multiple of this many channels per head. Source: `get_attention_backend` of Transformer
Engine 2.20.2, which otherwise uses unfused attention."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention, with low-rank queries, keys and values."""

    q_lora_rank: int | None  # channels of the compressed query; None if the query is projected without compression
    kv_lora_rank: int  # channels of the compressed key and value
    qk_head_dim: int  # non-rotary channels of a query and key head
    qk_pos_emb_head_dim: int  # rotary channels of a query and key head
    v_head_dim: int  # channels of a value head

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            check_count(name, getattr(self, name), most=LARGEST_SIZE)
        if self.q_lora_rank is not None:
            check_count("q_lora_rank", self.q_lora_rank, most=LARGEST_SIZE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A GPT model: embedding, decoder layers, final norm, output layer, and layers of multi-token prediction."""

    name: str  # shown in tables
    num_layers: int  # decoder layers, not counting multi-token prediction
    hidden_size: int  # channels of the hidden states
    ffn_hidden_size: int = 0  # channels of a dense MLP after its activation; 0 if all layers have experts
    num_attention_heads: int  # query heads
    num_query_groups: int  # key and value heads; as many as query heads in latent attention
    kv_channels: int = 0
    """Channels of a query, key and value head; 0 in latent attention. `qk_channels` and `v_channels` cover both kinds."""
    vocab_size: int  # rows of the embedding, including Megatron's padding: see `pad_vocab_size`
    seq_length: int  # tokens of a sequence, over all context-parallel ranks
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"  # as in `--normalization`
    is_gated: bool = True
    """Whether MLPs and experts use a gated activation, as with `--swiglu`, which multiplies the two halves of its input."""
    has_fused_activation: bool = True  # whether one kernel computes a gated activation: not with `--no-bias-swiglu-fusion`
    has_quick_gate: bool = False
    """Whether `--quick-geglu` is set. Saved bytes are known only with fusion. Experts clamp their first linears' output
    before this gate, as in GPT-OSS."""
    has_tied_embeddings: bool = False
    """Whether embedding and output layer share weights: not with `--untie-embeddings-and-output-weights`."""
    has_linear_bias: bool = False  # whether all linear layers and the router have biases: not with `--disable-bias-linear`
    has_qkv_bias: bool = False  # whether the projection to query, key and value has a bias, as with `--add-qkv-bias`
    has_qk_norm: bool = False
    """Whether `--qk-layernorm` adds norms of query and key heads, or of the compressed tensors in latent attention."""
    has_attention_sinks: bool = False  # whether each head has a learned number in its softmax: `--softmax-type learnable`
    latent: LatentAttention | None = None  # multi-latent attention; None for grouped-query attention
    rotary_percent: float = 1.0
    """Rotary fraction of a head; 0 without rotary embeddings. Latent attention sets a number of channels instead."""
    has_fused_rotary: bool = True
    """Whether one kernel applies the rotary embedding (`--no-rope-fusion` disables it). Not supported with latent attention."""
    learned_positions: int = 0
    """Rows of a learned position embedding, as with `--position-embedding-type learned_absolute`; 0 without one."""
    experts: ExpertsShape | None = None
    """Experts of a layer, with parallel sizes of 1, because `Parallelism` has the real sizes. None in a dense model."""
    moe_layers: tuple[bool, ...] | None = None
    """Whether each decoder layer has experts: see `list_moe_layers`. None means all layers if `experts` is set."""
    mtp_num_layers: int = 0  # layers of multi-token prediction, each like the decoder's last, with a projection before it
    window_tokens: int | None = None
    """Earlier tokens that a query sees under sliding-window attention, as in `--window-size`. None means all earlier tokens."""
    window_layers: tuple[bool, ...] | None = None
    """Whether each decoder layer has the window. None means all layers if `window_tokens` is set."""
    has_hidden_dropout: bool = False  # whether `--hidden-dropout` is above 0, Megatron's default
    fp8_recipe: Fp8Recipe | None = None  # `--fp8-recipe`; None for linear layers in the dtype of activations
    activation_dtype_bytes: int = 2  # bytes per element of the hidden states: 2 for bf16 and fp16, 4 for fp32

    def __post_init__(self) -> None:
        check_num_layers(self.num_layers)
        for name in ("hidden_size", "num_attention_heads", "num_query_groups", "vocab_size", "seq_length"):
            check_count(name, getattr(self, name), most=LARGEST_SIZE)
        for name in ("ffn_hidden_size", "kv_channels", "learned_positions"):
            check_count(name, getattr(self, name), least=0, most=LARGEST_SIZE)
        if self.mtp_num_layers != 0:
            check_num_layers(self.mtp_num_layers, name="mtp_num_layers")
        self._check_choices()
        self._check_attention()
        self._check_layers()

    @property
    def qk_channels(self) -> int:
        """Channels of a query and key head."""
        return self.kv_channels if self.latent is None else self.latent.qk_head_dim + self.latent.qk_pos_emb_head_dim

    @property
    def v_channels(self) -> int:
        """Channels of a value head."""
        return self.kv_channels if self.latent is None else self.latent.v_head_dim

    @property
    def rotary_channels(self) -> int:
        """Channels of the model's rotary embedding; 0 in latent attention, which computes its own."""
        return int(self.kv_channels * self.rotary_percent) if self.latent is None else 0

    @property
    def numbers(self) -> range:
        """Numbers of all layers, as in plans: first the decoder's layers, then the layers of multi-token prediction."""
        return range(self.num_layers + self.mtp_num_layers)

    def get_kind(self, number: int) -> Literal["dense", "moe", "mtp"]:
        """Return the kind of layer `number`."""
        return "mtp" if number >= self.num_layers else "moe" if self.has_experts(number) else "dense"

    def has_experts(self, number: int) -> bool:
        """Return whether layer `number` has experts. Multi-token prediction has them if the last decoder layer does."""
        if self.experts is None:
            return False
        return self.moe_layers is None or self.moe_layers[min(number, self.num_layers - 1)]

    def has_window(self, number: int) -> bool:
        """Return whether layer `number` has sliding-window attention. Multi-token prediction sees all tokens."""
        if self.window_tokens is None or number >= self.num_layers:
            return False
        return self.window_layers is None or self.window_layers[number]

    def _check_choices(self) -> None:
        check_choice("normalization", self.normalization, ("RMSNorm", "LayerNorm"))
        check_choice("fp8_recipe", self.fp8_recipe, (None, *FP8_RECIPES))
        check_choice("activation_dtype_bytes", self.activation_dtype_bytes, (2, 4))
        if not 0 <= self.rotary_percent <= 1:
            raise ConfigError(f"rotary_percent {self.rotary_percent} must be a fraction of a head. Use a number from 0 to 1.")

    def _check_attention(self) -> None:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if heads % groups:
            raise ConfigError(
                f"num_query_groups {groups} does not divide num_attention_heads {heads}. Use a number of groups that does."
            )
        if self.latent is not None and groups != heads:
            raise ConfigError(
                f"num_query_groups {groups} differs from num_attention_heads {heads}, but latent attention has no groups. "
                f"Use num_query_groups {heads}."
            )
        if (self.latent is None) == (self.kv_channels == 0):
            raise ConfigError(
                f"kv_channels {self.kv_channels} {'without' if self.latent is None else 'with'} latent attention is not "
                "supported. Set either kv_channels above 0, or latent."
            )
        if self.window_tokens is not None:
            check_count("window_tokens", self.window_tokens, most=LARGEST_SIZE)

    def _check_layers(self) -> None:
        for name, needed in (("moe_layers", "experts"), ("window_layers", "window_tokens")):
            flags = getattr(self, name)
            if flags is None:
                continue
            if getattr(self, needed) is None:
                raise ConfigError(f"{name} without {needed} has no effect. Set {needed}, or remove {name}.")
            if len(flags) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(flags)} entries for num_layers {self.num_layers}. Use one entry per decoder layer."
                )
        for name in ("expert_parallel_size", "expert_tensor_parallel_size"):
            if self.experts is not None and getattr(self.experts, name) != 1:
                raise ConfigError(
                    f"experts.{name} {getattr(self.experts, name)} is not a property of the model. "
                    f"Use 1 here, and set {name} in Parallelism."
                )
        dense = [number for number in range(self.num_layers) if not self.has_experts(number)]
        if dense and not self.ffn_hidden_size:
            raise ConfigError(
                f"ffn_hidden_size is 0, but layer {dense[0]} has no experts. Set ffn_hidden_size, or add experts."
            )


def check_num_layers(num_layers: int, *, name: str = "num_layers") -> None:
    """Reject a number of layers that is invalid or above `MOST_LAYERS`."""
    check_count(name, num_layers, most=MOST_LAYERS)


def check_head_channels(model: ModelShape) -> None:
    """Reject head sizes that no fused attention kernel supports. The bytes that unfused attention saves are unknown."""
    sizes = {"kv_channels": model.kv_channels}
    if model.latent is not None:
        sizes = {"qk_head_dim + qk_pos_emb_head_dim": model.qk_channels, "v_head_dim": model.v_channels}
    for name, channels in sizes.items():
        if channels % FUSED_CHANNELS:
            raise ConfigError(
                f"{name} {channels} of {model.name} is not a multiple of {FUSED_CHANNELS}, which fused attention requires. "
                "Measure the model instead, with `fgoffload profile` and --profile FILE, or train with --offload-modules auto."
            )


def list_moe_layers(pattern: int | Sequence[int], *, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts, from the value of `--moe-layer-freq`.

    A number N puts experts in layers 0, N, 2N and so on. A list has 1 for experts and 0 for a dense MLP.
    """
    if isinstance(pattern, int):
        check_count("moe_layer_freq", pattern)
        return tuple(number % pattern == 0 for number in range(num_layers))
    return _read_flags("moe_layer_freq", pattern, num_layers)


def list_window_layers(pattern: int | Sequence[int], *, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has sliding-window attention, from the value of `--window-attn-skip-freq`.

    A number N means full attention in every N-th layer only. A list has 1 for a window and 0 for full attention.
    """
    if isinstance(pattern, int):
        check_count("window_attn_skip_freq", pattern)
        return tuple(number % pattern != 0 for number in range(1, num_layers + 1))
    return _read_flags("window_attn_skip_freq", pattern, num_layers)


def pad_vocab_size(vocab_size: int, *, divisible_by: int = 128, tensor_parallel_size: int = 1) -> int:
    """Return the rows of the embedding: the tokenizer's `vocab_size`, padded so that tensor-parallel ranks can shard it.

    `divisible_by` is `--make-vocab-size-divisible-by` and has Megatron-LM's default.
    """
    for name, count in (
        ("vocab_size", vocab_size),
        ("make_vocab_size_divisible_by", divisible_by),
        ("tensor_parallel_size", tensor_parallel_size),
    ):
        check_count(name, count, most=LARGEST_SIZE)
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def _read_flags(name: str, pattern: Sequence[int], num_layers: int) -> tuple[bool, ...]:
    if len(pattern) != num_layers or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"{name} has {len(pattern)} entries ({sum(one in (0, 1) for one in pattern)} of them 0 or 1) for num_layers "
            f"{num_layers}. Use one entry per layer, each 0 or 1."
        )
    return tuple(bool(one) for one in pattern)
