"""A host that starts no more threads: the limit of its user, or of its container, is reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_thread_starts() -> Iterator[None]:
    """Inside, to start a thread is the error that Python raises then."""
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield
