"""Start without the garbage collector: importing torch makes 300,000 objects, and all of them stay.

Python's collector would look at all of them again and again while they come, and when the process ends: a quarter of the time of a run
of a few steps. Looking also writes to their memory, which forked processes share until then.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """What there is at the end of the block stays until the process ends: the collector never looks at it. Inside it collects nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
