"""Builds models of a layer's recompute units for the planner, from recorded runs.

[Note: Time of a permutation]
A recorded step shows the time of a token permutation only if the device is never idle in its segment. The host waits for the
token counts there, and if it is slow, most of the segment is idle time. In `launch_bound_moe.sh` on an H100 the segment takes
0.95 ms, of which the permutation takes 0.05.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fgoffload.engine import Device
from fgoffload.integrations.megatron.profile.measured_units import LAYER_INPUT, LayerFacts, WatchedUnit, keeps_bits
from fgoffload.integrations.megatron.profile.step_records import Run, SavedRecord
from fgoffload.planner.ranks.layer_model import SavedTensor, Segment, UnitModel

MeasureGather = Callable[[int, int], float]
"""Returns the seconds to gather rows of so many bytes (second argument) from tokens of so many bytes (first argument)."""

_WHOLE_PERMUTATION = 1.2
"""Time of a fused permutation, relative to a gather of the same bytes. It also looks up the source of each row. On an H100 such
a gather of 64 to 256 MiB takes 0.117 ms and the whole permutation 0.14. Source: docs/results/runs/w2_h100_kernels.csv."""

_FIRST_PARTS = (("qkv_linear", "core_attn"), ("mlp_fc1", "mlp_fc2"), ("expert_fc1", "expert_fc2"))
"""Units of partial_recompute.py, each with the tag at which its recompute ends."""

_ROW_BYTES = 4096
"""Approximate bytes of a token. The time of a gather of such rows depends on their bytes, not on their channels."""
_BATCH = 8
"""Consecutive gathers per measurement, so that events and the first launch add little."""
_REPEATS = 3
"""Measurements of a size, of which the fastest counts. Other load on the machine can only slow a gather down."""


def measure_gather_s(device: Device, given_bytes: int, made_bytes: int) -> float:
    """Return the seconds of gathering rows of `made_bytes` from tokens of `given_bytes`. See [Note: Time of a permutation].

    Allocates memory for both and frees it. Random states do not change.

    Streams:
        Gathers on the current stream. The host waits for each batch of them.
    """
    given, made = (max(1, size_bytes // _ROW_BYTES) for size_bytes in (given_bytes, made_bytes))
    tokens = torch.zeros(given, _ROW_BYTES // 2, dtype=torch.bfloat16, device=device.type)
    rows = torch.empty(made, _ROW_BYTES // 2, dtype=torch.bfloat16, device=device.type)
    # Sorted by expert, rows of one token lie far apart. Uses its own generator to leave the run's random states alone.
    generator = torch.Generator(device=device.type)
    generator.manual_seed(0)
    indices = torch.randperm(made, generator=generator, device=device.type) % given
    best_s = math.inf
    for _ in range(1 + _REPEATS):  # the first warms up
        start = device.record_event(device.current_stream(), is_timed=True)
        for _ in range(_BATCH):
            torch.index_select(tokens, 0, indices, out=rows)
        end = device.record_event(device.current_stream(), is_timed=True)
        device.synchronize(end)
        best_s = min(best_s, device.measure_seconds(start, end) / _BATCH)
    return best_s


@dataclasses.dataclass(frozen=True, slots=True)
class UnitBuilder:
    """Builds the models of one layer's recompute units."""

    facts: LayerFacts
    run: Run
    """One forward and backward of the layer."""
    names: Mapping[int, str]
    """Names of the tensors that it saves, by the key of their storage."""
    is_in_all_layers: Callable[[int], bool]
    """Returns whether all layers save the storage of a key."""
    measure_gather_s: MeasureGather

    def build(self, segments: Sequence[Segment]) -> tuple[UnitModel, ...]:
        """Return the units that reduce the saved bytes of a layer with these segments."""
        units = [self._build_watched(unit, segments) for unit in self.facts.watched]
        if "layer" in self.facts.units:
            units.insert(0, self._build_whole(segments))
        if "moe_act" in self.facts.units:
            units.append(self._build_activation())
        if "dispatch" in self.facts.units:
            units.append(self._build_permutation(segments))
        parts = [(unit, until) for unit, until in _FIRST_PARTS if unit in self.facts.units]
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
        # Megatron's checkpoint copies the recomputed output to the place where others read it. The copy reads and writes about
        # as many bytes as the norm itself.
        copy_s = sum(segment.forward_s for segment in segments if segment.name in inside) if unit.is_refilled else 0.0
        copy_bytes = output_bytes if unit.is_refilled else 0
        is_copied = self.facts.is_quantized
        # A view keeps its whole storage: Megatron's value is a view of a tensor with query, key and value.
        input_bytes = sum(size_bytes for key, size_bytes in record.input_bytes.items() if key not in self.run.saved)
        own = SavedTensor(name=f"input of {unit.name}", tags=(), size_bytes=input_bytes)
        return UnitModel(
            name=unit.name,
            segments=inside,
            drops=tuple(name for key, name in self.names.items() if key in dropped),
            keeps=(own,) if input_bytes else (),
            before=self._find_end(unit.name) if unit.is_refilled else inside[-1],
            extra_s=copy_s if is_copied else 0.0,
            extra_bytes=copy_bytes if is_copied else 0,
            copy_s=0.0 if is_copied else copy_s,
            copy_bytes=0 if is_copied else copy_bytes,
        )

    def _build_activation(self) -> UnitModel | None:
        if not {"moe_act", "expert_fc2"} <= self.run.segments.keys():
            return None
        outputs = {key: saved for key, saved in self.run.saved.items() if next(iter(saved.tags), None) == "expert_fc2"}
        output_bytes = sum(saved.size_bytes for saved in outputs.values())
        # Without fusion, the activation's operators save their intermediate results, each as large as its output. The
        # probabilities that it gets as input are smaller.
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
            extra_bytes=output_bytes if self.facts.is_quantized else 0,
            copy_bytes=0 if self.facts.is_quantized else output_bytes,
        )

    def _build_permutation(self, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        given, made = (self.run.input_keys.get(tag) for tag in ("router", "expert_fc1"))
        if not {"router", "expert_fc1"} <= set(names) or given is None or made is None:
            return None
        # The recompute starts from the tensor that the router saves. An fp32 router saves a copy of its own.
        if given not in self.names or made not in self.names:
            return None
        given_bytes, made_bytes = (self.run.saved[key].size_bytes for key in (given, made))
        segment = segments[names.index("expert_fc1") - 1]
        # Part of the memory traffic is the sort by expert, which reads and writes the permuted tokens. It is not recomputed. If
        # the step is launch-bound, the device spends most of the segment waiting for it.
        part = (given_bytes + made_bytes) / (given_bytes + 3 * made_bytes)
        again_s = min(part * segment.forward_s, _WHOLE_PERMUTATION * self.measure_gather_s(given_bytes, made_bytes))
        return UnitModel(
            name="dispatch",
            segments=(segment.name,),
            drops=(self.names[made],),
            held=(self.names[made],),
            before="expert_fc1",
            forward_part=0.0,
            extra_s=again_s,
        )

    def _build_partial_recompute(self, unit: str, until: str, segments: Sequence[Segment]) -> UnitModel | None:
        names = [segment.name for segment in segments]
        if not {unit, until} <= set(names):
            return None
        inside = tuple(names[names.index(unit) : names.index(until)])
        given = self.run.input_keys.get(unit)
        handed_on = {key for key, saved in self.run.saved.items() if self._is_handed_on(key, saved, until)}
        dropped = {key for key, saved in self.run.saved.items() if saved.segments and saved.segments.keys() <= set(inside)} - {
            given
        }
        return UnitModel(
            name=unit,
            segments=inside,
            drops=tuple(name for key, name in self.names.items() if key in dropped | handed_on),
            before=until,
        )

    def _is_handed_on(self, key: int, saved: SavedRecord, until: str) -> bool:
        """Return whether this storage is an input of the module with tag `until`, or a contiguous copy of one."""
        if next(iter(saved.tags), None) != until:
            return False
        record = self.run.modules.get(until)
        if record is None:
            return True  # a linear, which saves only its input
        return key in record.inputs or (key not in record.outputs and saved.size_bytes in record.tensor_bytes)

    def _find_end(self, norm: str) -> str:
        """Return the segment before whose backward a norm is recomputed: the last one that uses the norm."""
        names = list(self.run.segments)
        tagged = [name for name in names if self.run.segments[name].tag is not None]
        if norm == "mlp_norm":
            return (tagged or names)[-1]
        before_mlp = [name for name in tagged if name in ("qkv_linear", "core_attn", "attn_proj")]
        return before_mlp[-1] if before_mlp else names[-1]
