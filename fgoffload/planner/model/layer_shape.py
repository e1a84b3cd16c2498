"""Sizes of one transformer layer on a rank, which determine the bytes that it saves for backward.

Fields carry Megatron's names. A layer is dense or has experts. Its attention is grouped-query or latent.
"""

import dataclasses
import math
from typing import Literal

from fgoffload.errors import ConfigError
from fgoffload.planner.checks import LARGEST_SIZE, check_choice, check_count

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
"""Values of `--fp8-recipe`."""

FP8_RECIPES: tuple[Fp8Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")

Dispatcher = Literal["alltoall", "deepep", "hybridep"]
DISPATCHERS: tuple[Dispatcher, ...] = ("alltoall", "deepep", "hybridep")
"""Token dispatchers: `--moe-token-dispatcher-type alltoall`, or flex with one of the others as its backend."""

DEFAULT_IMBALANCE = 1.2
"""Default of `ExpertsShape.imbalance`, for models without a measurement.

Source: with load-balancing biases, the fullest expert is 4% above the mean over a whole validation set (Wang et al.,
Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, MaxVio). One microbatch varies more, so we take 20%.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Low ranks of multi-latent attention."""

    q_lora_rank: int | None  # channels of the compressed query; None if the query is projected without compression
    kv_lora_rank: int  # channels of the compressed key and value
    qk_pos_emb_head_dim: int  # rotary channels of a query and key head
    has_qk_norm: bool = False
    """With `--qk-layernorm`: norms of the compressed query and key-value, fused into their up-projections. An uncompressed
    query has a norm of the hidden states."""

    @property
    def has_whole_query_norm(self) -> bool:
        """Whether the projection of an uncompressed query normalizes the hidden states once more.

        Source: `QKNormConfigResolver` of megatron-core 0.19.2. Releases before 0.19 have no such norm.
        """
        return self.has_qk_norm and self.q_lora_rank is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """Routing of tokens to experts. The defaults are Megatron's: softmax over the scores of the chosen experts."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"  # as in `--moe-router-score-function`
    has_pre_softmax: bool = False
    """With `--moe-router-pre-softmax`, softmax runs over the scores of all experts, before top-k. Softmax routers only."""
    has_expert_bias: bool = False
    """With `--moe-router-enable-expert-bias`, a bias is added to the scores before top-k. Sigmoid routers only."""
    balancing: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Load-balancing loss, over the microbatch or over each sequence. None if its coefficient is 0."""
    dtype_bytes: int = 2  # bytes of an element in `--moe-router-dtype`: 4 for fp32, else the 2 of activations

    def __post_init__(self) -> None:
        check_choice("score_function", self.score_function, ("softmax", "sigmoid"))
        check_choice("balancing", self.balancing, ("none", "aux_loss", "seq_aux_loss"))
        check_choice("dtype_bytes", self.dtype_bytes, (2, 4))
        if self.has_expert_bias and self.score_function != "sigmoid":
            raise ConfigError(
                f"has_expert_bias requires score_function 'sigmoid', not {self.score_function!r}. "
                "Remove the bias, or use sigmoid."
            )
        if self.has_pre_softmax and self.score_function != "softmax":
            raise ConfigError(
                f"has_pre_softmax requires score_function 'softmax', not {self.score_function!r}. "
                "Remove --moe-router-pre-softmax, or use softmax."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts behind the all-to-all dispatcher."""

    num_experts: int  # experts of the layer, over all ranks
    topk: int  # experts per token
    ffn_hidden_size: int  # channels of an expert after its activation
    shared_ffn_hidden_size: int = 0  # channels of all shared experts together; 0 without any
    has_shared_overlap: bool = False
    """With `--moe-shared-expert-overlap`: the shared experts gather their own input, and keep it gathered."""
    expert_parallel_size: int = 1  # expert-parallel ranks
    expert_tensor_parallel_size: int = 1  # ranks that share each expert; they gather each other's tokens
    imbalance: float = 1.0
    """Rows of the fullest expert-parallel rank over the mean of all: 1 for balanced routing, for which the formulas are exact.
    Plans take `DEFAULT_IMBALANCE`. It has no effect if one rank has all experts."""
    has_fused_permutation: bool = False  # with `--moe-permute-fusion`
    has_grouped_linears: bool = True  # with `--moe-grouped-gemm`; other experts have no unit: only `moe` and `layer` do
    dispatcher: Dispatcher = "alltoall"
    """Token dispatcher. All except `alltoall` send a token once to each target node, not once for each expert."""
    limited_groups: tuple[int, int] | None = None
    """Limit on the groups of a token's experts: `--moe-router-group-topk` of `--moe-router-num-groups`. None without a
    limit."""
    router: RouterShape = dataclasses.field(default_factory=RouterShape)  # routing of tokens to experts

    def __post_init__(self) -> None:
        for name in ("num_experts", "topk", "ffn_hidden_size", "expert_parallel_size", "expert_tensor_parallel_size"):
            check_count(name, getattr(self, name), most=LARGEST_SIZE)
        check_count("shared_ffn_hidden_size", self.shared_ffn_hidden_size, least=0, most=LARGEST_SIZE)
        check_choice("dispatcher", self.dispatcher, DISPATCHERS)
        pairs = (("expert_parallel_size", "num_experts"), ("expert_tensor_parallel_size", "ffn_hidden_size"))
        for divisor, name in pairs:
            parts, count = getattr(self, divisor), getattr(self, name)
            if count % parts:
                raise ConfigError(f"{divisor} {parts} does not divide {name} {count}. Use sizes that divide.")
        if not 1 <= self.imbalance < math.inf:
            raise ConfigError(
                f"imbalance {self.imbalance} must be finite and at least 1. "
                f"Use 1 for balanced routing, or more, for example {DEFAULT_IMBALANCE}."
            )
        if self.topk > self.num_experts:
            raise ConfigError(f"topk {self.topk} is above num_experts {self.num_experts}. Give {self.num_experts} or less.")
        if self.has_shared_overlap and not self.shared_ffn_hidden_size:
            raise ConfigError(
                "has_shared_overlap requires shared experts, but shared_ffn_hidden_size is 0. Set it, or turn the overlap off."
            )

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.expert_parallel_size

    def count_rows(self, tokens: int) -> int:
        """Return the rows of a rank's experts, one for each token and expert, before padding."""
        sources = self.expert_parallel_size * self.expert_tensor_parallel_size
        # A token sends at most one row to each expert of a rank: k rows if one rank has all experts.
        most = tokens * sources * min(self.topk, self.local_experts)
        balanced = tokens * self.topk * self.expert_tensor_parallel_size
        return min(most, round(balanced * self.imbalance))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer and microbatch, made by `make_layer_shape` of a model that the ranks can share."""

    micro_batch_size: int  # sequences of a microbatch
    seq_length: int  # tokens of a sequence on one context-parallel rank
    hidden_size: int  # hidden size
    num_attention_heads: int  # query heads over all tensor-parallel ranks
    num_query_groups: int  # key and value heads over all tensor-parallel ranks; as many as query heads in latent attention
    qk_channels: int
    """Channels of a query and key head: `kv_channels`, or `qk_head_dim` + `qk_pos_emb_head_dim` of latent attention."""
    v_channels: int  # channels of a value head: `kv_channels`, or `v_head_dim` of latent attention
    ffn_hidden_size: int = 0  # channels of a dense MLP after its activation; 0 in a layer with experts
    experts: ExpertsShape | None = None  # experts; None in a dense layer
    latent: LatentShape | None = None  # multi-latent attention; None for grouped queries
    tensor_parallel_size: int = 1  # tensor-parallel ranks
    has_sequence_parallel: bool = True
    """With `--sequence-parallel`: tensor-parallel ranks also share the sequence between their linears. No effect with one
    rank."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"  # as in `--normalization`
    rotary_channels: int = 0  # channels of the model's rotary embedding; 0 without one. Latent attention makes its own.
    has_fused_rotary: bool = False
    """With `apply_rope_fusion`, Megatron-LM's default, for grouped-query attention only: one kernel applies the rotary
    embedding."""
    has_qk_norm: bool = False
    """With `--qk-layernorm`, for grouped-query attention: norms of query and key heads. `latent` has those of latent
    attention."""
    is_gated: bool = True
    """Whether activations of MLPs and experts are gated, as with `--swiglu`: they multiply halves of the first linear's
    output."""
    has_fused_activation: bool = True
    """Whether one kernel computes a gated activation, for experts with the probabilities. With `--no-bias-swiglu-fusion` each
    operator saves its own inputs. Without a gate both save the same."""
    has_clamped_gate: bool = False
    """Whether experts clamp their first linears' output before the activation: one more tensor of that size is saved."""
    has_linear_bias: bool = False
    """Whether all linear layers have biases. Biases of the experts' second linears are added by separate operators, which save
    and compute more; other linears save the same, and some units cannot be recomputed beside them."""
    has_attention_sinks: bool = False  # with `--softmax-type learnable`: attention saves one more number per head
    has_hidden_dropout: bool = False  # with `--hidden-dropout` above 0
    has_mtp_projection: bool = False
    """Whether this is a layer of multi-token prediction: with two norms and a projection before it, and a norm after it."""
    fp8_recipe: Fp8Recipe | None = None  # `--fp8-recipe` of the linear layers; None for bf16. Attention is always in bf16.
    is_deterministic: bool = False  # whether torch uses deterministic algorithms, for which Megatron takes other operators

    @property
    def has_fused_attention_norm(self) -> bool:
        """Whether the norm before attention is fused into the next linear. Latent attention has two linears there."""
        return self.latent is None

    @property
    def splits_sequence(self) -> bool:
        """Whether each of several ranks has a part of the sequence between the shared linears."""
        return self.has_sequence_parallel and self.tensor_parallel_size > 1

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this rank between the shared linears: sb/t, or sb without sequence parallelism."""
        return self.shared_tokens if self.has_sequence_parallel else self.seq_length * self.micro_batch_size

    @property
    def shared_tokens(self) -> int:
        """sb/t of the microbatch: times the channels of all ranks, the elements of one rank of a tensor sharded by channels."""
        return self.seq_length // self.tensor_parallel_size * self.micro_batch_size
