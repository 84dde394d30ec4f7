"""A signal whose handler raises, sent to the main thread when it is where a test wants it."""

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from patience import AT_ONCE


class Bell(Exception):
    """Raised by the signal's handler."""


@contextmanager
def bell_once_inside(function: Callable[..., Any]) -> Iterator[None]:
    """Ring when the main thread has been inside `function` for a moment: by the clock alone, a busy machine would hear it before."""
    def ring(number: int, frame: FrameType | None) -> None:
        raise Bell

    def watch() -> None:
        end = time.monotonic() + AT_ONCE
        while not _is_inside(function) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.1)   # whoever waits without Python frames has begun to by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before, watcher = signal.signal(signal.SIGUSR1, ring), threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()
        signal.signal(signal.SIGUSR1, before)


def _is_inside(function: Callable[..., Any]) -> bool:
    gc.disable()   # CPython 3.11 holds the lock on its list of threads meanwhile: if a collection lets another thread begin or end one,
    try:           # both wait for ever, one of them with the interpreter, so that no signal is handled either
        frame = sys._current_frames()[threading.main_thread().ident]
    finally:
        gc.enable()
    while frame and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
