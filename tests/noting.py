"""What happens when: calls that say so, and calls that come late."""

import random
import time
from collections.abc import Callable
from typing import Any


def noting(collective: Callable[..., Any], note: Callable[[str], Any]) -> Callable[..., Any]:
    """An asynchronous `collective` that notes when it begins, and when its handle is waited for."""
    def noted(*args: Any, **kwargs: Any) -> Any:
        note("begins")
        handle = collective(*args, **kwargs)
        wait = handle.wait
        handle.wait = lambda: note("waits") or wait()
        return handle

    return noted


def late(call: Callable[..., Any], draw: random.Random, most: float) -> Callable[..., Any]:
    """`call` after a random pause of at most so many seconds: a missing wait, or ranks in another order, shows."""
    def paused(*args: Any, **kwargs: Any) -> Any:
        time.sleep(draw.random() * most)
        return call(*args, **kwargs)

    return paused
