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
import math
from typing import Literal

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_count

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""As in `--fp8-recipe`."""

FP8_RECIPES: tuple[Fp8Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
"""Those that are known here."""

Dispatcher = Literal["alltoall", "deepep", "hybridep"]
DISPATCHERS: tuple[Dispatcher, ...] = ("alltoall", "deepep", "hybridep")
"""Token dispatchers: `--moe-token-dispatcher-type alltoall`, or flex with one of the others as its backend."""

DEFAULT_IMBALANCE = 1.2
"""`ExpertsShape.imbalance` where nobody measured it.

With biases that follow the load, the fullest expert is 4% above the mean over a whole validation set. One microbatch sways
more, and while a router learns, more still; a rank with several experts sways less than each of them. A fifth is room for that.
It was not measured here: a plan for a model whose experts drift apart needs its own figure.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (2024), MaxVio over the validation set.
"""


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
    """With `--qk-layernorm`: norms of the compressed query and key-value, fused into the linears that widen them. A query
    that is not compressed has one too, of the hidden states."""

    def __post_init__(self) -> None:
        """Refuse sizes below 1."""
        _check_sizes(self, "kv_lora_rank", "qk_pos_emb_head_dim")
        if self.q_lora_rank is not None:
            _check_sizes(self, "q_lora_rank")

    @property
    def has_whole_query_norm(self) -> bool:
        """Whether the linear that projects the query in one go norms the hidden states once more.

        Source: `QKNormConfigResolver` of megatron-core 0.19.2. Releases before 0.19 have no such norm.
        """
        return self.has_qk_norm and self.q_lora_rank is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """How tokens find their experts. The defaults are Megatron's: softmax over the scores of the experts that were chosen."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """As in `--moe-router-score-function`."""
    has_pre_softmax: bool = False
    """With `--moe-router-pre-softmax`, for softmax alone: over the scores of all experts, before some are chosen."""
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
        if self.has_pre_softmax and self.score_function != "softmax":
            raise ConfigError(
                f"has_pre_softmax goes with score_function 'softmax' alone, and it is {self.score_function!r}. "
                "Leave --moe-router-pre-softmax out, or give softmax."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts behind the all-to-all dispatcher."""

    num_experts: int
    """In the whole layer, over all ranks."""
    topk: int
    """Experts of a token."""
    ffn_hidden_size: int
    """Channels of an expert, behind its activation."""
    shared_ffn_hidden_size: int = 0
    """Channels of all shared experts together; 0 without any."""
    has_shared_overlap: bool = False
    """With `--moe-shared-expert-overlap`: the shared experts gather their input themselves, and keep it gathered."""
    expert_parallel_size: int = 1
    """Ranks that the experts are spread over."""
    expert_tensor_parallel_size: int = 1
    """Ranks that share each expert; they gather one another's tokens."""
    imbalance: float = 1.0
    """Rows of the expert-parallel rank with the most, over the mean of all ranks: 1 where routing is balanced, for which the
    formulas are exact. `DEFAULT_IMBALANCE` is for plans. It changes nothing where one rank has all experts."""
    has_fused_permutation: bool = False
    """With `--moe-permute-fusion`."""
    dispatcher: Dispatcher = "alltoall"
    """The token dispatcher. All but `alltoall` send a token once to each node that it goes to, and not once for each expert."""
    limited_groups: tuple[int, int] | None = None
    """Of how many groups of experts a token's come from, and of how many there are: `--moe-router-group-topk` of
    `--moe-router-num-groups`. None without limit."""
    router: RouterShape = dataclasses.field(default_factory=RouterShape)
    """How tokens find their experts."""

    def __post_init__(self) -> None:
        """Refuse sizes that no layer has."""
        _check_sizes(self, "num_experts", "topk", "ffn_hidden_size", "expert_parallel_size", "expert_tensor_parallel_size")
        _check_sizes(self, "shared_ffn_hidden_size", least=0)
        _check_divides(self, "expert_parallel_size", "num_experts")
        _check_choice(self, "dispatcher", DISPATCHERS)
        _check_divides(self, "expert_tensor_parallel_size", "ffn_hidden_size")
        if not 1 <= self.imbalance < math.inf:
            raise ConfigError(
                f"imbalance {self.imbalance} is not from 1 up and finite, and no mean is above the most. "
                f"Give 1 for balanced routing, or more, like {DEFAULT_IMBALANCE}."
            )
        if self.topk > self.num_experts:
            raise ConfigError(f"topk {self.topk} is above num_experts {self.num_experts}. Give {self.num_experts} or less.")
        if self.has_shared_overlap and not self.shared_ffn_hidden_size:
            raise ConfigError(
                "has_shared_overlap is on and shared_ffn_hidden_size is 0: nothing overlaps. Give the shared experts' channels."
            )

    @property
    def local_experts(self) -> int:
        """Of one rank."""
        return self.num_experts // self.expert_parallel_size

    def count_rows(self, tokens: int) -> int:
        """Return the rows that a rank's experts get, one for each token and expert that it goes to, before any padding.

        Args:
            tokens: Of each rank, before they are routed.
        """
        sources = self.expert_parallel_size * self.expert_tensor_parallel_size
        # However routing goes, a token sends one row at most to each expert of a rank: with all experts on one, k rows.
        most = tokens * sources * min(self.topk, self.local_experts)
        balanced = tokens * self.topk * self.expert_tensor_parallel_size
        return min(most, round(balanced * self.imbalance))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer and microbatch."""

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
    """Channels of a dense MLP behind its activation; 0 in a layer with experts."""
    experts: ExpertsShape | None = None
    """The experts, or None in a dense layer."""
    latent: LatentShape | None = None
    """Multi-latent attention, or None where queries come in groups."""
    tensor_parallel_size: int = 1
    """Ranks that share the layer."""
    has_sequence_parallel: bool = True
    """With `--sequence-parallel`: between the linears that they share, ranks share the sequence too. Means nothing with one."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """As in `--normalization`."""
    has_fused_norms: bool = True
    """Norms are fused into the one linear behind them, where there is one: attention in groups and dense MLPs."""
    rotary_channels: int = 0
    """Of the rotary embedding that the model gives to all layers; 0 without one. Latent attention makes its own."""
    has_fused_rotary: bool = False
    """With `apply_rope_fusion`, Megatron-LM's default, for attention in groups alone: one kernel turns a head."""
    has_qk_norm: bool = False
    """With `--qk-layernorm`, for attention in groups: norms of query and key heads. `latent` says it for latent attention."""
    is_gated: bool = True
    """Activations of MLPs and experts are gated, as with `--swiglu`: they multiply halves of the first linear's output."""
    has_fused_activation: bool = True
    """One kernel computes a gated activation, of experts with the probabilities too, unless `--no-bias-swiglu-fusion`: then
    each operator keeps what it needs. Without a gate both ways keep the same."""
    has_linear_bias: bool = False
    """All linear layers have biases. The experts' second ones are added by operators of their own, which keep and make more;
    other linears keep the same, and some units cannot run again beside them."""
    has_attention_sinks: bool = False
    """With `--softmax-type learnable`: attention keeps one number a head more."""
    has_hidden_dropout: bool = False
    """With `--hidden-dropout` above 0."""
    has_mtp_projection: bool = False
    """The layer is of multi-token prediction: two norms and a projection are before it, and a norm is behind it."""
    fp8_recipe: Fp8Recipe | None = None
    """As in `--fp8-recipe`, for the linear layers; None where they work in bf16. Attention does in any case."""
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
        _check_choice(self, "fp8_recipe", (None, *FP8_RECIPES))
        _check_divides(self, "num_query_groups", "num_attention_heads")
        _check_divides(self, "tensor_parallel_size", "seq_length", "num_query_groups", "ffn_hidden_size")
        if (self.experts is None) == (self.ffn_hidden_size == 0):
            raise ConfigError(
                f"ffn_hidden_size {self.ffn_hidden_size} {'without' if self.experts is None else 'with'} experts: a layer is "
                "dense or a mixture. Give ffn_hidden_size above 0, or experts."
            )
        self._check_latent()
        if not self.has_sequence_parallel:
            check_whole_sequence(
                self.tensor_parallel_size,
                has_experts=self.experts is not None,
                has_latent_attention=self.latent is not None,
                has_mtp=self.has_mtp_projection,
            )
        if self.experts is not None and self.experts.shared_ffn_hidden_size % self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.tensor_parallel_size} does not divide shared_ffn_hidden_size "
                f"{self.experts.shared_ffn_hidden_size}. Give sizes that ranks can share."
            )

    def _check_latent(self) -> None:
        if self.latent is None:
            return
        if self.num_query_groups != self.num_attention_heads:
            raise ConfigError(
                f"num_query_groups {self.num_query_groups} differs from num_attention_heads {self.num_attention_heads}, and "
                f"latent attention has no groups. Give num_query_groups {self.num_attention_heads}."
            )
        if self.has_qk_norm:
            raise ConfigError("has_qk_norm is of attention in groups, and attention is latent. Give it in latent.")
        if self.has_fused_rotary:
            raise ConfigError(
                "has_fused_rotary with latent attention: what its fused rotary embedding saves is not known here. "
                "Give --no-rope-fusion."
            )

    @property
    def splits_sequence(self) -> bool:
        """Whether each of several ranks has a part of the sequence between the linears that they share."""
        return self.has_sequence_parallel and self.tensor_parallel_size > 1

    @property
    def tokens(self) -> int:
        """Of the microbatch, what this rank has between the linears that ranks share: sb/t, or sb where all have all."""
        return self.shared_tokens if self.has_sequence_parallel else self.seq_length * self.micro_batch_size

    @property
    def shared_tokens(self) -> int:
        """Of the microbatch, sb/t: times the channels of all ranks, what one has of a tensor whose channels they share."""
        return self.seq_length // self.tensor_parallel_size * self.micro_batch_size


def check_whole_sequence(tensor_parallel_size: int, *, has_experts: bool, has_latent_attention: bool, has_mtp: bool) -> None:
    """Refuse what nobody knows of ranks that share layers and not the sequence.

    Raises:
        ConfigError: With the fix.
    """
    unknown = {
        "Megatron-Core trains no experts so": has_experts,
        "what latent attention saves is not known then": has_latent_attention,
        "what multi-token prediction saves is not known then": has_mtp,
    }
    for reason in (reason for reason, is_there in unknown.items() if is_there and tensor_parallel_size > 1):
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} without has_sequence_parallel: {reason}. Give --sequence-parallel."
        )


_Shape = LatentShape | RouterShape | ExpertsShape | LayerShape


def _check_sizes(shape: _Shape, *names: str, least: int = 1) -> None:
    for name in names:
        check_count(name, getattr(shape, name), least=least, most=LARGEST_SIZE)


def _check_choice(shape: _Shape, name: str, choices: tuple[str | int | None, ...]) -> None:
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
