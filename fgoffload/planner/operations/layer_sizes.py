"""Activation sizes of a layer, used to compute times, temporaries and saved tensors."""

import dataclasses

from fgoffload.planner.model.layer_shape import LatentShape, LayerShape
from fgoffload.planner.operations.ops import BF16, Linear


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a layer's bf16 activations on one rank. For symbols, see docs/reference/saved_bytes.md."""

    shape: LayerShape

    @property
    def rows(self) -> int:
        """Input rows of sharded linears, one for each token of the microbatch: sb."""
        return self.shape.shared_tokens * self.shape.tensor_parallel_size

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states: 2sbh/t, or 2sbh if ranks do not shard the sequence."""
        return BF16 * self.shape.tokens * self.shape.hidden_size

    @property
    def gathered(self) -> int:
        """Bytes of the gathered hidden states: 2sbh, or 0 if ranks do not shard the sequence."""
        return self.hidden * self.shape.tensor_parallel_size if self.shape.splits_sequence else 0

    @property
    def query(self) -> int:
        """Bytes of the query: 2sbn dqk/t."""
        return BF16 * self.shape.shared_tokens * self.shape.num_attention_heads * self.shape.qk_channels

    @property
    def key(self) -> int:
        """Bytes of the key: 2sbg dqk/t."""
        return BF16 * self.shape.shared_tokens * self.shape.num_query_groups * self.shape.qk_channels

    @property
    def value(self) -> int:
        """Bytes of the value: 2sbg dv/t."""
        return BF16 * self.shape.shared_tokens * self.shape.num_query_groups * self.shape.v_channels

    @property
    def query_key_value(self) -> int:
        """Bytes of query, key and value."""
        return self.query + self.key + self.value

    @property
    def attention_output(self) -> int:
        """Bytes of the attention output: 2sbn dv/t."""
        return BF16 * self.shape.shared_tokens * self.shape.num_attention_heads * self.shape.v_channels

    @property
    def dense_inner(self) -> int:
        """Output bytes of the activation function of a dense MLP: 2sbf/t."""
        return BF16 * self.shape.shared_tokens * self.shape.ffn_hidden_size

    @property
    def gates(self) -> int:
        """Number of equal parts in an activation's input: 2 with a gate, otherwise 1."""
        return 2 if self.shape.is_gated else 1

    @property
    def shared_inner(self) -> int:
        """Output bytes of the shared experts' activation function: 2sbfs/t, or 0 without shared experts."""
        experts = self.shape.experts
        return 0 if experts is None else BF16 * self.shape.shared_tokens * experts.shared_ffn_hidden_size

    @property
    def expert_rows(self) -> int:
        """Input rows of a rank's experts: sbke/t if routing is balanced, or 0 in a dense layer."""
        return 0 if self.shape.experts is None else self.shape.experts.count_rows(self.shape.tokens)

    @property
    def expert_inner(self) -> int:
        """Output bytes of the experts' activation function: 2sbkf/t, or 0 in a dense layer."""
        experts = self.shape.experts
        if experts is None:
            return 0
        return BF16 * self.expert_rows * (experts.ffn_hidden_size // experts.expert_tensor_parallel_size)

    @property
    def permuted(self) -> int:
        """Bytes of this rank's tokens, with one copy per chosen expert: 2sbkh/t, or 0 in a dense layer."""
        return 0 if self.shape.experts is None else self.hidden * self.shape.experts.topk

    @property
    def arrived(self) -> int:
        """Bytes of the tokens sent to this rank's experts: 2sbkhe/t if routing is balanced, or 0 in a dense layer."""
        return BF16 * self.expert_rows * self.shape.hidden_size

    @property
    def dispatch_steps(self) -> tuple[int, ...]:
        """Bytes of the tokens after each dispatch step: permute, exchange, gather and sort.

        Expert-parallel ranks exchange tokens, and ranks that share an expert gather them. A rank with several experts sorts its
        tokens by expert, even without expert parallelism.
        """
        experts = self.shape.experts
        if experts is None:
            return ()
        steps = [self.permuted]
        if experts.expert_parallel_size > 1:
            steps.append(self.arrived // experts.expert_tensor_parallel_size)
        if experts.expert_tensor_parallel_size > 1:
            steps.append(self.arrived)
        if experts.local_experts > 1:
            steps.append(self.arrived)
        return tuple(steps)


def count_compressed_bytes(shape: LayerShape, latent: LatentShape) -> int:
    """Return the bytes of the compressed query and key-value, and of the key's rotary channels."""
    return BF16 * shape.tokens * ((latent.q_lora_rank or 0) + latent.kv_lora_rank + latent.qk_pos_emb_head_dim)


def count_normed_bytes(shape: LayerShape, latent: LatentShape) -> int:
    """Return the output bytes of the norms of query and key-value, or 0 without them."""
    if not latent.has_qk_norm:
        return 0
    return count_compressed_bytes(shape, latent) + (LayerSizes(shape).hidden if latent.has_whole_query_norm else 0)


def make_mlp_linears(shape: LayerShape, ffn_hidden_size: int) -> tuple[Linear, Linear]:
    """Return both linears of a sharded MLP. In a gated MLP, the first computes gate and up-projection."""
    sizes, width = LayerSizes(shape), ffn_hidden_size // shape.tensor_parallel_size
    return (
        make_linear(shape, sizes.rows, shape.hidden_size, sizes.gates * width),
        make_linear(shape, sizes.rows, width, shape.hidden_size),
    )


def make_linear(shape: LayerShape, rows: int, inputs: int, outputs: int, *, experts: int = 0) -> Linear:
    """Return a linear of the layer, in fp8 if the layer has an fp8 recipe."""
    # A tensorwise scale is computed from the tensor itself, so an additional kernel first finds the maximum.
    kernels = 0 if shape.fp8_recipe is None else 2 if shape.fp8_recipe == "tensorwise" else 1
    return Linear(rows=rows, inputs=inputs, outputs=outputs, experts=experts, quantizing_kernels=kernels)
