"""Shape of one transformer layer on a rank, which determines the bytes that the layer saves for backward.

Fields have Megatron's names. A layer is dense or has experts. Its attention is grouped-query or latent.
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
"""Token dispatchers: `--moe-token-dispatcher-type alltoall`, or `flex` with one of the other values as its backend."""

DEFAULT_IMBALANCE = 1.2
"""Value of `ExpertsShape.imbalance` for models without a measurement. Source: with load-balancing biases, the fullest expert is
4% above the mean over a whole validation set (Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts,
2024, MaxVio). One microbatch varies more, so we assume 20%."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Low-rank dimensions of multi-latent attention."""

    q_lora_rank: int | None  # channels of the compressed query; None if the query is projected without compression
    kv_lora_rank: int  # channels of the compressed key and value
    qk_pos_emb_head_dim: int  # rotary channels of a query and key head
    has_qk_norm: bool = False
    """Whether `--qk-layernorm` adds norms of the compressed query and key-value, fused into their up-projections. If the
    query is not compressed, its norm applies to the hidden states."""

    @property
    def has_whole_query_norm(self) -> bool:
        """Whether the projection of an uncompressed query normalizes the hidden states a second time.

        Source: `QKNormConfigResolver` of megatron-core 0.19.2. Releases before 0.19 lack this norm.
        """
        return self.has_qk_norm and self.q_lora_rank is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """Routing of tokens to experts. The defaults are Megatron's: softmax over the scores of the chosen experts."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"  # as in `--moe-router-score-function`
    has_pre_softmax: bool = False
    """Whether softmax runs over all experts before top-k: `--moe-router-pre-softmax`. For softmax routers only."""
    has_expert_bias: bool = False
    """Whether the router adds a bias to scores before top-k: `--moe-router-enable-expert-bias`. For sigmoid routers only."""
    balancing: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Load-balancing loss, per microbatch or per sequence; `none` if its coefficient is 0."""
    dtype_bytes: int = 2  # bytes per element of `--moe-router-dtype`: 4 for fp32, otherwise 2, as for activations

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
    """The experts of a layer, their router and their token dispatcher."""

    num_experts: int  # over all ranks
    topk: int  # experts per token
    ffn_hidden_size: int  # channels of an expert after its activation
    shared_ffn_hidden_size: int = 0  # channels of all shared experts together; 0 without shared experts
    has_shared_overlap: bool = False
    """Whether `--moe-shared-expert-overlap` is set: shared experts gather their own input and save it."""
    expert_parallel_size: int = 1  # expert-parallel ranks
    expert_tensor_parallel_size: int = 1  # ranks that share each expert; they gather each other's tokens
    imbalance: float = 1.0
    """Rows of the fullest expert-parallel rank divided by the mean: 1 for balanced routing, for which the formulas are exact.
    Readers of model files set `DEFAULT_IMBALANCE`. No effect if one rank has all experts."""
    has_fused_permutation: bool = False  # whether `--moe-permute-fusion` is set
    has_grouped_linears: bool = True  # whether `--moe-grouped-gemm` is set; some recompute units require it
    dispatcher: Dispatcher = "alltoall"
    """Token dispatcher. All except `alltoall` send a token once per target node instead of once per expert."""
    limited_groups: tuple[int, int] | None = None
    """Number of expert groups to which a token may be sent, and total number of groups: `--moe-router-group-topk` and
    `--moe-router-num-groups`. None without a limit."""
    router: RouterShape = dataclasses.field(default_factory=RouterShape)

    def __post_init__(self) -> None:
        for name in ("num_experts", "topk", "ffn_hidden_size", "expert_parallel_size", "expert_tensor_parallel_size"):
            check_count(name, getattr(self, name), most=LARGEST_SIZE)
        check_count("shared_ffn_hidden_size", self.shared_ffn_hidden_size, least=0, most=LARGEST_SIZE)
        check_choice("dispatcher", self.dispatcher, DISPATCHERS)
        pairs = (("expert_parallel_size", "num_experts"), ("expert_tensor_parallel_size", "ffn_hidden_size"))
        for divisor, name in pairs:
            parts, count = getattr(self, divisor), getattr(self, name)
            if count % parts:
                raise ConfigError(f"{divisor} {parts} does not divide {name} {count}. Use a size that does.")
        if not 1 <= self.imbalance < math.inf:
            raise ConfigError(
                f"imbalance {self.imbalance} must be finite and at least 1. "
                f"Use 1 for balanced routing, or more, for example {DEFAULT_IMBALANCE}."
            )
        if self.topk > self.num_experts:
            raise ConfigError(f"topk {self.topk} is above num_experts {self.num_experts}. Use {self.num_experts} or less.")
        if self.has_shared_overlap and not self.shared_ffn_hidden_size:
            raise ConfigError(
                "has_shared_overlap requires shared experts, but shared_ffn_hidden_size is 0. Set it, or disable the overlap."
            )

    @property
    def local_experts(self) -> int:
        """Number of experts on each rank."""
        return self.num_experts // self.expert_parallel_size

    def count_rows(self, tokens: int) -> int:
        """Return the rows of a rank's experts before padding. A token has one row per chosen expert."""
        sources = self.expert_parallel_size * self.expert_tensor_parallel_size
        # A token has at most one row per expert of a rank: k rows if one rank has all experts.
        most = tokens * sources * min(self.topk, self.local_experts)
        balanced = tokens * self.topk * self.expert_tensor_parallel_size
        return min(most, round(balanced * self.imbalance))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of a layer for one microbatch on a rank. `make_layer_shape` returns it for a layer of a `ModelShape`."""

    micro_batch_size: int  # sequences per microbatch
    seq_length: int  # tokens of a sequence on one context-parallel rank
    hidden_size: int  # channels of the hidden states
    num_attention_heads: int  # query heads over all tensor-parallel ranks
    num_query_groups: int  # key and value heads over all tensor-parallel ranks; as many as query heads in latent attention
    qk_channels: int
    """Channels of a query and key head: `kv_channels`, or `qk_head_dim` + `qk_pos_emb_head_dim` of latent attention."""
    v_channels: int  # channels of a value head: `kv_channels`, or `v_head_dim` of latent attention
    ffn_hidden_size: int = 0  # channels of a dense MLP after its activation; 0 in a layer with experts
    experts: ExpertsShape | None = None  # None in a dense layer
    latent: LatentShape | None = None  # multi-latent attention; None for grouped-query attention
    tensor_parallel_size: int = 1  # tensor-parallel ranks
    has_sequence_parallel: bool = True
    """Whether tensor-parallel ranks shard the sequence between linears: `--sequence-parallel`. No effect at TP 1."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"  # as in `--normalization`
    rotary_channels: int = 0  # channels of the model's rotary embedding; 0 without one or in latent attention
    has_fused_rotary: bool = False
    """Whether one kernel applies the rotary embedding: `apply_rope_fusion`, Megatron-LM's default. Not in latent attention."""
    has_qk_norm: bool = False
    """Whether query and key heads have norms: `--qk-layernorm`. For latent attention, see `latent`."""
    is_gated: bool = True
    """Whether MLPs and experts use a gated activation, as with `--swiglu`, which multiplies the two halves of its input."""
    has_fused_activation: bool = True
    """Whether one kernel computes a gated activation. In experts, it also multiplies by the probabilities. With
    `--no-bias-swiglu-fusion`, each op saves its own inputs. No effect without a gate."""
    has_clamped_gate: bool = False
    """Whether experts clamp their first linears' output before the activation, which saves one more tensor of that size."""
    has_linear_bias: bool = False
    """Whether all linear layers have biases. Only biases of the experts' second linear layers change saved bytes and compute,
    because they are added by separate ops. Some recompute units do not support biases."""
    has_attention_sinks: bool = False  # whether attention saves one more number per head: `--softmax-type learnable`
    has_hidden_dropout: bool = False  # whether `--hidden-dropout` is above 0
    has_mtp_projection: bool = False
    """Whether this is a multi-token prediction layer, with two norms and a projection before it, and a norm after it."""
    fp8_recipe: Fp8Recipe | None = None  # `--fp8-recipe` of the linear layers; None for bf16. Attention is always in bf16.
    is_deterministic: bool = False  # whether torch uses deterministic algorithms, for which Megatron uses other ops

    @property
    def has_fused_attention_norm(self) -> bool:
        """Whether the norm before attention is fused into the next linear. In latent attention, two linears follow it."""
        return self.latent is None

    @property
    def splits_sequence(self) -> bool:
        """Whether several tensor-parallel ranks shard the sequence between sharded linears."""
        return self.has_sequence_parallel and self.tensor_parallel_size > 1

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this rank between sharded linears: sb/t, or sb without sequence parallelism."""
        return self.shared_tokens if self.has_sequence_parallel else self.seq_length * self.micro_batch_size

    @property
    def shared_tokens(self) -> int:
        """Tokens of the microbatch divided by the tensor parallel size, sb/t, to size tensors sharded by channels."""
        return self.seq_length // self.tensor_parallel_size * self.micro_batch_size
