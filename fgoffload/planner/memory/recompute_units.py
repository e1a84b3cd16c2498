"""Lists a layer's recompute units (see `fgoffload.tags.RECOMPUTE_UNITS`), the tensors that each unit frees, and its cost.

Some units are checkpoints, which save their input and are recomputed right before their own backward: `layer`, `core_attn`,
`mlp`, `moe` and `shared_expert`. All others drop their output, which the next module would otherwise keep, and are recomputed
when backward reaches a module that uses it. With FP8, these units use Megatron's checkpoints, which copy the recomputed tensor
into the dropped storage, so both exist briefly. `qkv_linear`, `mlp_fc1`, `expert_fc1` and `dispatch` are recomputed right
before the backward of the next module.

Source: `reruns.py`, `detached_outputs.py`, `partial_recompute.py` and `permutations.py` of our integration; `checkpoint` of
megatron/core/tensor_parallel/random.py, and the callers of `checkpoint` and `CheckpointWithoutOutput` in transformer_layer.py,
multi_latent_attention.py, attention.py and moe/, in megatron-core 0.16.1.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from fgoffload.errors import InternalError
from fgoffload.planner.model.layer_shape import LatentShape, LayerShape
from fgoffload.planner.operations.layer_sizes import LayerSizes
from fgoffload.planner.operations.mlp_ops import count_permutation_part
from fgoffload.planner.operations.ops import BF16
from fgoffload.planner.ranks.layer_model import SavedTensor, Segment, UnitModel
from fgoffload.tags import RECOMPUTE_UNITS

_ATTENTION_NORM = ("output of the norm before attention", "statistics of the norm before attention")
_MLP_NORM = ("output of the norm before the MLP", "statistics of the norm before the MLP")

_ACTIVATION_INPUTS = ("first linears' output", "permuted probabilities")
"""Saved tensors from which the experts' activation is recomputed."""

_GROUPED = ("expert_fc1", "moe_act", "dispatch")
"""Units that only grouped experts have."""

_MTP_SEGMENTS = ("mtp_projection", "mtp_norm")
"""Segments before and after the transformer layer of multi-token prediction. No unit covers them."""


def make_units(
    shape: LayerShape, segments: Sequence[Segment], tensors: Sequence[SavedTensor], *, copy_bytes_per_s: float = math.inf
) -> tuple[UnitModel, ...]:
    """Return the recompute units that a layer supports, in the order of `RECOMPUTE_UNITS`."""
    names = tuple(segment.name for segment in segments if segment.name not in _MTP_SEGMENTS)
    checkpoints = _list_checkpoints(shape, names, tensors)
    outputs = _list_output_units(shape, names, tensors, copy_bytes_per_s)
    partial = _list_partial_recomputes(shape, names, tensors)
    permutation = _list_permutation(shape, tensors)
    found = {unit.name: unit for unit in (*checkpoints, *outputs, *partial, *permutation)}
    if shape.experts is not None and not shape.experts.has_grouped_linears:
        found = {name: unit for name, unit in found.items() if name not in _GROUPED}
    return tuple(found[unit.name] for unit in RECOMPUTE_UNITS if unit.name in found)


def _list_checkpoints(shape: LayerShape, names: tuple[str, ...], tensors: Sequence[SavedTensor]) -> Iterator[UnitModel]:
    # Other layers and the model still reference storages that all layers share.
    inside = tuple(one.name for one in tensors if "layer_input" not in one.tags and not one.is_same_in_all_layers)
    yield _make_checkpoint("layer", names, inside, extra_bytes=LayerSizes(shape).hidden)
    # The checkpoint keeps its inputs (query, key and value) and their storage. It drops the output only with
    # delayed scaling, where the projection saves an fp8 copy instead.
    made = (one.name for one in tensors if one.name == "attention output" and one.tags == ("core_attn",))
    sinks = ("attention sinks",) if shape.has_attention_sinks else ()
    dropped = _pick(tensors, "log-sum-exp", "random state", *sinks, *made)
    rest, copied = _list_rest_of_projection(shape)
    yield _make_checkpoint("core_attn", ("core_attn",), dropped, keeps=rest, extra_bytes=copied)
    yield from _list_mlp_checkpoints(shape, names, tensors)


def _list_rest_of_projection(shape: LayerShape) -> tuple[tuple[SavedTensor, ...], int]:
    """Return the tensors that a checkpoint of attention keeps besides query, key and value, and the bytes that it copies.

    One linear returns query, key and value in one storage. Rotary embeddings and head norms write query and key to new tensors,
    but the value remains a view. Attention copies non-contiguous tensors and saves the copies, so forward frees the storage. A
    checkpoint keeps the view, and therefore the whole storage. The part that attention would have copied is counted as query,
    key and value. This function returns the rest.

    Source: `SelfAttention.get_query_key_value_tensors` and `Attention._checkpointed_attention_forward` of megatron-core 0.16.1,
    `get_qkv_layout` of Transformer Engine 2.20; `tests/unit/megatron/test_saved_bytes.py` runs Megatron's code with a
    substitute for attention. docs/reference/saved_bytes.md has a measurement of Llama 3 8B on an H200.
    """
    sizes = LayerSizes(shape)
    if shape.latent is not None:
        # Megatron makes the value contiguous before attention.
        return (), 0
    views = sizes.value
    if not shape.rotary_channels and not shape.has_qk_norm:
        if shape.num_query_groups == shape.num_attention_heads:
            # Attention reads all three views in place, so it saves the whole storage even without recompute.
            return (), 0
        # A group's heads are adjacent but the groups are not, so the reshape before attention copies only the query.
        views = sizes.key + sizes.value
    rest = SavedTensor(name="rest of the projections' output", tags=("core_attn",), size_bytes=sizes.query_key_value - views)
    return (rest,), views


def _list_mlp_checkpoints(shape: LayerShape, names: tuple[str, ...], tensors: Sequence[SavedTensor]) -> Iterator[UnitModel]:
    experts, hidden = shape.experts, LayerSizes(shape).hidden
    half = names[names.index("attn_proj") + 1 :]
    segments = tuple(name for name in half if name != "mlp_norm")
    # The checkpoint's input is the residual if the norm is fused into the first linear, otherwise the norm's output.
    has_norm = "mlp_norm" in half
    kept = _pick(tensors, "output of the norm before the MLP" if has_norm else "residual")
    own = ("mlp_norm", *kept)
    inside = tuple(one.name for one in tensors if set(one.tags) <= set(segments) and one.name not in own)
    # Megatron hangs when it checkpoints an MLP that returns a bias.
    if experts is not None or not shape.has_linear_bias:
        yield _make_checkpoint("mlp" if experts is None else "moe", segments, inside, extra_bytes=hidden)
    # With overlap, the dispatcher runs the shared experts, so they cannot be checkpointed.
    if experts is not None and experts.shared_ffn_hidden_size and not experts.has_shared_overlap:
        inside = tuple(one.name for one in tensors if one.tags == ("shared_expert",))
        yield _make_checkpoint("shared_expert", ("shared_expert",), inside, extra_bytes=hidden)


def _make_checkpoint(
    name: str, segments: tuple[str, ...], drops: tuple[str, ...], *, keeps: tuple[SavedTensor, ...] = (), extra_bytes: int
) -> UnitModel:
    return UnitModel(name=name, segments=segments, drops=drops, keeps=keeps, before=segments[-1], extra_bytes=extra_bytes)


def _list_output_units(
    shape: LayerShape, names: tuple[str, ...], tensors: Sequence[SavedTensor], copy_bytes_per_s: float
) -> Iterator[UnitModel]:
    sizes = LayerSizes(shape)

    def make(name: str, segment: str, before: str, output_bytes: int, drops: tuple[str, ...]) -> UnitModel:
        copy_s, uses_megatron = 2 * output_bytes / copy_bytes_per_s, shape.fp8_recipe is not None
        return UnitModel(
            name=name,
            segments=(segment,),
            drops=drops,
            keeps=_list_checkpoint_inputs(shape, shape.latent) if name == "mla_up_proj" and shape.latent is not None else (),
            before=before,
            extra_s=copy_s if uses_megatron else 0.0,
            extra_bytes=output_bytes if uses_megatron else 0,
            copy_s=0.0 if uses_megatron else copy_s,
            copy_bytes=0 if uses_megatron else output_bytes,
        )

    if shape.latent is not None:
        # Saved inputs of the linears, except compressed tensors in bf16: the checkpoint keeps these as its own inputs.
        starts = ("normed input",) if _saves_compressed(shape, shape.latent) else ("normed input", "compressed")
        inputs = (one.name for one in tensors if one.name.startswith(starts))
        drops = _pick(tensors, "query, key and value", "rotary tables", *inputs)
        yield make("mla_up_proj", "qkv_linear", "core_attn", sizes.query_key_value, drops)
    if shape.fp8_recipe == "delayed":
        # The next modules would have to save unquantized inputs, which delayed scaling does not support.
        return
    # Megatron recomputes a norm when backward reaches the output of that half of the layer.
    if not shape.has_fused_attention_norm:
        yield make("attn_norm", "attn_norm", "attn_proj", sizes.hidden, _pick(tensors, *_ATTENTION_NORM))
    if shape.experts is not None:
        yield make("mlp_norm", "mlp_norm", names[-1], sizes.hidden, _pick(tensors, *_MLP_NORM))
        # The unit also drops tensors that ops inside the activation save.
        inside = (one.name for one in tensors if one.tags == ("moe_act",) and one.name not in _ACTIVATION_INPUTS)
        yield make("moe_act", "moe_act", "expert_fc2", sizes.expert_inner, _pick(tensors, *inside, "activation's output"))


def _list_partial_recomputes(shape: LayerShape, names: tuple[str, ...], tensors: Sequence[SavedTensor]) -> Iterator[UnitModel]:
    """Yield the units that recompute a first linear, its fused norm, and the ops up to the module that saves the result."""
    if shape.fp8_recipe is not None:
        return
    experts = shape.experts

    def make(segments: tuple[str, ...], until: str, made: str, *kept: str) -> UnitModel:
        inside = (one.name for one in tensors if set(one.tags) <= set(segments) and one.name not in kept)
        return UnitModel(name=segments[0], segments=segments, drops=(*inside, *_pick(tensors, made)), before=until)

    # These units keep the input of the first linear.
    if shape.latent is None:
        yield make(("qkv_linear",), "core_attn", "query, key and value")
    if experts is None:
        yield make(("mlp_fc1", "mlp_act"), "mlp_fc2", "activation's output", "residual")
    elif not shape.has_linear_bias:
        yield make(("expert_fc1", "moe_act"), "expert_fc2", "activation's output", "permuted tokens", "permuted probabilities")


def _list_permutation(shape: LayerShape, tensors: Sequence[SavedTensor]) -> Iterator[UnitModel]:
    """Yield the unit that recomputes the token permutation from the router's saved tensors. Each rank must have all experts."""
    experts = shape.experts
    if experts is None or shape.fp8_recipe is not None:
        return
    if experts.expert_parallel_size == experts.expert_tensor_parallel_size == 1:
        drops = _pick(tensors, "permuted tokens")
        yield UnitModel(
            name="dispatch",
            segments=("dispatch",),
            drops=drops,
            held=drops,
            before="expert_fc1",
            forward_part=count_permutation_part(shape, experts),
        )


def _list_checkpoint_inputs(shape: LayerShape, latent: LatentShape) -> tuple[SavedTensor, ...]:
    """Return the inputs that the checkpoint of the up-projections saves in addition to the layer's own saved tensors.

    The rotary embedding is also an input, but it is not counted because its module caches it.

    Source: `MLASelfAttention.get_query_key_value_tensors` of megatron-core 0.16.1.
    """
    kept = []
    if not _saves_compressed(shape, latent):
        for name, rank in (("query", latent.q_lora_rank), ("key-value", latent.kv_lora_rank)):
            if rank is not None:
                # 2sb rank/t: fp8 linears save their own copies, and only during the recompute.
                size_bytes = BF16 * shape.tokens * rank
                kept.append(SavedTensor(name=f"compressed {name} in bf16", tags=("qkv_linear",), size_bytes=size_bytes))
    # The compressed key-value is a view of the projection's output, next to the key's rotary channels, 2sb dpos/t, which are
    # also inputs of the checkpoint. If ranks gather these channels, each rank has those of the whole sequence, 2sb dpos. The
    # view then also keeps this rank's own rotary channels, except the last token's.
    channels = BF16 * latent.qk_pos_emb_head_dim
    size_bytes = channels * LayerSizes(shape).rows
    kept.append(SavedTensor(name="rotary channels of the key", tags=("qkv_linear",), size_bytes=size_bytes))
    if shape.tensor_parallel_size > 1:
        size_bytes = channels * (shape.tokens - 1)
        kept.append(SavedTensor(name="rotary channels inside the compressed", tags=("qkv_linear",), size_bytes=size_bytes))
    return tuple(kept)


def _saves_compressed(shape: LayerShape, latent: LatentShape) -> bool:
    """Return whether a linear or a norm saves the compressed query and key-value unquantized."""
    return shape.fp8_recipe is None or latent.has_qk_norm


def _pick(tensors: Iterable[SavedTensor], *names: str) -> tuple[str, ...]:
    found = tuple(one.name for one in tensors if one.name in names)
    if len(found) != len(names):
        missing = ", ".join(name for name in names if name not in found)
        raise InternalError(f"A recompute unit should free {missing}, but the layer does not save it. Please report it.")
    return found
