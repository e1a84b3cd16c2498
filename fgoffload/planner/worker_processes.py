"""One function for many things, by several processes, each a copy of this one: `fgoffload plan` uses all cores.

    >>> with share_work():
    ...     map_in_processes(str, [1, 2, 3])
    ['1', '2', '3']

What comes out is the same with any number of processes: each thing is worked on by itself, and results are in order. Where
nobody allows it, in a training for one, whose device no copy could use, all is done by this process; so it is where copies are
not to be made (`_can_copy`), and what a copy that could not be made, or that ended early, should have done.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fgoffload.errors import OffloadError

Item = TypeVar("Item")
Result = TypeVar("Result")

_allowed_processes = 1

_TICKET_BYTES = 4
_MOST_TICKETS = 512
"""In a pipe at once: so many bytes are written, and read, as a whole. Where there is more to do a ticket is for each 512th."""


@contextlib.contextmanager
def share_work(processes: int | None = None) -> Iterator[None]:
    """Allow copies of this process while the body runs. No device is in use, and no other thread holds a lock for long.

    Args:
        processes: How many share the work, this one with them. None takes one for each core.
    """
    global _allowed_processes
    before = _allowed_processes
    _allowed_processes = _count_cores() if processes is None else processes
    try:
        yield
    finally:
        _allowed_processes = before


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], *, niceness: int = 0) -> list[Result]:
    """Return what `function` makes of each of `items`, in order.

    Each process begins with one of the first of them, this one with the very first, and takes the next that nobody has taken
    whenever it is through with one.

    Args:
        function: Runs Python alone. What it returns can be pickled, and what it changes is lost; but what the first item has it
            change, and import, this process keeps.
        items: What for. They need not be pickled: the copies have them.
        niceness: Of the copies, beyond that of this process: where this one has a core, and shares work of its own, they wait.
    """
    work = list(items)
    count = max(1, min(_allowed_processes, len(work))) if _can_copy() else 1
    if count == 1:
        return [function(item) for item in work]
    found: dict[int, Result] = {}
    workers: list[_Worker] = []
    with contextlib.closing(_Tickets(count, len(work))) as tickets:
        do_own = functools.partial(_do, function, work, tickets)
        try:
            for first in range(1, count):
                try:
                    workers.append(_Worker(functools.partial(do_own, first), earlier=workers, niceness=niceness))
                except OSError:  # no more processes, files or memory for now
                    break
            found |= do_own(0)
            for worker in workers:
                found |= worker.collect() or {}
        finally:
            for worker in workers:
                worker.stop()
    # What a worker had taken that ended without a result is done here, and an error is raised where somebody sees it.
    return [found[number] if number in found else function(item) for number, item in enumerate(work)]


def _can_copy() -> bool:
    """Return whether this process may have copies.

    Not on macOS, whose libraries do not stand it, nor where somebody chose another way to start processes; and a daemonic
    process, as those of a pool are, may have no children.
    """
    # The first of all is the default. To ask for the chosen one alone would choose it, and nobody could choose another one.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and sys.platform != "darwin" and not multiprocessing.current_process().daemon


def _count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _do(function: Callable[[Item], Result], work: Sequence[Item], tickets: "_Tickets", first: int) -> dict[int, Result]:
    """Return by number what comes of the thing with the number `first`, and of all that this process takes after it."""
    return {number: function(work[number]) for number in itertools.chain((first,), tickets.take())}


class _Tickets:
    """The numbers of things to do, of which each process that shares them takes the next one.

    A pipe that is full and closed: what one process reads of it no other does, and nobody has to wait for one that was killed.

    Args:
        begin: The first number.
        end: The number behind the last one.
    """

    def __init__(self, begin: int, end: int) -> None:
        self._stride = max(1, min(end - begin, _MOST_TICKETS))
        self._end = end
        self._source: int | None = None
        with contextlib.suppress(OSError):  # with no file left nobody takes one
            self._source, target = os.pipe()
            firsts = range(begin, min(begin + self._stride, end))
            os.write(target, b"".join(number.to_bytes(_TICKET_BYTES, "little") for number in firsts))
            os.close(target)

    def take(self) -> Iterator[int]:
        """Yield the next number that nobody has taken, until there is none."""
        while self._source is not None and (ticket := os.read(self._source, _TICKET_BYTES)):
            yield from range(int.from_bytes(ticket, "little"), self._end, self._stride)

    def close(self) -> None:
        """Take no more."""
        if self._source is not None:
            os.close(self._source)


class _Worker:
    """A copy of this process that does one thing.

    Args:
        work: What, as a function whose result can be pickled.
        earlier: Workers that were started before, and that are not stopped yet.
        niceness: More than that of this process.

    Raises:
        OSError: There is no worker: the system has no more processes or files for this one.
    """

    def __init__(self, work: Callable[[], Any], *, earlier: Sequence["_Worker"] = (), niceness: int = 0) -> None:
        context = multiprocessing.get_context("fork")
        self.results, results = context.Pipe(duplex=False)
        read_here = [self.results, *(worker.results for worker in earlier)]
        self._process = context.Process(target=_work, args=(work, results, read_here, niceness), daemon=True)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads: the one that waits for Ctrl-C, and NumPy's libraries', which no copy calls.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
        except BaseException:
            self.results.close()
            raise
        finally:
            # While the worker's end is open here too, nobody would see that the worker is gone.
            results.close()

    def collect(self) -> Any:
        """Wait for the result, and return it; None where the worker ended without one."""
        try:
            return self.results.recv()
        except (EOFError, OSError):  # it ended before it sent anything, or in the middle of it
            return None

    def stop(self) -> None:
        """End the worker, whether it is through or not."""
        # Not by SIGTERM, which the worker ignores where this process does.
        self._process.kill()
        self._process.join()
        self.results.close()


def _work(work: Callable[[], Any], results: Connection, read_by_first: Sequence[Connection], niceness: int) -> None:
    # Copies of what the first process reads from. While one is open here, no worker would see that the first is gone: whoever
    # sends a result would wait for ever.
    for connection in read_by_first:
        connection.close()
    # Ctrl-C reaches all processes of a terminal: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(niceness)
    with share_work(processes=1):
        try:
            found = work()
        except OffloadError:
            return
    with contextlib.suppress(BrokenPipeError):
        results.send(found)
