"""The bytes of the two tags that only Megatron-LM's development branch (0.20) has: `fused_group_mlp` and `gdp_qkv`.

Apart from `saved_bytes.py`, since neither fits a layer as it is there. Experts that go through Transformer Engine's op fuser
save padded rows, and how many depends on the routing; a gated delta product is a layer of its own, without attention or MLP.

Source: measured, to the byte, with that branch, Transformer Engine 2.20.2 and torch 2.11 on one H200 at t = 1;
`tests/gpu/run_megatron_development.py` compares. What ranks share is from the code, and not measured.
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.model.layer_shape import LayerShape
from fgoffload.planner.ranks.layer_model import SavedTensor

_BF16 = 2
_FP32 = 4
_INT64 = 8
"""Bytes of an element."""

_ROWS_OF_AN_EXPERT = 256
"""Rows of each expert are padded to a multiple of this. Source: `get_align_size_for_quantization` of the branch."""

_COPY_ALIGNMENT_BYTES = 512
"""What leaves begins at a multiple of this in its storage. Source: `engine/geometry.py`, which needs torch."""


def list_fused_experts_tensors(shape: LayerShape, *, rows: Sequence[int] | None = None) -> tuple[SavedTensor, ...]:
    """Return what the experts of a layer save under `fused_group_mlp`, on one rank: both linears and what is between them.

    In bf16, with a gated activation without bias, and where Transformer Engine runs its basic ops one after the other: on
    Hopper, with a cuBLASLt before 13.4.

    Args:
        shape: A layer with experts.
        rows: Of each expert of the rank, before they are padded; None takes as many for each.

    Raises:
        ConfigError: The layer is none of those, or `rows` are not those of its experts on one rank.
    """
    experts = shape.experts
    if experts is None or not shape.is_gated or shape.fp8_recipe is not None or experts.expert_tensor_parallel_size != 1:
        raise ConfigError(
            "fused_group_mlp has a formula for layers with experts in bf16, gated and each whole on one rank, and this layer "
            "is another. Give such a layer, or measure."
        )
    count = experts.local_experts
    if rows is None:
        rows = (-(-experts.count_rows(shape.tokens) // count),) * count
    if len(rows) != count or min(rows) < 0:
        raise ConfigError(f"rows {list(rows)} are not those of {count} experts. Give each a number from 0 up.")
    padded = sum(-(-number // _ROWS_OF_AN_EXPERT) * _ROWS_OF_AN_EXPERT for number in rows)
    tags, ffn = ("fused_group_mlp",), experts.ffn_hidden_size
    return (
        # 2Ph, where P are the padded rows: the first linears' input, of which each expert has a part.
        SavedTensor(name="padded tokens", tags=tags, size_bytes=_BF16 * padded * shape.hidden_size),
        # 8E over the expert-parallel ranks: the padded rows of each expert, which both linears save as one.
        SavedTensor(name="rows of each expert", tags=tags, size_bytes=_INT64 * count, element_bytes=_INT64),
        # 4Pf: gate and up.
        SavedTensor(name="first linears' output", tags=tags, size_bytes=2 * _BF16 * padded * ffn),
        # 2P, in the activation's type whatever the router's.
        SavedTensor(name="padded probabilities", tags=tags, size_bytes=_BF16 * padded),
        # 2Pf.
        SavedTensor(name="activation's output", tags=tags, size_bytes=_BF16 * padded * ffn),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaProductShape:
    """One layer and microbatch of a gated delta product. Fields carry Megatron's names."""

    micro_batch_size: int
    """Sequences of a microbatch."""
    seq_length: int
    """Tokens of a sequence, on one context-parallel rank alone."""
    mamba_num_heads: int
    """Heads over all tensor-parallel ranks."""
    mamba_head_dim: int
    """Channels of a value head."""
    mamba_num_groups: int
    """Query and key heads over all tensor-parallel ranks, which heads share."""
    mamba_state_dim: int
    """Channels of a query and key head."""
    gdp_num_householder: int = 3
    """Keys and values of a token."""
    has_recomputed_qkv: bool = False
    """With `gdp_qkv` among `--recompute-modules`: query, key and value are made again in backward."""
    tensor_parallel_size: int = 1
    """Ranks that share the layer."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: A size is below 1, or heads or groups cannot be shared among the ranks.
        """
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.name != "has_recomputed_qkv" and size < 1:
                raise ConfigError(f"{field.name} {size} is below 1. Give 1 or more.")
        for name in ("mamba_num_heads", "mamba_num_groups"):
            if getattr(self, name) % self.tensor_parallel_size:
                raise ConfigError(
                    f"tensor_parallel_size {self.tensor_parallel_size} does not divide {name} {getattr(self, name)}. "
                    "Give sizes that ranks can share."
                )


def list_gated_delta_product_tensors(shape: GatedDeltaProductShape) -> tuple[SavedTensor, ...]:
    """Return what one layer saves under `gdp_qkv`, on one rank: the convolution's input, and the normed query and key.

    In bf16, with the kernels of flash-linear-attention and causal-conv1d.
    """
    tokens, copies = shape.seq_length * shape.micro_batch_size, shape.gdp_num_householder
    heads = shape.mamba_num_heads // shape.tensor_parallel_size
    groups = shape.mamba_num_groups // shape.tensor_parallel_size
    values, keys = heads * shape.mamba_head_dim, groups * shape.mamba_state_dim
    # A token's row of the projection: gate, m values, m keys, query, and behind them m + 1 numbers a head.
    behind = (copies + 1) * heads
    row = (copies + 1) * (values + keys) + behind
    # Gate and numbers a head lie between the rows and leave with them, but for those ahead of the first and behind the last.
    start = _BF16 * values // _COPY_ALIGNMENT_BYTES * _COPY_ALIGNMENT_BYTES
    end = _BF16 * (tokens * row - behind)
    tags = ("gdp_qkv",)
    projected = SavedTensor(name="convolution's input", tags=tags, size_bytes=end - start)
    if shape.has_recomputed_qkv:
        return (projected,)
    return (
        projected,
        # 2sb g dqk/t and 4sb g/t.
        SavedTensor(name="normed query", tags=tags, size_bytes=_BF16 * tokens * keys),
        SavedTensor(name="statistics of the query's norm", tags=tags, size_bytes=_FP32 * tokens * groups, element_bytes=_FP32),
        # m times as much.
        SavedTensor(name="normed keys", tags=tags, size_bytes=_BF16 * tokens * copies * keys),
        SavedTensor(
            name="statistics of the keys' norm", tags=tags, size_bytes=_FP32 * tokens * copies * groups, element_bytes=_FP32
        ),
    )
