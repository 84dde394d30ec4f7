"""What happens when: calls that say so."""

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
