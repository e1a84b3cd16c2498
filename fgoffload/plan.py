"""Plans: which sites of a model to keep, recompute or offload. The planner writes plans, and integrations apply them."""

import contextlib
import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.errors import PlanError
from fgoffload.text_files import parse_json, read_text_file

FORMAT = 1
"""Version of the plan file format. Increase it if older readers would misread newer files."""


TOKENS = "tokens"
"""Key of `made_for`: tokens per microbatch (sequence length times number of sequences)."""

MICROBATCHES = "microbatches"
"""Key in `made_for`: microbatches per step on each data-parallel rank. Absent if more microbatches would not increase the
number in flight."""

PARAMETER_BYTES = "params_dtype_bytes"
"""Key in `made_for`: bytes per element of parameters and of activations between layers (2 for bf16 and fp16, 4 for fp32)."""

FP8_RECIPE, NO_FP8 = "fp8_recipe", "none"
"""Key in `made_for` for the value of `--fp8-recipe`, and the value for a run without FP8."""

_AT_MOST = (TOKENS, MICROBATCHES)
"""Keys whose value may be smaller in the training run than in the plan, because smaller values need less memory."""

_LOSS_WINDOW, _MADE_FOR, _PREDICTED = "loss_window_bytes", "made_for", "predicted"
_KEYS = ("format", _MADE_FOR, _LOSS_WINDOW, _PREDICTED, "sites")


class Action(enum.Enum):
    """Treatment of a site's saved tensors.

    Offload copies the module's saved tensors to the host and frees them on the GPU. Recompute reruns the module in backward, so
    its output need not be saved. The two can be combined: for example, a norm is recomputed and its input is offloaded.
    """

    KEEP = "keep"  # saved tensors stay on the device
    RECOMPUTE = "recompute"  # the module is recomputed in backward; its input stays on the device
    OFFLOAD = "offload"  # saved tensors are offloaded in forward and reloaded before backward
    RECOMPUTE_AND_OFFLOAD = "recompute+offload"  # the module is recomputed in backward; its input is offloaded

    __hash__ = object.__hash__
    """Identity hash, several times faster than `Enum`'s own. Safe because members are singletons."""

    @property
    def offloads(self) -> bool:
        """Return whether the site's saved tensors are offloaded."""
        return "offload" in self._value_

    @property
    def recomputes(self) -> bool:
        """Return whether the site's module is recomputed in backward."""
        return "recompute" in self._value_


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Site:
    """One tag in one layer of one model chunk.

    Args:
        chunk: Model chunk on its rank, from 0. In an interleaved schedule, the virtual pipeline stage; otherwise, always 0.
        layer: Layer number in the whole model, from 0.
        tag: Name of a registered tag, or of a unit in `fgoffload.tags.RECOMPUTE_UNITS`.
    """

    chunk: int
    layer: int
    tag: str

    def __str__(self) -> str:
        """Return the label used in logs, errors and profiler ranges: `layers.3.core_attn`."""
        return f"layers.{self.layer}.{self.tag}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Actions for the sites of all ranks. The default action is `Action.KEEP`.

    Args:
        actions: Action of each site.
        loss_window_bytes: Bytes that may be in flight to the host when the loss computation begins. If more are in flight,
            compute waits, because the planner counts the excess as already freed. None disables the wait.
        made_for: Settings of the training run for which the plan was made: fields of Megatron-Core's TransformerConfig, and
            `TOKENS`, `MICROBATCHES`, `PARAMETER_BYTES` and `FP8_RECIPE`. None if unknown.
    """

    actions: Mapping[Site, Action]
    loss_window_bytes: int | None = None
    made_for: Mapping[str, int | str] | None = None

    @property
    def offloaded_tags(self) -> tuple[str, ...]:
        """Return the tags with at least one offloaded site, sorted by name."""
        return tuple(sorted({site.tag for site, action in self.actions.items() if action.offloads}))

    def get_action(self, site: Site) -> Action:
        """Return the action for `site`. The default is `Action.KEEP`."""
        return self.actions.get(site, Action.KEEP)

    def list_layer(self, chunk: int, layer: int) -> dict[str, Action]:
        """Return the actions of one layer, keyed by tag or unit."""
        return {site.tag: action for site, action in self.actions.items() if site.chunk == chunk and site.layer == layer}

    def count(self, action: Action) -> int:
        """Return the number of sites with `action`."""
        return sum(1 for chosen in self.actions.values() if chosen is action)

    @classmethod
    def from_fraction(cls, sites: Sequence[Site], fraction: float) -> "OffloadPlan":
        """Return a plan that offloads `fraction` of `sites` and keeps the rest.

        The plan keeps the last sites in forward order: backward needs them first, so no compute could hide their copies. The
        number of offloaded sites is rounded down. With 10 sites, 0.9 keeps 1 and 0.8 keeps 2.

        Args:
            sites: Sites in forward order.
            fraction: Fraction of the sites, from 0 to 1.
        """
        # 1e-9 undoes the binary rounding of decimal fractions: 0.29 * 100 is 28.999999999999996.
        offloaded = int(fraction * len(sites) + 1e-9)
        return cls(actions={site: Action.OFFLOAD if i < offloaded else Action.KEEP for i, site in enumerate(sites)})

    def to_json(self, *, predicted: Mapping[str, Any] | None = None) -> str:
        """Return the plan as JSON, with one row per site, in sorted order.

        Args:
            predicted: Predicted peak memory and step time, for human readers. `from_json` ignores them.
        """
        rows = [
            {"chunk": site.chunk, "layer": site.layer, "tag": site.tag, "action": self.actions[site].value}
            for site in sorted(self.actions)
        ]
        window = {} if self.loss_window_bytes is None else {_LOSS_WINDOW: self.loss_window_bytes}
        made_for = {} if self.made_for is None else {_MADE_FOR: dict(self.made_for)}
        found = {} if predicted is None else {_PREDICTED: dict(predicted)}
        return json.dumps({"format": FORMAT, **made_for, **window, **found, "sites": rows}, indent=1)

    def check_made_for(self, found: Mapping[str, int | str]) -> None:
        """Compare `made_for` with `found`, the settings of this training run. Keys present in only one of them are ignored.

        Raises:
            PlanError: The plan was made for other settings. The message shows the first difference.
        """
        for name, planned in (self.made_for or {}).items():
            actual = found.get(name, planned)
            is_fewer = name in _AT_MOST and isinstance(actual, int) and isinstance(planned, int) and actual < planned
            if actual != planned and not is_fewer:
                raise PlanError(
                    f"The plan was made for {name} {planned}, but this training run has {actual}. Plan again for this run, or "
                    f"delete `{_MADE_FOR}` from the plan file to check only its sites."
                )

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "OffloadPlan":
        """Parse the output of `to_json`.

        Args:
            text: JSON text.
            source: Name of the text for error messages.

        Raises:
            PlanError: `text` is not a plan of this format.
        """
        fix = "Pass a file that `OffloadPlan.to_json` wrote."
        document = parse_json(text, name=source, fix=fix, error_type=PlanError)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            raise PlanError(f"{source} has plan format {found!r}, but this version reads format {FORMAT}. Plan again.")
        unknown = [key for key in document if key not in _KEYS]
        if unknown:
            raise PlanError(f"{source} has the unknown key {unknown[0]!r}. Remove it. Valid keys: {', '.join(_KEYS)}.")
        actions: dict[Site, Action] = {}
        rows = document.get("sites")
        if not isinstance(rows, list):
            raise PlanError(f"{source} has no `sites` list. {fix}")
        for number, row in enumerate(rows):
            site, action = _read_row(row, number, source)
            if site in actions:
                raise PlanError(
                    f"{source}: row {number} of `sites` repeats {site} of chunk {site.chunk}. Remove one of the two rows."
                )
            actions[site] = action
        window_bytes, made_for = document.get(_LOSS_WINDOW), document.get(_MADE_FOR)
        if window_bytes is not None and (type(window_bytes) is not int or window_bytes < 0):
            raise PlanError(f"{source}: {_LOSS_WINDOW} is {window_bytes!r}. Use a whole number of bytes, or remove it.")
        if made_for is not None and not (
            isinstance(made_for, dict) and all(type(value) in (int, str) for value in made_for.values())
        ):
            raise PlanError(f"{source}: {_MADE_FOR} is {made_for!r}. Use an object of integers and strings, or remove it.")
        return cls(actions=actions, loss_window_bytes=window_bytes, made_for=made_for)

    @classmethod
    def load(cls, path: Path) -> "OffloadPlan":
        """Return the plan in the file at `path`.

        Raises:
            PlanError: The file cannot be read or is not a plan.
        """
        source = f"--offload-plan {path}"
        text = read_text_file(path, name=source, fix="Pass the path of a plan file.", error_type=PlanError)
        return cls.from_json(text, source=source)


NOTHING = OffloadPlan(actions={})
"""Plan that keeps all saved tensors on the GPU."""


def _read_row(row: Any, number: int, source: str) -> tuple[Site, Action]:
    try:
        chunk, layer = row["chunk"], row["layer"]
        # Compare types: int() accepts 1.9 and "3", and JSON's true is an int in Python.
        if type(chunk) is not int or type(layer) is not int:
            raise TypeError("chunk and layer must be integers")
        return Site(chunk=chunk, layer=layer, tag=str(row["tag"])), Action(row["action"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{source}: row {number} of `sites` is {row!r}. It needs chunk and layer (integers), tag, and action "
            f"({', '.join(action.value for action in Action)})."
        ) from error


@contextlib.contextmanager
def naming_plan_file(path: Path | None) -> Iterator[None]:
    """Prefix each `PlanError` from the body with the plan file's path. Without a path, errors are unchanged."""
    try:
        yield
    except PlanError as error:
        if path is None:
            raise
        raise PlanError(f"--offload-plan {path}: {error}") from error
