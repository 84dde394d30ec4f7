"""End this process at once, on purpose, without closing anything that other ranks would have to join."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_at_once(code: int) -> NoReturn:
    """Exit with `code`, after flushing the output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError):   # the reader has ended, or a signal came in the middle of a line
            stream.flush()
    os._exit(code)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal end this process at once, with exit code 128 + the number of the signal.

    Raising an exception would not work: a library that is being imported may take KeyboardInterrupt for a failure of its own, and raise
    another error. A signal that was ignored before (nohup) stays ignored. train/stop.py takes over while there is state to save.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda number, frame: leave_at_once(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
