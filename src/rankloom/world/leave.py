"""End this process at once, on purpose: without taking anything down that other ranks would have to join."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_at_once(code: int) -> NoReturn:
    """Exit with `code`; what was printed is shown."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, RuntimeError):   # nobody reads; or a signal came in the middle of a line
            stream.flush()
    os._exit(code)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal end this process at once, with 128 + the number of the signal.

    An exception would not do: a library that is just being imported may take KeyboardInterrupt for a failure of its own, and raise
    something else. A signal that was ignored before (nohup) stays ignored. train/stop.py takes over while there is something to save.
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
