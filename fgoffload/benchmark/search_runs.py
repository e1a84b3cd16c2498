"""Measures what a search for Megatron-Core's flags asks for, and says what there is to search. Loads torch."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgoffload.benchmark.job import Job, Message, Run
from fgoffload.benchmark.measurement import Outcome, find_ratio
from fgoffload.benchmark.processes import run_sessions
from fgoffload.benchmark.search import Measured, Sample, SearchSpace
from fgoffload.benchmark.settings import NOTHING, ProcessKind, Setting, list_recomputes
from fgoffload.integrations.megatron import megatron_engine
from fgoffload.integrations.megatron.model_config import list_accepted
from fgoffload.tags import default_tags

WARMUP, STEPS = 1, 3
"""Of each setting that is tried: what wins is measured again with all others."""

_OF_EXPERTS = frozenset({"shared_expert", "router", "expert_fc1", "moe_act", "expert_fc2", "fused_group_mlp", "moe_combine"})
"""Tags that save nothing in a model without experts."""

_NOT_SEARCHED = frozenset({"layer_input", "fused_group_mlp", "gdp_qkv"})
"""Tags that ask for another layer than most models have, or for full recompute beside: named by hand with --settings."""


def make_space(transformer: Mapping[str, Any]) -> SearchSpace:
    """Return what Megatron-Core's flags can be for a model.

    Args:
        transformer: The fields of Megatron's config that were given.
    """
    left_out = _NOT_SEARCHED if transformer.get("num_moe_experts") else _NOT_SEARCHED | _OF_EXPERTS
    names = [name for name in default_tags().names if name not in left_out]
    return SearchSpace(
        modules=tuple(list_accepted(names)),
        recomputes=tuple(list_recomputes(transformer)),
        has_fraction=megatron_engine.has_fraction(),
    )


class SearchRuns:
    """Runs settings for a search, each round in a process of its own that Megatron-Core's engine can run in.

    Args:
        job: What is measured.
        folder: For the logs of the processes; made when the first one starts.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = dataclasses.replace(job, warmup=WARMUP, steps=STEPS, trace_folder=None)
        self.on_message: Callable[[Message], None] = lambda message: None
        """Called with what rank 0 says."""
        self._folder = folder
        self._sessions = 0

    def measure(self, settings: Sequence[Setting]) -> Measured:
        """Return what came of `settings`, and of `nothing` before them."""
        self._folder.mkdir(exist_ok=True)
        runs = [Run(setting=setting, repeat=0) for setting in (NOTHING, *settings)]
        outcomes: list[Outcome] = []
        for outcome in run_sessions(
            self.job,
            runs,
            kind=ProcessKind.MEGATRON,
            first_session=self._sessions,
            log_folder=self._folder,
            on_message=self.on_message,
        ):
            outcomes.append(outcome)
            self._sessions = max(self._sessions, outcome.session + 1)
        samples: dict[Setting, Sample] = {}
        failures: dict[Setting, str] = {}
        for index, outcome in enumerate(outcomes):
            ratio, measurement = find_ratio(outcomes, index), outcome.measurement
            if ratio is not None and measurement is not None and measurement.peak_bytes is not None:
                samples[outcome.setting] = Sample(ratio, measurement.peak_bytes)
            else:
                failures[outcome.setting] = outcome.failure or "nothing counted its memory"
        return Measured(samples, failures)
