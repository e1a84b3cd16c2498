"""Ends the process within two seconds of Ctrl-C, whatever it is doing.

Python raises KeyboardInterrupt only when the main thread runs Python code again. A long operator, a backward pass on a GPU or a
library that swallows exceptions can delay this indefinitely. Therefore, a second thread receives the signal through a pipe, and
ends the process if the main thread does not stop in time.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

GRACE_SECONDS = 1.0
"""Seconds that the main thread has to close files before the process ends."""


@contextlib.contextmanager
def end_soon_after_interrupt(exit_code: int) -> Iterator[None]:
    """End the process with `exit_code` if the body has not ended `GRACE_SECONDS` after Ctrl-C.

    Does nothing outside the main thread, since Python delivers signals only to the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)  # `set_wakeup_fd` requires this: a signal handler must not block
    body_ended = threading.Event()
    earlier_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(read_end, body_ended, exit_code), name="fgoffload-interrupt", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        body_ended.set()
        signal.set_wakeup_fd(earlier_fd)
        # Closing the pipe may not wake the watcher, since forked data loaders keep it open. So send a byte.
        os.write(write_end, bytes([_STOP]))
        watcher.join()
        os.close(write_end)
        os.close(read_end)


_STOP = 0
"""Byte that stops the watcher. No signal has this number."""


def _watch(read_end: int, body_ended: threading.Event, exit_code: int) -> None:
    while (received := os.read(read_end, 1)[0]) != _STOP:
        if received == signal.SIGINT and not body_ended.wait(GRACE_SECONDS):
            print("fgoffload: interrupted", file=sys.stderr, flush=True)
            os._exit(exit_code)
