"""Streams of a GPU that is not there: they only note what was queued on them, or before what they have waited for."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Stream:
    """Knows what was queued on it, and on others before it waited for them."""

    def __init__(self, device: Any = None):
        self.device, self.known = device, set[str]()

    def wait_stream(self, other: "Stream") -> None:
        self.known |= other.known

    def record_event(self) -> Any:
        return SimpleNamespace(known=set(self.known), synchronize=lambda known=set(self.known): ENDED.append(known))

    def wait_event(self, event: Any) -> None:
        self.known |= event.known

    def synchronize(self) -> None:
        ENDED.append(set(self.known))


NOW: list[Stream] = []      # the current stream is the last
ENDED: list[set[str]] = []  # what the host has waited for


def queue(work: str) -> None:
    """Queue work of this name on the current stream."""
    NOW[-1].known.add(work)


@contextlib.contextmanager
def stream(other: Stream) -> Iterator[None]:
    """As torch.cuda.stream."""
    NOW.append(other)
    yield
    NOW.pop()


def pretend(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Put such streams in the place of CUDA's, for all threads. Returns the current one."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NOW[-1])
    NOW[:], ENDED[:] = [Stream()], []
    return NOW[-1]
