"""How long tests wait: so that none fails because others keep the processor busy. How fast things are is for `benchmarks/` to show."""

import time
from collections.abc import Callable
from typing import Any

AT_ONCE = 20.0   # seconds: what has to wait for nobody is over by then, anywhere; the time-outs of a test are far below or far above
STARTED = 300.0   # a process that imports torch is at work by then; it took 100 on two cores that ten others wanted


def wait_until(condition: Callable[[], Any], seconds: float = AT_ONCE) -> None:
    """Returns when `condition()` is true, and fails when it does not come to that."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come to that in {seconds:g} s"
        time.sleep(0.001)
