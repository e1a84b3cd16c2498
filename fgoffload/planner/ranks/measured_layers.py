"""Builds rank models from measurements of any model: the bytes and times of each layer's parts.

    layer = MeasuredLayer(kind="block", parts=(attention, mlp), tensors=(...), input=...)
    rank = make_rank([layer] * 12, link=link, static_bytes=..., microbatches=4)
    solution = solve([rank], budget_bytes=60 * GIB)

A plan refers to a part of a layer by the part's name, to the whole layer as `layer`, and to its input as `layer_input`:

| treatment | action in the plan |
|---|---|
| keep | none |
| offload the tensors that a part saves | `offload` of the part |
| recompute a part from its input | `recompute` of the part, or `recompute+offload` to offload that input |
| recompute the layer from its input | `recompute` of `layer`, and `offload` of `layer_input` to offload that input |
"""

import dataclasses
from collections.abc import Sequence

from fgoffload.errors import ConfigError
from fgoffload.planner.ranks.layer_model import LayerModel, SavedTensor, Segment, UnitModel
from fgoffload.planner.ranks.rank_model import ChunkModel, HostPace, LinkModel, NumberedLayer, RankModel
from fgoffload.planner.ranks.schedule import Pipeline, list_passes
from fgoffload.transfer_schedule import TransferPolicy

LAYER, LAYER_INPUT = "layer", "layer_input"

_CHECKPOINT_S = 2e-4
"""Assumed CPU time per checkpoint, for which the GPU waits in launch-bound parts of a step. Without it, plans prefer many small
recomputes. On one CPU, `torch.utils.checkpoint` takes 0.1 ms in forward and 0.2 ms in backward, recompute excluded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """A part of a layer, such as `attention`. Times and bytes are for one microbatch on an otherwise idle device."""

    name: str  # name in plans; not `layer` or `layer_input`
    forward_s: float  # seconds of forward compute
    backward_s: float  # seconds of backward compute
    backward_extra_bytes: int = 0  # temporary device bytes of backward, excluding saved tensors
    input: SavedTensor | None = None
    """Input from which this part is recomputed, or None if it cannot be recomputed separately. If the layer saves a tensor
    with the same name anyway, that tensor counts once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """A kind of layer. Layers of one kind are identical."""

    kind: str  # unique name, for tables
    parts: tuple[LayerPart, ...]  # parts in forward order
    tensors: tuple[SavedTensor, ...]  # storages saved without recompute, each tagged with the parts that save it
    input: SavedTensor | None = None
    """Input from which the whole layer is recomputed, or None if it cannot be recomputed. Its tags are `layer_input` and the
    parts that also save it."""
    gradient_bytes: int = 0  # bytes of parameter gradients, allocated in the layer's backward; part of the static bytes

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        for name in names:
            if name in (LAYER, LAYER_INPUT) or names.count(name) > 1:
                raise ConfigError(f"part {name!r} of layer {self.kind!r} has a reserved or duplicate name. Use a unique name.")

    def make_model(self) -> LayerModel:
        """Return the layer model for the simulator and the solver."""
        own_input = () if self.input is None else (self.input,)
        saved = {tensor.name: tensor for tensor in (*own_input, *self.tensors)}
        if self.gradient_bytes:
            # Static memory already counts these gradients, so subtract them between the layer's forward and its backward.
            last = self.parts[-1].name
            saved["gradients"] = SavedTensor(name="gradients", tags=(last,), size_bytes=-self.gradient_bytes, stays=True)
        return LayerModel(
            kind=self.kind,
            segments=tuple(
                Segment(
                    name=part.name,
                    forward_s=part.forward_s,
                    backward_s=part.backward_s,
                    backward_extra_bytes=part.backward_extra_bytes,
                )
                for part in self.parts
            ),
            tensors=tuple(saved.values()),
            units=tuple(dataclasses.replace(unit, extra_s=_CHECKPOINT_S) for unit in self._list_units()),
        )

    def _make_whole(self, kept: SavedTensor) -> UnitModel:
        names = tuple(part.name for part in self.parts)
        drops = tuple(tensor.name for tensor in self.tensors if tensor != kept)
        return UnitModel(name=LAYER, segments=names, drops=drops, keeps=(kept,), before=names[-1], covers=names)

    def _list_units(self) -> list[UnitModel]:
        units = [] if self.input is None else [self._make_whole(self.input)]
        for part in self.parts:
            if part.input is None:
                continue
            kept = dataclasses.replace(part.input, tags=tuple(dict.fromkeys((*part.input.tags, part.name))))
            dropped = tuple(one.name for one in self.tensors if one.tags == (part.name,) and one.name != kept.name)
            units.append(
                UnitModel(name=part.name, segments=(part.name,), drops=dropped, keeps=(kept,), before=part.name, covers=())
            )
        return units


def make_rank(
    layers: Sequence[MeasuredLayer],
    *,
    link: LinkModel,
    static_bytes: int,
    microbatches: int = 1,
    policy: TransferPolicy | None = None,
    host_budget_bytes: int | None = None,
) -> RankModel:
    """Return the model of a single rank that runs `layers` forward and backward for each microbatch of a step.

    `static_bytes` excludes activations. `policy` defaults to `TransferPolicy()`. By default, host memory is unlimited.
    """
    models = {layer: layer.make_model() for layer in layers}
    numbered = tuple(NumberedLayer(number=number, model=models[layer]) for number, layer in enumerate(layers))
    return RankModel(
        rank=0,
        static_bytes=static_bytes,
        chunks=(ChunkModel(layers=numbered),),
        passes=list_passes(Pipeline(microbatches=microbatches), rank=0),
        link=link,
        policy=policy or TransferPolicy(),
        host_budget_bytes=host_budget_bytes,
        host_pace=HostPace.STEP_AHEAD,
        turning_chunk=0,
    )
