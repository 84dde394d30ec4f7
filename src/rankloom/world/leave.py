"""Signals that ask a process to stop; and to end it at once, on purpose, without closing anything that other ranks would have to join."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from rankloom.base.files import delete_unfinished

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST = 1.0   # seconds: a scheduler may signal every process of a job, and a launcher passes on what it got; that is one request


def leave_at_once(code: int) -> NoReturn:
    """Exit with `code`, after flushing the output. Files that another thread is writing are deleted."""
    flush_output()
    delete_unfinished()
    os._exit(code)


def say_stopped(number: int) -> None:
    """Tell the user that this signal has ended a run which saves nothing. A handler may call it in the middle of other output."""
    if sys.stderr is not None:   # else another file may have its number
        with suppress(OSError):   # a closed terminal
            os.write(sys.stderr.fileno(), f"stopped by {signal.Signals(number).name}\n".encode())


def flush_output() -> None:
    """Flush what was printed, as far as it can be written."""
    for stream in filter(None, (sys.stdout, sys.stderr)):   # a daemon may have neither
        with suppress(OSError, RuntimeError):   # the reader has ended, or a signal came in the middle of a line
            stream.flush()


@contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal call `handler(number, frame)`.

    A signal that was ignored before (nohup) stays ignored. Outside the main thread no handler can be set: nothing changes there.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def leaving_on_signals(*, as_killed: bool = False) -> Iterator[None]:
    """Inside, these signals end this process at once, with exit code 128 + the number of the signal.

    Raising an exception would not work: a library that is being imported may take KeyboardInterrupt for a failure of its own, and raise
    another error. train/run/stop.py takes over while there is state to save.

    as_killed: for a rank, which ends as if the signal had killed it: from such an exit code a launcher would conclude that all ranks
               have agreed to stop, while others wait for this one
    """
    def leave(number: int, frame: FrameType | None) -> None:
        if as_killed:
            flush_output()
            delete_unfinished()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        say_stopped(number)
        leave_at_once(128 + number)

    with handling_stop_signals(leave):
        yield
