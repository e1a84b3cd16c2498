"""One function for many things, by several processes, each a copy of this one: `fgoffload plan` uses all cores.

    >>> with share_work():
    ...     map_in_processes(str, [1, 2, 3])
    ['1', '2', '3']

What comes out is the same with any number of processes: each thing is worked on by itself, and results are in order. Where
nobody allows it, in a training for one, whose device no copy could use, all is done by this process.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fgoffload.errors import OffloadError

Item = TypeVar("Item")
Result = TypeVar("Result")

_allowed_processes = 1


@contextlib.contextmanager
def share_work(processes: int | None = None) -> Iterator[None]:
    """Allow copies of this process while the body runs. No device is in use, and no other thread holds a lock for long.

    Args:
        processes: How many share the work, this one with them. None takes one for each core; one where none can be copied.
    """
    global _allowed_processes
    before = _allowed_processes
    can_copy = "fork" in multiprocessing.get_all_start_methods()
    _allowed_processes = (_count_cores() if processes is None else processes) if can_copy else 1
    try:
        yield
    finally:
        _allowed_processes = before


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return what `function` makes of each of `items`, in order.

    Args:
        function: Runs Python alone. What it returns can be pickled, and what it changes is lost.
        items: What for. They need not be pickled: the copies have them.
    """
    work = list(items)
    count = max(1, min(_allowed_processes, len(work)))
    own, *others = (work[first::count] for first in range(count))
    workers: list[_Worker] = []
    try:
        workers += [_Worker(functools.partial(_map, function, share)) for share in others]
        found = [_map(function, own)]
        # Where a worker ended without a result its share is done here, and an error is raised where somebody sees it.
        found += [worker.collect() or _map(function, share) for worker, share in zip(workers, others, strict=True)]
    finally:
        for worker in workers:
            worker.stop()
    return [found[place % count][place // count] for place in range(len(work))]


def _count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _map(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]


class _Worker:
    """A copy of this process that does one thing.

    Args:
        work: What, as a function whose result can be pickled.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(work, results), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: the one that waits for Ctrl-C, and those of NumPy's libraries, which no copy calls.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        # While the worker's end is open here too, nobody would see that the worker is gone.
        results.close()

    def collect(self) -> Any:
        """Wait for the result, and return it; None where the worker ended without one."""
        try:
            return self._results.recv()
        except EOFError:
            return None

    def stop(self) -> None:
        """End the worker, whether it is through or not."""
        self._process.terminate()
        self._process.join()
        self._results.close()


def _work(work: Callable[[], Any], results: Connection) -> None:
    # Ctrl-C reaches all processes of a terminal: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with share_work(processes=1):
        try:
            found = work()
        except OffloadError:
            return
    with contextlib.suppress(BrokenPipeError):
        results.send(found)
