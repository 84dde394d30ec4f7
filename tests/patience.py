"""How long tests wait: so that none fails because others keep the processor busy. How fast things are is for `benchmarks/` to show."""

import os
import time
from collections.abc import Callable
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
