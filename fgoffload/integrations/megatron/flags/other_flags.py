"""Lists Megatron flags that no plan depends on: they affect neither memory nor time, or are not modeled.

`other_flags.json` groups flags without effect by topic, and unmodeled flags by effect. An entry also covers a `--no-...` form.

Sources: the parser in megatron/training/arguments.py of Megatron-LM core 0.16.1, core 0.19.2 and the main branch of August
2026; torchrun's flags; and our own offload flags.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

_TABLE: Mapping[str, Mapping[str, list[str]]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

WITHOUT_EFFECT = frozenset(flag for flags in _TABLE["without effect"].values() for flag in flags)
"""Flags that change neither saved tensors nor predicted times."""

DECIDED_BY_PLAN = frozenset(_TABLE["without effect"]["offload and recompute, which the plan decides"])
"""Flags for offload and recompute, which the plan replaces."""

_NOT_MODELLED: Mapping[str, str] = {flag: effect for effect, flags in _TABLE["not modelled"].items() for flag in flags}


def has_no_effect(flag: str) -> bool:
    """Return whether `flag` cannot change a plan."""
    return flag in WITHOUT_EFFECT or _drop_no(flag) in WITHOUT_EFFECT


def find_effect(flag: str) -> str | None:
    """Return how the unmodeled `flag` makes predictions wrong, or None for other flags."""
    known = _NOT_MODELLED.get(flag, _NOT_MODELLED.get(_drop_no(flag)))
    return _NOT_MODELLED["--lora-rank"] if known is None and flag.startswith("--lora") else known


def trains_adapters(words: Iterable[str]) -> bool:
    """Return whether the flags in `words` train low-rank adapters and freeze the model's own weights."""
    effect = _NOT_MODELLED["--lora-rank"]
    return any(word.startswith("--") and find_effect(word.partition("=")[0]) == effect for word in words)


def _drop_no(flag: str) -> str:
    return "--" + flag.removeprefix("--no-").removeprefix("--disable-").removeprefix("--")
