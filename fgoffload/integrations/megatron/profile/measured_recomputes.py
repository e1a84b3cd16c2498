"""Builds models of a layer's recompute units for the planner, from recorded runs."""

from collections.abc import Callable, Mapping, Sequence

from fgoffload.integrations.megatron.profile.measured_units import LAYER_INPUT, LayerFacts, UnitForm, WatchedUnit, keeps_bits
from fgoffload.integrations.megatron.profile.step_records import Run, SavedRecord
from fgoffload.planner.ranks.layer_model import SavedTensor, Segment, UnitModel

MeasureGather = Callable[[int, int], float]
"""Returns the seconds to gather rows of so many bytes (second argument) from tokens of so many bytes (first argument)."""

_WHOLE_PERMUTATION = 1.2
"""Time of a fused permutation, relative to a gather of the same bytes. It also looks up the source of each row. On an H100 such
a gather of 64 to 256 MiB takes 0.117 ms and the whole permutation 0.14. Source: docs/results/runs/w2_h100_kernels.csv."""

_FIRST_PARTS = (("qkv_linear", "core_attn"), ("mlp_fc1", "mlp_fc2"), ("expert_fc1", "expert_fc2"))
"""Units of partial_recompute.py, each with the tag at which its recompute ends."""


class UnitBuilder:
    """Builds the models of one layer's recompute units.

    Args:
        facts: Facts about the layer.
        run: One forward and backward of the layer.
        names: Names of the tensors that it saves, by the key of their storage.
        is_in_all_layers: Returns whether all layers save the storage of a key.
        measure_gather_s: Measures the seconds of a token gather.
    """

    def __init__(
        self,
        facts: LayerFacts,
        run: Run,
        names: Mapping[int, str],
        is_in_all_layers: Callable[[int], bool],
        measure_gather_s: MeasureGather,
    ) -> None:
        self._facts = facts
        self._run = run
        self._names = names
        self._is_in_all_layers = is_in_all_layers
        self._measure_gather_s = measure_gather_s

    def build(self, segments: Sequence[Segment]) -> tuple[UnitModel, ...]:
        """Return the units that reduce the saved bytes of a layer with these segments."""
        units = [self._build_watched(unit, segments) for unit in self._facts.watched]
        if "layer" in self._facts.units:
            units.insert(0, self._build_whole(segments))
        if "moe_act" in self._facts.units:
            units.append(self._build_activation())
        if "dispatch" in self._facts.units:
            units.append(self._build_permutation(segments))
        parts = [(unit, until) for unit, until in _FIRST_PARTS if unit in self._facts.units]
        units += [self._build_partial_recompute(unit, until, segments) for unit, until in parts]
        return tuple(unit for unit in units if unit is not None and unit.drops)

    def _build_whole(self, segments: Sequence[Segment]) -> UnitModel:
        is_saved = LAYER_INPUT in self._names.values()
        is_held = self._run.input_key in self._run.saved and not is_saved
        own = SavedTensor(name=LAYER_INPUT, tags=("layer_input",), size_bytes=self._run.input_bytes)
        return UnitModel(
            name="layer",
            segments=tuple(segment.name for segment in segments),
            drops=tuple(name for key, name in self._names.items() if name != LAYER_INPUT and not self._is_in_all_layers(key)),
            keeps=() if is_saved or is_held else (own,),
            before=segments[-1].name,
        )

    def _build_watched(self, unit: WatchedUnit, segments: Sequence[Segment]) -> UnitModel | None:
        record = self._run.modules.get(unit.name)
        if record is None or not record.segments or not keeps_bits(unit, record):
            return None
        inside = tuple(record.segments)
        dropped = {key for key, saved in self._run.saved.items() if unit.name in saved.modules and key not in record.inputs} | (
            record.outputs if unit.form is UnitForm.REFILL else frozenset()
        )
        output_bytes = sum(saved.size_bytes for key, saved in self._run.saved.items() if key in record.outputs)
        is_refilled = unit.form is UnitForm.REFILL
        # Megatron's checkpoint copies the recomputed output to the place where others read it. The copy reads and writes about
        # as many bytes as the norm itself.
        copy_s = sum(segment.forward_s for segment in segments if segment.name in inside) if is_refilled else 0.0
        copy_bytes = output_bytes if is_refilled else 0
        is_copied = self._facts.is_quantized
        # A view keeps its whole storage: Megatron's value is a view of a tensor with query, key and value.
        input_bytes = sum(size_bytes for key, size_bytes in record.input_bytes.items() if key not in self._run.saved)
        own = SavedTensor(name=f"input of {unit.name}", tags=(), size_bytes=input_bytes)
        return UnitModel(
            name=unit.name,
            segments=inside,
            drops=tuple(name for key, name in self._names.items() if key in dropped),
            keeps=(own,) if input_bytes else (),
            before=self._find_end(unit.name) if is_refilled else inside[-1],
            extra_s=copy_s if is_copied else 0.0,
            extra_bytes=copy_bytes if is_copied else 0,
            copy_s=0.0 if is_copied else copy_s,
            copy_bytes=0 if is_copied else copy_bytes,
        )

    def _build_activation(self) -> UnitModel | None:
        if not {"moe_act", "expert_fc2"} <= self._run.segments.keys():
            return None
        outputs = {key: saved for key, saved in self._run.saved.items() if next(iter(saved.tags), None) == "expert_fc2"}
        output_bytes = sum(saved.size_bytes for saved in outputs.values())
        # Without fusion, the activation's operators save their intermediate results, each as large as its output. The
        # probabilities that it gets as input are smaller.
        inside = {
            key
            for key, saved in self._run.saved.items()
            if list(saved.tags) == ["moe_act"]
            and key != self._run.input_keys.get("moe_act", key)
            and saved.size_bytes >= output_bytes
        }
        return UnitModel(
            name="moe_act",
            segments=("moe_act",),
            drops=tuple(name for key, name in self._names.items() if key in outputs or key in inside),
            before="expert_fc2",
            extra_bytes=output_bytes if self._facts.is_quantized else 0,
            copy_bytes=0 if self._facts.is_quantized else output_bytes,
        )

    def _build_permutation(self, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        given, made = (self._run.input_keys.get(tag) for tag in ("router", "expert_fc1"))
        if not {"router", "expert_fc1"} <= set(names) or given is None or made is None:
            return None
        # The recompute starts from the tensor that the router saves. An fp32 router saves a copy of its own.
        if given not in self._names or made not in self._names:
            return None
        given_bytes, made_bytes = (self._run.saved[key].size_bytes for key in (given, made))
        segment = segments[names.index("expert_fc1") - 1]
        # Part of the memory traffic is the sort by expert, which reads and writes the permuted tokens. It is not recomputed. If
        # the host is late, the device spends most of the segment waiting for it.
        part = (given_bytes + made_bytes) / (given_bytes + 3 * made_bytes)
        again_s = min(part * segment.forward_s, _WHOLE_PERMUTATION * self._measure_gather_s(given_bytes, made_bytes))
        return UnitModel(
            name="dispatch",
            segments=(segment.name,),
            drops=(self._names[made],),
            held=(self._names[made],),
            before="expert_fc1",
            forward_part=0.0,
            extra_s=again_s,
        )

    def _build_partial_recompute(self, unit: str, until: str, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        if not {unit, until} <= set(names):
            return None
        inside = tuple(names[names.index(unit) : names.index(until)])
        given = self._run.input_keys.get(unit)
        handed_on = {key for key, saved in self._run.saved.items() if self._is_handed_on(key, saved, until)}
        dropped = {key for key, saved in self._run.saved.items() if saved.segments and saved.segments.keys() <= set(inside)} - {
            given
        }
        return UnitModel(
            name=unit,
            segments=inside,
            drops=tuple(name for key, name in self._names.items() if key in dropped | handed_on),
            before=until,
        )

    def _is_handed_on(self, key: int, saved: SavedRecord, until: str) -> bool:
        """Return whether the module of tag `until` got this storage as input, or made it as a contiguous copy."""
        if next(iter(saved.tags), None) != until:
            return False
        record = self._run.modules.get(until)
        if record is None:
            return True  # a linear, which saves only its input
        return key in record.inputs or (key not in record.outputs and saved.size_bytes in record.tensor_bytes)

    def _find_end(self, norm: str) -> str:
        """Return the segment before whose backward a norm is recomputed: the last one that uses the norm."""
        names = list(self._run.segments)
        tagged = [name for name in names if self._run.segments[name].tag is not None]
        if norm == "mlp_norm":
            return (tagged or names)[-1]
        before_mlp = [name for name in tagged if name in ("qkv_linear", "core_attn", "attn_proj")]
        return before_mlp[-1] if before_mlp else names[-1]
