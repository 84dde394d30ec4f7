"""What a caller of the backend gets back: work in flight, which can be waited for and has a future.

torch's own classes (DDP, FSDP2) use either: `wait()` from Python, `get_future()` from C++.
"""

import datetime
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import CollectiveTimeout
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import ANYONE, TIMED_OUT
from rankloom.world.transport.herald import Herald, failing_in_cpp, tell, tell_later
from rankloom.world.transport.operands import Finish
from rankloom.world.transport.profiled import profiled

FOREVER = 1e9    # seconds: the call has its own time-out
FEW = 16         # works in flight, through all of which every new one may look
CHECKUP = 0.05   # seconds between two checks whether a polled message can still come


class Work(dist.Work):
    """Work that has ended. One object serves for all calls that were made at once and have no result to return."""

    _source = -1   # the rank that sent a message; -1 for a collective

    def __init__(self, result: Sequence[Tensor] = ()):
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the result is ready. raises: RankLost, CollectiveTimeout, CollectiveMismatch"""
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return True

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Why it failed, or None."""
        return None

    def synchronize(self) -> None:
        """The same as `wait` on the CPU."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        return self._result

    def source_rank(self) -> int:
        """The rank that sent the message."""
        return self._source

    _source_rank = source_rank

    def stand_for(self, earlier: Sequence["Work"], result: Sequence[Tensor], *then: Finish) -> None:
        """Make waiting for this work finish the earlier works too, and then call `then`. result: that of all of them together"""
        self._result = list(result)

    def get_future(self) -> torch.futures.Future:
        """A future of the result, already set."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


DONE = Work()


class Pending(Work):
    """Work in flight in the background; keeps the tensors alive until it has ended.

    finish: functions that copy the results to where the caller wants them
    """

    peers: Sequence[int] = ()   # the other end of a message
    timeout: float | None = None   # seconds that this call may take; None: the group's time-out

    def __init__(self, channel: Channel, herald: Herald, label: str, result: Sequence[Tensor], keep: Sequence[object],
                 finish: Sequence[Finish]):
        super().__init__(result)
        self._channel, self._herald, self.label = channel, herald, label
        self._keep, self._finish = keep, list(finish)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._ended = False
        self.holder: Unwatched | None = None   # forgets this work when it has ended

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """See `Work.wait`. With a timeout, it raises CollectiveTimeout after that, and the work goes on."""
        seconds = FOREVER if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        if not self._ended:
            with profiled(self.label):
                self._end(self._await(seconds), seconds)
        if self._error:
            raise self._error
        return True

    def stand_for(self, earlier: Sequence[Work], result: Sequence[Tensor], *then: Finish) -> None:
        """See `Work.stand_for`."""
        super().stand_for(earlier, result)
        more = [work.wait for work in earlier]
        with self._lock:
            self._finish = [*more, *self._finish, *then]
            late = self._finish if self._ended and not self._error else []   # another thread has ended it meanwhile
        for finish in late:
            finish()

    def is_completed(self) -> bool:
        """See `Work.is_completed`; copies the results to the caller's tensors when it has ended."""
        self.settle()
        return self._ended

    def settle(self) -> None:
        """If it has ended, copy the results to the caller's tensors."""
        if not self._ended and self._has_ended():
            self._end(self._await(0.0), None)

    def exception(self) -> Exception | None:
        """See `Work.exception`."""
        self.is_completed()
        return self._error

    def get_future(self) -> torch.futures.Future:
        """A future that a thread of this group sets when the work has ended; one that is set, if it has ended by now."""
        future: torch.futures.Future = torch.futures.Future()
        if self._ended:
            tell(self, future)
        else:
            self._herald.announce(self, future)
        return failing_in_cpp(future)

    @property
    def is_one_number(self) -> bool:
        """Whether its result is one number, by itself in memory."""
        return len(self._result) == 1 and self._result[0].numel() == 1 and self._result[0].untyped_storage().nbytes() <= 16

    def _end(self, why: int, seconds: float | None) -> None:
        with self._lock:
            if self._ended:
                return
            is_late = why == TIMED_OUT and not self._has_ended()
            if why == TIMED_OUT and not is_late:   # it may have ended after that wait, and well
                why = self._await(0.0)
            error = self._channel.explain(why, self.label, seconds if is_late else self.timeout, self.peers) if why else None
            if error and is_late:
                raise error   # only this wait is over, not the work
            # Copy results only when nothing can still write to their buffers. Set `_ended` last: other threads read it.
            self._error = error or self._bring_home()
            self._ended = True
            if self.holder is not None:
                self.holder.discard(self)
                self.holder = None   # it may keep this work: a ring, which only the garbage collector would find

    def _bring_home(self) -> Exception | None:
        """Copy the results, and drop the tensors. Returns the error, if any: later calls of `wait` raise it, too."""
        try:
            for finish in self._finish:
                finish()
        except Exception as error:
            return error
        self._keep, self._finish = (), []
        return None

    def _await(self, seconds: float) -> int:
        """Block for at most so many seconds. Returns why it failed, or 0."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        raise NotImplementedError


class Unwatched(set[Pending]):
    """Works in flight whose callers may have dropped them.

    The last 16 works of one number are kept after they have ended: DDP's `join` leaves such a work to C++, which asks for its result
    later, and without the Python object would wait forever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: deque[Pending] = deque(maxlen=16)
        self._many = 0   # how many to look through next

    def add(self, work: Pending) -> None:
        """Keep this work until it has ended; also settle others, as their callers may never ask. Of many, not each time."""
        if len(self) <= FEW or len(self) >= self._many:
            for other in [*self]:
                other.settle()
            self._many = 2 * len(self)
        work.holder = self
        super().add(work)
        if work.is_one_number:
            self._numbers.append(work)


class AllOf(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for each."""
        return all(work.wait(timeout) if timeout else work.wait() for work in self._works)   # each raises if it fails

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> Exception | None:
        """The error of the first work that failed, or None."""
        return next((error for work in self._works if (error := work.exception())), None)

    def get_future(self) -> torch.futures.Future:
        """A future that is set when all have ended; on a device, when the caller's streams wait for them."""
        self.wait()
        return super().get_future()


class Batch(threading.local):
    """The works that a thread begins between _start_coalescing and _end_coalescing. Another thread's are not among them."""

    _works: list[Work] | None = None
    _many = FEW   # how many to look through next

    def open(self) -> None:
        """Note works from now on."""
        self._works, self._many = [], FEW

    def close(self) -> list[Work]:
        """The works that were noted, but for some that had ended well."""
        works, self._works = self._works or [], None
        return works

    def note(self, work: Work) -> None:
        """Note it, if this is open. It may be for long: torch does not close it when an exception ends the block that it was opened for."""
        if self._works is not None:
            if len(self._works) >= self._many:
                self._works = [other for other in self._works if not other.is_success()]
                self._many = max(FEW, 2 * len(self._works))
            self._works.append(work)


class AsBackend:
    """A base class for groups that are their own backend, as torch expects one: several calls can be waited for together."""

    supports_splitting = supports_coalescing = supports_time_estimate = False   # features of torch's backends that are not offered

    barrier: Any

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)   # type: ignore[call-arg]   # torch's: with a store, it would make a group of its own
        self._batch = Batch()

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether torch may ask for memory in which calls are quicker: no, as all ranks would have to ask together."""
        return False

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier with a time-out of its own. Its error names all ranks that did not come, whatever `wait_all_ranks` is."""
        self.barrier(timeout=timeout).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch.open()

    def _end_coalescing(self, device: torch.device) -> Work:
        return AllOf(self._batch.close())

    def _noted(self, work: Work) -> Work:
        self._batch.note(work)
        return work


def last_of(works: Sequence[Work], result: Sequence[Tensor]) -> Work:
    """The last of several works of one group stands for all, as they end in order. result: the result of all of them"""
    if works and works[-1] is not DONE:
        works[-1].stand_for(works[:-1], result)
    return works[-1] if works else Work(result)


class PendingCollective(Pending):
    """A collective in the queue of its group, identified by its ticket."""

    ticket = 0

    def __repr__(self) -> str:
        return f"PendingCollective({self.label!r}, ticket {self.ticket})"

    def _await(self, seconds: float) -> int:
        return self._channel.link.wait(self.ticket, seconds)

    def _has_ended(self) -> bool:
        return self._channel.link.finished() >= self.ticket


class PendingMessage(Pending):
    """A message in flight, identified by its handle."""

    handle = 0
    peers: Sequence[int] = (ANYONE,)
    _looked = 0.0    # when a poll last checked whether the other end still lives

    def is_completed(self) -> bool:
        """See `Pending.is_completed`. Nothing else notices that a polled message can no longer come, so this checks now and then."""
        if not super().is_completed() and time.monotonic() > self._looked + CHECKUP:
            self._looked = time.monotonic()
            if (why := self._await(0.0)) != TIMED_OUT:
                self._end(why, None)
        return super().is_completed()

    has_ended = Pending.is_completed   # only that: to find that it can no longer come breaks the group for all ranks

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """See `Pending.wait`. Without a time-out it waits as long as the group allows, and then breaks the group, as collectives do."""
        if timeout is not None and timeout > datetime.timedelta():   # torch's C++ code passes zero for no timeout
            return super().wait(timeout)
        try:
            return super().wait(datetime.timedelta(seconds=self._channel.timeout))
        except CollectiveTimeout:
            self._channel.give_up_on(self.peers[0])
            raise

    def get_future(self) -> torch.futures.Future:
        """A future with a thread of its own: messages end in any order, and later ones must not wait for this one."""
        future: torch.futures.Future = torch.futures.Future()
        tell_later(self, future)
        return failing_in_cpp(future)

    def _await(self, seconds: float) -> int:
        sender = self._channel.link.settle(self.handle, seconds)
        if sender < 0:
            return -sender
        self._source = sender
        return 0

    def _has_ended(self) -> bool:
        return self._channel.link.settled(self.handle)

    def __del__(self) -> None:
        self._channel.link.drop(self.handle)
