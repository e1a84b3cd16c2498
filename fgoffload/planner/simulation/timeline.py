"""A simulated step as a Chrome trace, for Perfetto or chrome://tracing: the streams of each rank, and its memory over time.

    write_chrome_trace(simulate(ranks, plan, detail=Detail.TIMELINE), Path("trace.json"))

Source: Trace Event Format (Google, 2016): metadata, complete and counter events, with times in microseconds.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.output_files import write_file
from fgoffload.planner.simulation.simulation_result import RankResult, RankTimeline, Span, StepResult, StreamName

_MICROSECONDS = 1e6

_THREADS = {StreamName.COMPUTE: 0, StreamName.D2H: 1, StreamName.H2D: 2}
"""The thread that shows a stream, from above."""


def write_chrome_trace(result: StepResult, path: Path) -> None:
    """Write the streams and the memory of all ranks to `path`.

    Args:
        result: A step that was simulated with `Detail.TIMELINE`.
        path: A JSON file; one that is there is written over.

    Raises:
        ConfigError: The step has no timeline, or the file cannot be written.
    """
    events = list(itertools.chain.from_iterable(list_events(rank) for rank in result.ranks))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror}. Give the path of a file that can be written.") from error


def list_events(rank: RankResult) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, which is a process of the trace.

    Raises:
        ConfigError: The rank has no timeline.
    """
    if rank.timeline is None:
        raise ConfigError(f"rank {rank.rank} was simulated without a timeline. Give detail=Detail.TIMELINE.")
    yield _name(rank, "process_name", f"rank {rank.rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "args": {"sort_index": rank.rank}}
    for stream, thread in _THREADS.items():
        yield _name(rank, "thread_name", stream.value, thread)
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank.rank, "tid": thread, "args": {"sort_index": thread}}
    for span in sorted(rank.timeline.spans, key=lambda span: span.start_s):
        yield _show_span(rank, span)
    yield from _list_counters(rank, rank.timeline)


def _name(rank: RankResult, what: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank.rank, "tid": thread, "args": {"name": name}}


def _show_span(rank: RankResult, span: Span) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "name": span.label,
        "cat": span.stream.value,
        "pid": rank.rank,
        "tid": _THREADS[span.stream],
        "ts": span.start_s * _MICROSECONDS,
        "dur": (span.end_s - span.start_s) * _MICROSECONDS,
    }
    if span.size_bytes:
        event["args"] = {"bytes": span.size_bytes}
    return event


def _list_counters(rank: RankResult, timeline: RankTimeline) -> Iterator[dict[str, Any]]:
    """Yield the memory each time that it changes; the last of several values at one moment comes last, and is shown."""
    shown: dict[str, int] = {}
    for sample in timeline.memory:
        for name, size_bytes in (("device memory", sample.device_bytes), ("host memory", sample.host_bytes)):
            if shown.get(name) != size_bytes:
                shown[name] = size_bytes
                yield {
                    "ph": "C",
                    "name": name,
                    "pid": rank.rank,
                    "ts": sample.at_s * _MICROSECONDS,
                    "args": {"bytes": size_bytes},
                }
