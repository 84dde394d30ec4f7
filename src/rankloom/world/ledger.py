"""What a rank has sent, and how long it waited: the account that tests compare with the bills of base/cost.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Ledger:
    """What one rank has sent to one group so far, and how long it was blocked waiting for it.

    whole: for a twin, the ledger of the first connection. What the twin sends is entered there too. Its waiting is not: another thread
           does it
    """

    messages: int = 0
    bytes: int = 0
    calls: int = 0
    waited: float = 0.0   # seconds blocked in wait(); on CUDA a wait only orders streams, so this stays near 0
    whole: "Ledger | None" = None

    def enter(self, sent: int, messages: int) -> None:
        """Add one call that sent this many bytes in this many messages."""
        self.calls += 1
        self.messages += messages
        self.bytes += sent
        if self.whole is not None:
            self.whole.enter(sent, messages)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, what this thread sends is entered nowhere: calls that look at a model, and are no part of its work."""
        ledgers = [ledger for ledger in (self, self.whole) if ledger is not None]
        before = [(ledger.messages, ledger.bytes, ledger.calls, ledger.waited) for ledger in ledgers]
        try:
            yield
        finally:
            for ledger, numbers in zip(ledgers, before):
                ledger.messages, ledger.bytes, ledger.calls, ledger.waited = numbers
