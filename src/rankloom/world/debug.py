"""Debug mode: before any byte moves, all ranks of a group compare what each is about to do.

Without it, two same-shape collectives issued in swapped order add the wrong tensors silently, a wrong dtype
does so too, and a skipped call only times out. With it (`RANKLOOM_DEBUG=1`), every call of every rank is
written to the group's key-value store under its number, and read back by the others: a difference raises
`CollectiveMismatch` on all ranks with both call sites, and a silent rank is named with the last call it made.

Price: one write and p-1 reads of the store per call, so about a millisecond. Off by default.
"""

import datetime
import json
import sys
from dataclasses import asdict, dataclass

import torch.distributed as dist

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank is about to do. Ranks of one group must agree on all of it but the call site."""

    op: str
    shape: str
    dtype: str
    label: str
    site: str      # file:line of the code that called

    def agrees_with(self, other: "Fingerprint") -> bool:
        """Whether both ranks mean the same call; the same call may stand on different lines."""
        mine, theirs = asdict(self), asdict(other)
        return all(mine[key] == theirs[key] for key in ("op", "shape", "dtype", "label"))

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype}{self.shape} labelled {self.label!r} at {self.site}"


class Inspector:
    """Compares the calls of one rank, in order, with those of its group's other ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float):
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.calls = 0

    def check(self, mine: Fingerprint) -> None:
        """Raise unless every rank's call number `calls` is the same call.

        raises: CollectiveMismatch, CollectiveTimeout
        """
        self.calls += 1
        text = json.dumps(asdict(mine))
        self.store.set(self._key(self.rank), text)
        self.store.set(f"last/{self.rank}", json.dumps(asdict(mine) | {"call": self.calls}))
        all_calls = [self._read(rank) for rank in range(self.size)]
        if not all(mine.agrees_with(call) for call in all_calls):
            table = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(all_calls))
            raise CollectiveMismatch(
                f"rank {self.rank}: collective number {self.calls} of this group is not the same on all ranks:\n{table}\n"
                "Every rank must make the same calls in the same order; look at the call sites that differ."
            )
        if self.calls > 1:
            self.store.delete_key(self._key(self.rank, self.calls - 1))   # all have moved past it

    def where_is_everyone(self) -> str:
        """One line per rank: the last call it announced."""
        lines = []
        for rank in range(self.size):
            if not self.store.check([f"last/{rank}"]):
                lines.append(f"  rank {rank}: has made no call yet")
                continue
            last = json.loads(self.store.get(f"last/{rank}"))
            number = last.pop("call")
            lines.append(f"  rank {rank}: call {number}, {Fingerprint(**last)}")
        return "\n".join(lines)

    def _read(self, rank: int) -> Fingerprint:
        try:
            self.store.wait([self._key(rank)], datetime.timedelta(seconds=self.timeout))
        except dist.DistStoreError as error:
            raise CollectiveTimeout(
                f"rank {self.rank}: rank {rank} did not come to collective number {self.calls} "
                f"within {self.timeout:g} s. Who is where:\n{self.where_is_everyone()}"
            ) from error
        return Fingerprint(**json.loads(self.store.get(self._key(rank))))

    def _key(self, rank: int, call: int | None = None) -> str:
        return f"call/{call or self.calls}/{rank}"


def call_site() -> str:
    """file:line of the nearest frame outside `world/`."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("rankloom.world"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
