"""A signal whose handler raises, sent to the main thread when it is where a test wants it."""

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
    """Ring when the main thread has been inside `function` for a moment: by the clock alone, a busy machine would hear it before.

    The main thread tells that itself. To look at its frames from another thread is no way: they may go meanwhile, and CPython 3.11 then
    follows pointers to what is no frame any more.
    """
    begun = threading.Event()

    def tell(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is function.__code__:
            sys.setprofile(None)
            begun.set()

    def ring(number: int, frame: FrameType | None) -> None:
        raise Bell

    def watch() -> None:
        begun.wait(AT_ONCE)
        time.sleep(0.1)   # whoever waits without Python frames has begun to by now
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before, watcher = signal.signal(signal.SIGUSR1, ring), threading.Thread(target=watch)
    watcher.start()
    sys.setprofile(tell)
    try:
        yield
    finally:
        sys.setprofile(None)
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
