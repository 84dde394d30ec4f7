"""How long tests wait: so that none fails because others keep the processor busy. How fast things are is for `benchmarks/` to show."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AT_ONCE = 20.0   # seconds: what has to wait for nobody is over by then, anywhere; the time-outs of a test are far below or far above
STARTED = 300.0   # a process that imports torch is at work by then; it took 100 on two cores that ten others wanted
SETTLED = 0.1   # seconds for which the number of threads must not change


def threads_of_this_process() -> int:
    """How many there are, once the number no longer changes: the kernel lists a thread until a moment after `Thread.join` has returned."""
    count, since = -1, time.monotonic()
    while time.monotonic() < since + SETTLED:
        if (now := len(os.listdir("/proc/self/task"))) != count:
            count, since = now, time.monotonic()
        time.sleep(0.005)
    return count


def wait_until(condition: Callable[[], Any], seconds: float = AT_ONCE) -> None:
    """Returns when `condition()` is true, and fails when it does not come to that."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come to that in {seconds:g} s"
        time.sleep(0.001)


@contextmanager
def no_thread_is_left(name: str = "rank-") -> Iterator[None]:
    """Every thread whose name begins so and that starts in the block ends; an earlier test may have left some to their time-out.

    It fails with what the first one left is doing.
    """
    def left() -> list[threading.Thread]:
        return [thread for thread in {*threading.enumerate()} - before if thread.name.startswith(name)]

    before = {*threading.enumerate()}
    yield
    try:
        wait_until(lambda: not left())
    except AssertionError:
        for thread in left():
            frame = sys._current_frames().get(thread.ident)
            raise AssertionError(f"{thread.name} has not ended:\n{''.join(traceback.format_stack(frame))}") from None
