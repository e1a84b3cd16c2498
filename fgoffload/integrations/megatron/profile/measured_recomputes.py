"""Builds the planner's models of recompute units, the parts of a layer that a plan can recompute, from recorded runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fgoffload.integrations.megatron.profile.measured_units import LAYER_INPUT, LayerFacts, WatchedUnit, keeps_bits
from fgoffload.integrations.megatron.profile.step_records import Run, SavedRecord
from fgoffload.planner.ranks.layer_model import SavedTensor, Segment, UnitModel

_PARTIAL_UNITS = (("qkv_linear", "core_attn"), ("mlp_fc1", "mlp_fc2"), ("expert_fc1", "expert_fc2"))
"""Units of `partial_recompute.py`, each with the tag of the submodule that follows the recomputed part."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnitBuilder:
    """Builds the models of one layer's recompute units."""

    facts: LayerFacts
    run: Run
    """Recorded forward and backward of the layer for one microbatch."""
    names: Mapping[int, str]
    """Names of the layer's saved tensors, keyed by storage key."""
    is_in_all_layers: Callable[[int], bool]
    """Returns whether all layers save the storage with a given key."""

    def build(self, segments: Sequence[Segment]) -> tuple[UnitModel, ...]:
        """Return models of the units that reduce the layer's saved bytes. `segments` are the layer's segments."""
        units = [self._build_watched(unit, segments) for unit in self.facts.watched]
        if "layer" in self.facts.units:
            units.insert(0, self._build_whole(segments))
        if "moe_act" in self.facts.units:
            units.append(self._build_activation())
        if "dispatch" in self.facts.units:
            units.append(self._build_permutation(segments))
        parts = [(unit, until) for unit, until in _PARTIAL_UNITS if unit in self.facts.units]
        units += [self._build_partial_recompute(unit, until, segments) for unit, until in parts]
        return tuple(unit for unit in units if unit is not None and unit.drops)

    def _build_whole(self, segments: Sequence[Segment]) -> UnitModel:
        is_saved = LAYER_INPUT in self.names.values()
        is_held = self.run.input_key in self.run.saved and not is_saved
        own = SavedTensor(name=LAYER_INPUT, tags=("layer_input",), size_bytes=self.run.input_bytes)
        return UnitModel(
            name="layer",
            segments=tuple(segment.name for segment in segments),
            drops=tuple(name for key, name in self.names.items() if name != LAYER_INPUT and not self.is_in_all_layers(key)),
            keeps=() if is_saved or is_held else (own,),
            before=segments[-1].name,
        )

    def _build_watched(self, unit: WatchedUnit, segments: Sequence[Segment]) -> UnitModel | None:
        record = self.run.modules.get(unit.name)
        if record is None or not record.segments or not keeps_bits(unit, record):
            return None
        inside = tuple(record.segments)
        dropped = {key for key, saved in self.run.saved.items() if unit.name in saved.modules and key not in record.inputs} | (
            record.outputs if unit.is_refilled else frozenset()
        )
        output_bytes = sum(saved.size_bytes for key, saved in self.run.saved.items() if key in record.outputs)
        # Megatron's checkpoint copies the recomputed output into place. The copy moves about as many bytes as the norm.
        copy_s = sum(segment.forward_s for segment in segments if segment.name in inside) if unit.is_refilled else 0.0
        # A view keeps its whole storage alive. Megatron's value, for example, is a view of a tensor with query, key and value.
        input_bytes = sum(size_bytes for key, size_bytes in record.input_bytes.items() if key not in self.run.saved)
        own = SavedTensor(name=f"input of {unit.name}", tags=(), size_bytes=input_bytes)
        return UnitModel(
            name=unit.name,
            segments=inside,
            drops=tuple(name for key, name in self.names.items() if key in dropped),
            keeps=(own,) if input_bytes else (),
            before=self._find_end(unit.name) if unit.is_refilled else inside[-1],
            **self._count_copy(copy_s, output_bytes if unit.is_refilled else 0),
        )

    def _build_activation(self) -> UnitModel | None:
        if not {"moe_act", "expert_fc2"} <= self.run.segments.keys():
            return None
        outputs = {key: saved for key, saved in self.run.saved.items() if next(iter(saved.tags), None) == "expert_fc2"}
        output_bytes = sum(saved.size_bytes for saved in outputs.values())
        # Without fusion, the activation's operators save intermediate results as large as its output. The probabilities, its
        # other input, are smaller.
        inside = {
            key
            for key, saved in self.run.saved.items()
            if list(saved.tags) == ["moe_act"]
            and key != self.run.input_keys.get("moe_act", key)
            and saved.size_bytes >= output_bytes
        }
        return UnitModel(
            name="moe_act",
            segments=("moe_act",),
            drops=tuple(name for key, name in self.names.items() if key in outputs or key in inside),
            before="expert_fc2",
            **self._count_copy(0.0, output_bytes),
        )

    def _count_copy(self, seconds: float, size_bytes: int) -> dict[str, Any]:
        """Return the cost of copying an output into place. Without FP8, only Megatron's own checkpoint makes this copy."""
        kind = "extra" if self.facts.is_quantized else "copy"
        return {f"{kind}_s": seconds, f"{kind}_bytes": size_bytes}

    def _build_permutation(self, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        tokens, permuted = (self.run.input_keys.get(tag, -1) for tag in ("router", "expert_fc1"))
        # The recompute starts from the router's input, which the router saves. An fp32 router saves an fp32 copy instead.
        if tokens not in self.names or permuted not in self.names or not {"router", "expert_fc1"} <= set(names):
            return None
        token_bytes, permuted_bytes = (self.run.saved[key].size_bytes for key in (tokens, permuted))
        segment = segments[names.index("expert_fc1") - 1]
        # Sorting by expert reads and writes the permuted tokens, and is not recomputed.
        fraction = (token_bytes + permuted_bytes) / (token_bytes + 3 * permuted_bytes)
        return UnitModel(
            name="dispatch",
            segments=(segment.name,),
            drops=(self.names[permuted],),
            held=(self.names[permuted],),
            before="expert_fc1",
            forward_part=fraction,
        )

    def _build_partial_recompute(self, unit: str, until: str, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        if not {unit, until} <= set(names):
            return None
        inside = tuple(names[names.index(unit) : names.index(until)])
        given = self.run.input_keys.get(unit)
        passed_on = {key for key, saved in self.run.saved.items() if self._is_passed_on(key, saved, until)}
        dropped = {key for key, saved in self.run.saved.items() if saved.segments and saved.segments.keys() <= set(inside)} - {
            given
        }
        return UnitModel(
            name=unit,
            segments=inside,
            drops=tuple(name for key, name in self.names.items() if key in dropped | passed_on),
            before=until,
        )

    def _is_passed_on(self, key: int, saved: SavedRecord, until: str) -> bool:
        """Return whether the storage is an input of the module tagged `until`, or a contiguous copy of an input."""
        if next(iter(saved.tags), None) != until:
            return False
        record = self.run.modules.get(until)
        if record is None:
            return True  # the module is a linear layer, which saves only its input
        return key in record.inputs or (key not in record.outputs and saved.size_bytes in record.tensor_bytes)

    def _find_end(self, norm: str) -> str:
        """Return the last segment that uses a norm's output. The norm is recomputed before that segment's backward."""
        names = list(self.run.segments)
        tagged = [name for name in names if self.run.segments[name].tag is not None]
        if norm == "mlp_norm":
            return (tagged or names)[-1]
        before_mlp = [name for name in tagged if name in ("qkv_linear", "core_attn", "attn_proj")]
        return before_mlp[-1] if before_mlp else names[-1]
