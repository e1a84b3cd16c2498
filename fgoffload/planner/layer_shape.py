"""One transformer layer as a rank runs it: the sizes that say how many bytes it saves for backward.

Fields carry Megatron's names. A layer is dense or has experts, and its attention has groups of queries or is latent:

    attention = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "qk_channels": 128, "v_channels": 128}
    dense = LayerShape(micro_batch_size=1, seq_length=4096, ffn_hidden_size=14336, **attention)
    mixture = LayerShape(
        micro_batch_size=1,
        seq_length=4096,
        experts=ExpertsShape(num_experts=8, topk=2, ffn_hidden_size=14336),
        **attention,
    )
"""

import dataclasses
from typing import Literal

from fgoffload.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """The low ranks of multi-latent attention."""

    q_lora_rank: int | None
    """Channels of the compressed query; None where the query is projected in one go."""
    kv_lora_rank: int
    """Channels of the compressed key and value."""
    qk_pos_emb_head_dim: int
    """The channels of a query and key head that rotary embeddings turn."""
    has_qk_norm: bool = False
    """With `--qk-layernorm`: norms of the compressed query and key-value, fused into the linears that widen them."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        _check_sizes(self, "kv_lora_rank", "qk_pos_emb_head_dim")
        if self.q_lora_rank is not None:
            _check_sizes(self, "q_lora_rank")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """How tokens find their experts. The defaults are Megatron's: softmax over the scores of the experts that were chosen."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """As in `--moe-router-score-function`, without `--moe-router-pre-softmax`."""
    has_expert_bias: bool = False
    """With `--moe-router-enable-expert-bias`, for sigmoid alone: a bias takes part in the choice of experts."""
    balancing: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """The loss that balances experts: over the microbatch or over each sequence. None where its coefficient is 0."""
    dtype_bytes: int = 2
    """Of an element in `--moe-router-dtype`: 4 for fp32, else 2, that of the activations."""

    def __post_init__(self) -> None:
        """Refuse what Megatron's router does not have."""
        _check_choice(self, "score_function", ("softmax", "sigmoid"))
        _check_choice(self, "balancing", ("none", "aux_loss", "seq_aux_loss"))
        _check_choice(self, "dtype_bytes", (2, 4))
        if self.has_expert_bias and self.score_function != "sigmoid":
            raise ConfigError(
                f"has_expert_bias goes with score_function 'sigmoid' alone, and it is {self.score_function!r}. "
                "Leave the bias out, or give sigmoid."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts behind the all-to-all dispatcher, each on one rank as a whole: expert tensor parallel size 1."""

    num_experts: int
    """In the whole layer, over all ranks."""
    topk: int
    """Experts of a token."""
    ffn_hidden_size: int
    """Channels of an expert, behind its gated activation."""
    shared_ffn_hidden_size: int = 0
    """Channels of all shared experts together; 0 without any."""
    has_shared_overlap: bool = False
    """With `--moe-shared-expert-overlap`: the shared experts gather their input themselves, and keep it gathered."""
    expert_parallel_size: int = 1
    """Ranks that the experts are spread over."""
    has_fused_permutation: bool = False
    """With `--moe-permute-fusion`."""
    router: RouterShape = dataclasses.field(default_factory=RouterShape)
    """How tokens find their experts."""

    def __post_init__(self) -> None:
        """Refuse sizes that no layer has."""
        _check_sizes(self, "num_experts", "topk", "ffn_hidden_size", "expert_parallel_size")
        _check_sizes(self, "shared_ffn_hidden_size", least=0)
        _check_divides(self, "expert_parallel_size", "num_experts")
        if self.topk > self.num_experts:
            raise ConfigError(f"topk {self.topk} is above num_experts {self.num_experts}. Give {self.num_experts} or less.")
        if self.has_shared_overlap and not self.shared_ffn_hidden_size:
            raise ConfigError(
                "has_shared_overlap is on and shared_ffn_hidden_size is 0: nothing overlaps. Give the shared experts' channels."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer and microbatch, with sequence parallelism wherever the tensor parallel size is above 1."""

    micro_batch_size: int
    """Sequences of a microbatch."""
    seq_length: int
    """Tokens of a sequence on one context-parallel rank."""
    hidden_size: int
    """Channels between layers."""
    num_attention_heads: int
    """Query heads over all tensor-parallel ranks."""
    num_query_groups: int
    """Key and value heads over all tensor-parallel ranks; as many as query heads in latent attention."""
    qk_channels: int
    """Of a query and key head: `kv_channels`, or `qk_head_dim` + `qk_pos_emb_head_dim` of latent attention."""
    v_channels: int
    """Of a value head: `kv_channels`, or `v_head_dim` of latent attention."""
    ffn_hidden_size: int = 0
    """Channels of a dense MLP behind its gated activation; 0 in a layer with experts."""
    experts: ExpertsShape | None = None
    """The experts, or None in a dense layer."""
    latent: LatentShape | None = None
    """Multi-latent attention, or None where queries come in groups."""
    tensor_parallel_size: int = 1
    """Ranks that share the layer."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """As in `--normalization`."""
    has_fused_norms: bool = True
    """Norms are fused into the one linear behind them, where there is one: attention in groups and dense MLPs."""
    rotary_channels: int = 0
    """Of the rotary embedding that the model gives to all layers; 0 without one. Latent attention makes its own."""
    is_deterministic: bool = False
    """Torch chooses deterministic algorithms, and Megatron other operators for it."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: A size is too small or cannot be shared among the ranks, or the layer is neither dense nor a mixture.
        """
        sizes = ("micro_batch_size", "seq_length", "hidden_size", "num_attention_heads", "num_query_groups")
        _check_sizes(self, *sizes, "qk_channels", "v_channels", "tensor_parallel_size")
        _check_sizes(self, "ffn_hidden_size", "rotary_channels", least=0)
        _check_choice(self, "normalization", ("RMSNorm", "LayerNorm"))
        _check_divides(self, "num_query_groups", "num_attention_heads")
        _check_divides(self, "tensor_parallel_size", "seq_length", "num_query_groups", "ffn_hidden_size")
        if (self.experts is None) == (self.ffn_hidden_size == 0):
            raise ConfigError(
                f"ffn_hidden_size {self.ffn_hidden_size} {'without' if self.experts is None else 'with'} experts: a layer is "
                "dense or a mixture. Give ffn_hidden_size above 0, or experts."
            )
        if self.latent is not None and self.num_query_groups != self.num_attention_heads:
            raise ConfigError(
                f"num_query_groups {self.num_query_groups} differs from num_attention_heads {self.num_attention_heads}, and "
                f"latent attention has no groups. Give num_query_groups {self.num_attention_heads}."
            )
        if self.experts is not None and self.experts.shared_ffn_hidden_size % self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not divide shared_ffn_hidden_size "
                f"{self.experts.shared_ffn_hidden_size}. Give sizes that ranks can share."
            )

    @property
    def tokens(self) -> int:
        """Of the part of the microbatch that sequence parallelism leaves to this rank: `[s / t, b]`."""
        return self.seq_length // self.tensor_parallel_size * self.micro_batch_size


_Shape = LatentShape | RouterShape | ExpertsShape | LayerShape


def _check_sizes(shape: _Shape, *names: str, least: int = 1) -> None:
    for name in names:
        size = getattr(shape, name)
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"{name} {size!r} is no whole number. Give an int.")
        if size < least:
            raise ConfigError(f"{name} {size} is below {least}. Give {least} or more.")


def _check_choice(shape: _Shape, name: str, choices: tuple[str | int, ...]) -> None:
    value = getattr(shape, name)
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not known. Give one of: {', '.join(map(repr, choices))}.")


def _check_divides(shape: _Shape, divisor: str, *names: str) -> None:
    for name in names:
        if getattr(shape, name) % getattr(shape, divisor):
            raise ConfigError(
                f"{divisor} {getattr(shape, divisor)} does not divide {name} {getattr(shape, name)}. "
                "Give sizes that ranks and heads can share."
            )
