"""Writes the streams and the memory of a simulated rank as a Chrome trace, for Perfetto or chrome://tracing.

    write_chrome_trace(simulate(ranks, plan, detail=Detail.TIMELINE), Path("trace.json"), rank=0)

Source: Trace Event Format (Google, 2016): metadata, complete and counter events, with times in microseconds.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fgoffload.errors import ConfigError
from fgoffload.output_files import write_file
from fgoffload.planner.simulation.simulation_result import RankResult, Span, StepResult, StreamName

_MICROSECONDS = 1e6

_THREADS = {StreamName.COMPUTE: 0, StreamName.D2H: 1, StreamName.H2D: 2}  # trace thread of each stream, from top to bottom


MOST_MICROBATCHES = 2
"""Maximum number of microbatches in a trace. Later microbatches look the same, and whole steps take hundreds of megabytes."""

_BACKWARD = re.compile(r"B(\d+)")


def write_chrome_trace(result: StepResult, path: Path, *, rank: int) -> None:
    """Write a trace of a rank to `path`: its streams and its memory, for the first microbatches.

    Args:
        result: A step that was simulated with `Detail.TIMELINE`.
        path: The JSON file to write. An existing file is overwritten.
        rank: Index of the pipeline rank.

    Raises:
        ConfigError: The rank has no timeline, or the file cannot be written.
    """
    events = list(list_events(result.ranks[rank]))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror}. Use a writable path.") from error


def _find_end(spans: Sequence[Span]) -> float:
    found = ((_BACKWARD.match(span.label), span.end_s) for span in spans if span.stream is StreamName.COMPUTE)
    return max((end_s for match, end_s in found if match and int(match[1]) < MOST_MICROBATCHES), default=math.inf)


def list_events(rank: RankResult) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one rank, which viewers show as a process."""
    if rank.timeline is None:
        raise ConfigError(f"rank {rank.rank} was simulated without a timeline. Pass detail=Detail.TIMELINE.")
    own = {"pid": rank.rank}
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"rank {rank.rank}"}, **own}
    yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": rank.rank}, **own}
    for stream, thread in _THREADS.items():
        yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": stream.value}, **own}
        yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": {"sort_index": thread}, **own}
    until_s = _find_end(rank.timeline.spans)
    for stream, label, start_s, end_s, size_bytes in sorted(rank.timeline.spans, key=lambda span: span.start_s):
        if start_s > until_s:
            break
        times = {"ts": start_s * _MICROSECONDS, "dur": (end_s - start_s) * _MICROSECONDS}
        more = {"args": {"bytes": size_bytes}} if size_bytes else {}
        yield {"ph": "X", "name": label, "cat": stream.value, "tid": _THREADS[stream], **times, **more, **own}
    # Emit a counter event only if memory changes. If several events have the same time, viewers show the last one.
    shown: dict[str, int] = {}
    for at_s, device_bytes, host_bytes in rank.timeline.memory:
        if at_s > until_s:
            break
        for name, size_bytes in (("device memory", device_bytes), ("host memory", host_bytes)):
            if shown.get(name) != size_bytes:
                shown[name] = size_bytes
                yield {"ph": "C", "name": name, "ts": at_s * _MICROSECONDS, "args": {"bytes": size_bytes}, **own}
