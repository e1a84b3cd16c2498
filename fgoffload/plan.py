"""What happens to each site of a rank: keep, recompute or offload.

The plan is where planner and engine meet: the planner writes one, the engine reads one, and neither imports the other.
"""

import contextlib
import dataclasses
import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.errors import PlanError
from fgoffload.text_files import parse_json, read_text_file

FORMAT = 1
"""Version of the JSON that `OffloadPlan.to_json` writes. Raise it when an older reader would misread a newer file."""


TOKENS = "tokens"
"""In what a plan was made for: of a microbatch, sequence length times sequences."""

MICROBATCHES = "microbatches"
"""In what a plan was made for: of a step, on each data-parallel rank. Only there where more of them would be in flight at once
if the step had more: else a plan holds for any number."""

PARAMETER_BYTES = "params_dtype_bytes"
"""In what a plan was made for: of a parameter, and of what is between layers: 2 for bf16 and fp16, 4 for fp32."""

FP8_RECIPE, NO_FP8 = "fp8_recipe", "none"
"""In what a plan was made for: as in `--fp8-recipe`, and what it is without FP8."""

_AT_MOST = (TOKENS, MICROBATCHES)
"""Of what there may be fewer: then everything is smaller, and the budget holds."""

_LOSS_WINDOW, _MADE_FOR = "loss_window_bytes", "made_for"
_KEYS = ("format", _MADE_FOR, _LOSS_WINDOW, "sites")


class Action(enum.Enum):
    """What is done about a site.

    Offload is about what the site's module saves; recompute is about what the module computes, which nobody has to save where
    backward runs the module again. So a site can have both: a norm that runs again, and whose input is on the host until then.
    """

    KEEP = "keep"  # what it saves stays on the device until backward
    RECOMPUTE = "recompute"  # the module runs again in backward; what it needs for that stays on the device
    OFFLOAD = "offload"  # what it saves leaves for host memory during forward and returns before backward
    RECOMPUTE_AND_OFFLOAD = "recompute+offload"  # the module runs again in backward; what it needs for that leaves and returns

    __hash__ = object.__hash__
    """Members are themselves alone. The hash of `Enum` is Python, and takes several times as long."""

    def __init__(self, value: str) -> None:
        # Said once: who makes a plan asks a million times, and to look up other members takes as long as a call.
        self._offloads, self._recomputes = "offload" in value, "recompute" in value

    @property
    def offloads(self) -> bool:
        """Return whether what the site saves leaves."""
        return self._offloads

    @property
    def recomputes(self) -> bool:
        """Return whether the site's module runs again in backward."""
        return self._recomputes


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Site:
    """One tag in one layer of one model chunk.

    Args:
        chunk: Model chunk on this rank, from 0: the virtual pipeline stage under an interleaved schedule, else 0.
        layer: Layer of the whole model, from 0.
        tag: A tag of the registry, or a unit of `fgoffload.tags.RECOMPUTE_UNITS`.
    """

    chunk: int
    layer: int
    tag: str

    def __str__(self) -> str:
        """Return the label used in logs, errors and profiler ranges: `layers.3.core_attn`."""
        return f"layers.{self.layer}.{self.tag}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """The action for every site of all ranks. A site that the plan does not name is kept.

    Args:
        actions: The action by site.
        loss_window_bytes: How many bytes may be in flight to the host when the loss begins; compute waits for the rest, which
            the planner counted as gone. None: no wait.
        made_for: What the plan was made for: fields of Megatron-Core's TransformerConfig by name, and `TOKENS`,
            `MICROBATCHES`, `PARAMETER_BYTES` and `FP8_RECIPE`. None if unknown.
    """

    actions: Mapping[Site, Action]
    loss_window_bytes: int | None = None
    made_for: Mapping[str, int | str] | None = None

    @property
    def offloaded_tags(self) -> tuple[str, ...]:
        """The tags of what leaves, in order."""
        return tuple(sorted({site.tag for site, action in self.actions.items() if action.offloads}))

    def get_action(self, site: Site) -> Action:
        """Return the action for `site`: `Action.KEEP` where the plan is silent."""
        return self.actions.get(site, Action.KEEP)

    def list_layer(self, chunk: int, layer: int) -> dict[str, Action]:
        """Return what the plan says of one layer, by tag or unit."""
        return {site.tag: action for site, action in self.actions.items() if site.chunk == chunk and site.layer == layer}

    def count(self, action: Action) -> int:
        """Return how many sites the plan gives `action`."""
        return sum(1 for chosen in self.actions.values() if chosen is action)

    @classmethod
    def from_fraction(cls, sites: Sequence[Site], fraction: float) -> "OffloadPlan":
        """Return the plan that offloads `fraction` of `sites` and keeps the rest.

        The sites that stay are the last ones of forward: backward wants them first, so their way out and back could hide
        behind nothing. The number is exact: of 10 sites, 0.9 keeps 1 and 0.8 keeps 2. A part of a site is not offloaded.

        Args:
            sites: In the order in which forward reaches them.
            fraction: From 0 to 1.
        """
        # 1e-9 undoes the binary rounding of decimal fractions: 0.29 * 100 is 28.999999999999996.
        offloaded = int(fraction * len(sites) + 1e-9)
        return cls(actions={site: Action.OFFLOAD if i < offloaded else Action.KEEP for i, site in enumerate(sites)})

    def to_json(self) -> str:
        """Return the plan as JSON, one site a row, in order."""
        rows = [
            {"chunk": site.chunk, "layer": site.layer, "tag": site.tag, "action": self.actions[site].value}
            for site in sorted(self.actions)
        ]
        window = {} if self.loss_window_bytes is None else {_LOSS_WINDOW: self.loss_window_bytes}
        made_for = {} if self.made_for is None else {_MADE_FOR: dict(self.made_for)}
        return json.dumps({"format": FORMAT, **made_for, **window, "sites": rows}, indent=1)

    def check_made_for(self, found: Mapping[str, int | str]) -> None:
        """Check that the plan was made for what it is used for, as far as both say.

        Args:
            found: By the names of `made_for`.

        Raises:
            PlanError: It was made for something else, with the first difference.
        """
        for name, planned in (self.made_for or {}).items():
            actual = found.get(name, planned)
            if actual != planned and not (name in _AT_MOST and _is_below(actual, planned)):
                raise PlanError(
                    f"The plan was made for {name} {planned}, and this training has {actual}. Plan for this training, or leave "
                    f"`{_MADE_FOR}` out of the plan's file, where only its sites have to be there."
                )

    @classmethod
    def from_json(cls, text: str, *, source: str) -> "OffloadPlan":
        """Return the plan that `text` holds.

        Args:
            text: What `to_json` wrote.
            source: Where `text` came from, for the error.

        Raises:
            PlanError: `text` is no plan of this format.
        """
        fix = "Give a file that `OffloadPlan.to_json` wrote."
        document = parse_json(text, name=source, fix=fix, error_type=PlanError)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            raise PlanError(f"{source} is a plan of format {found!r}; this version reads format {FORMAT}. Plan again.")
        unknown = [key for key in document if key not in _KEYS]
        if unknown:
            raise PlanError(f"{source} has {unknown[0]!r}, which is nothing that a plan has: {', '.join(_KEYS)}. Leave it out.")
        actions: dict[Site, Action] = {}
        for number, row in _enumerate_rows(document, source):
            site, action = _read_row(row, number, source)
            if site in actions:
                raise PlanError(
                    f"{source}: row {number} of `sites` names {site} in chunk {site.chunk} a second time. Leave one."
                )
            actions[site] = action
        return cls(
            actions=actions,
            loss_window_bytes=_read_loss_window(document, source),
            made_for=_read_made_for(document, source),
        )

    @classmethod
    def load(cls, path: Path) -> "OffloadPlan":
        """Return the plan in the file at `path`.

        Raises:
            PlanError: The file cannot be read, or holds no plan.
        """
        source = f"--offload-plan {path}"
        text = read_text_file(path, name=source, fix="Give the path of a plan file.", error_type=PlanError)
        return cls.from_json(text, source=source)


NOTHING = OffloadPlan(actions={})
"""The plan that keeps all."""


def _is_below(actual: int | str, planned: int | str) -> bool:
    return isinstance(actual, int) and isinstance(planned, int) and actual < planned


def _enumerate_rows(document: Mapping[str, Any], source: str) -> Iterable[tuple[int, Any]]:
    rows = document.get("sites")
    if not isinstance(rows, list):
        raise PlanError(f"{source} has no list `sites`. Give a file that `OffloadPlan.to_json` wrote.")
    return enumerate(rows)


def _read_loss_window(document: Mapping[str, Any], source: str) -> int | None:
    size = document.get(_LOSS_WINDOW)
    if size is not None and (type(size) is not int or size < 0):
        raise PlanError(f"{source}: {_LOSS_WINDOW} is {size!r}. It is a whole number of bytes from 0, or left out.")
    return size


def _read_made_for(document: Mapping[str, Any], source: str) -> dict[str, int | str] | None:
    found = document.get(_MADE_FOR)
    if found is None:
        return None
    if not isinstance(found, dict) or any(type(value) not in (int, str) for value in found.values()):
        raise PlanError(f"{source}: {_MADE_FOR} is {found!r}. It has whole numbers or words by name, or is left out.")
    return found


def _read_row(row: Any, number: int, source: str) -> tuple[Site, Action]:
    try:
        chunk, layer = row["chunk"], row["layer"]
        # By type: int() takes 1.9 for 1 and "3" for 3, and JSON's true is an int in Python.
        if type(chunk) is not int or type(layer) is not int:
            raise TypeError("chunk and layer are whole numbers")
        return Site(chunk=chunk, layer=layer, tag=str(row["tag"])), Action(row["action"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{source}: row {number} of `sites` is {row!r}. It needs chunk and layer (whole numbers), tag, and action "
            f"({', '.join(action.value for action in Action)})."
        ) from error


@contextlib.contextmanager
def naming_plan_file(path: Path | None) -> Iterator[None]:
    """Let each `PlanError` from inside begin with the file that the plan is of; None where it is of none."""
    try:
        yield
    except PlanError as error:
        if path is None:
            raise
        raise PlanError(f"--offload-plan {path}: {error}") from error
