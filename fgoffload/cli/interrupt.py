"""Ending soon after Ctrl-C, whatever the process is doing.

Python raises KeyboardInterrupt when the interpreter next runs in the main thread. A long operator, a backward on a GPU or a
library that swallows exceptions can put that off for as long as they like. So a second thread hears of the signal too, from
the C handler through a pipe, and ends the process when the main thread has not come back in time.

A module that is being imported is the worst place for KeyboardInterrupt: extension modules abort the process, or make it an
ImportError or RuntimeError of their own (torch, SciPy and dataclasses do, each about once in 300 imports). There it waits.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

GRACE_SECONDS = 1.0
"""How long the main thread may take to close what is open. Half of the two seconds within which the process has to be gone."""

IMPORT_POLL_SECONDS = 0.02
"""How soon an interrupt that found a module being imported tries again. `GRACE_SECONDS` bound how long it can go on."""


@contextlib.contextmanager
def end_soon_after_interrupt(exit_code: int, *, on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """End the process with `exit_code` when the body has not ended `GRACE_SECONDS` after Ctrl-C.

    Outside the main thread, where Python delivers no signals, this does nothing.

    Args:
        exit_code: Of the process, when it has to be ended.
        on_interrupt: Called in the main thread before KeyboardInterrupt is raised there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # `set_wakeup_fd` asks for it: a signal handler must not block
    body_ended = threading.Event()
    earlier_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(read_end, body_ended, exit_code), name="fgoffload-interrupt", daemon=True)
    watcher.start()
    earlier_handler = signal.getsignal(signal.SIGINT)
    # A process that ignores the signal, as jobs in the background do, goes on ignoring it.
    if earlier_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, functools.partial(_interrupt, on_interrupt))
    try:
        yield
    finally:
        if earlier_handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, earlier_handler)
        body_ended.set()
        signal.set_wakeup_fd(earlier_fd)
        # Not by the end of the pipe: processes that were forked meanwhile, as data loaders are, hold it open while they live.
        os.write(write_end, bytes([_STOP]))
        watcher.join()
        os.close(write_end)
        os.close(read_end)


def _interrupt(on_interrupt: Callable[[], None], number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        # A signal to this thread, not a flag for the interpreter alone: it has to wake a call that sleeps in the kernel.
        again = threading.Timer(IMPORT_POLL_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        again.daemon = True  # the process may end before
        again.start()
        return
    on_interrupt()
    signal.default_int_handler(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether `frame` runs, however deep, for an import. Compiled code has no frame: its caller, the importer, has."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


_STOP = 0
"""What the watcher is told when there is nothing left to watch: the number of no signal."""


def _watch(read_end: int, body_ended: threading.Event, exit_code: int) -> None:
    while (received := os.read(read_end, 1)[0]) != _STOP:
        if received == signal.SIGINT and not body_ended.wait(GRACE_SECONDS):
            print("fgoffload: interrupted", file=sys.stderr, flush=True)
            os._exit(exit_code)
