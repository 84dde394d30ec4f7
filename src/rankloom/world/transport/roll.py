"""How ranks on several hosts find out that they make different calls. Nobody waits for another host before its call has moved its data.

When a call begins (levels.py: `_begin`), each rank notes it here, and the ranks of a host compare theirs in shared memory. The first rank
of the host then tells the first ranks of the other hosts: the number of the call, what it is, and the lengths of all ranks of its host.
These are compared as soon as one has both, its own call and what the other tells of the call of that number: when it begins its own, or
when it hears of the other (wire.py). If they differ, the group breaks.
Before a call ends (`_end`), the first rank waits until the other first ranks have told of it, and compares the lengths. So no call ends
on any rank before it has begun on all.
"""

from collections import deque
from collections.abc import Sequence


class Roll:
    """Which collective each rank has begun, as it is sent: the number of the call, then its `Descriptor` (call.py)."""

    def __init__(self) -> None:
        self.mine = [0] * 6
        self.answers: dict[int, list[int]] = {}   # which one other ranks have begun, as they answered when asked
        self._begun: dict[int, deque[list[int]]] = {}   # what others have told of calls that this rank has not ended

    @property
    def number(self) -> int:
        """The number of this rank's last call; the first is 1."""
        return self.mine[0]

    def begin(self, call: Sequence[int]) -> int | None:
        """Begin this rank's next call. Returns a rank that has begun another call under the same number, or None."""
        self.mine = [self.number + 1, *call]
        return next((peer for peer in self._begun if (words := self.begun_by(peer)) and not self._fits(words)), None)

    def hear(self, peer: int, words: list[int]) -> bool:
        """Note the call that another rank has begun. Returns whether it agrees with this rank's, if that has the same number."""
        self._begun.setdefault(peer, deque()).append(words)
        return self._fits(words)

    def begun_by(self, peer: int) -> list[int] | None:
        """What another rank has told of the call that this rank is in, or None."""
        calls = self._begun.get(peer, ())
        while calls and calls[0][0] < self.number:
            calls.popleft()
        return calls[0] if calls and calls[0][0] == self.number else None

    def _fits(self, words: list[int]) -> bool:
        return words[0] != self.number or words[:len(self.mine)] == self.mine
