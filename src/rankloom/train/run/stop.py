"""End a run early without leaving a rank behind: all ranks stop after the same step.

Ctrl-C (SIGINT), SIGTERM and a closed terminal (SIGHUP) only set a flag (world/leave.py says where they do not). After each step an
all-reduce of two numbers combines the flags of all ranks, while the next step computes. So a stop takes effect at most two steps after the
signal, and no rank waits for it. After the last step a signal interrupts work that no other rank waits for. A second signal of the same
kind, a second later or more, ends this rank at once. A step may take minutes, so the first signal is acknowledged by a thread, at once.
"""

import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from rankloom.world.leave import ONE_REQUEST, handling_stop_signals
from rankloom.world.world import World

SECONDS_TO_SPEAK = 1.0   # at the end, for an acknowledgement that waits for the terminal


class _Interrupted(BaseException):
    """A signal came during work that may stay unfinished."""


class StopSignal:
    """A context in which `number` is the signal that asked for a stop, or 0.

    A launcher stopped by Ctrl-C may send SIGTERM to ranks that have had SIGINT. So only a second signal of the same kind means "at once".

    acknowledge: called with the number of the first signal, in a thread of its own: a handler runs in the middle of other code, which may
                 be writing to the same file or terminal
    """

    def __init__(self, acknowledge: Callable[[int], None] | None = None) -> None:
        self.number = 0
        self._until = 0.0   # signals up to then belong to the first request
        self._acknowledge = acknowledge
        self._told: SimpleQueue[int] = SimpleQueue()   # safe in a signal handler, as an Event is not
        self._speaker: threading.Thread | None = None
        self._interruptible = False
        self._handling = handling_stop_signals(self._handle)

    def run_unless_stopped(self, work: Callable[[], None]) -> None:
        """Run `work` of this rank alone: not at all after a signal; one that comes meanwhile interrupts it."""
        self._interruptible = True
        try:
            if not self.number:
                work()
        except _Interrupted:
            pass
        finally:
            self._interruptible = False

    def __enter__(self) -> Self:
        if self._acknowledge is not None:
            self._speaker = threading.Thread(target=self._speak, args=(self._acknowledge,), daemon=True, name="rankloom-stop")
            self._speaker.start()
        self._handling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handling.__exit__(None, None, None)
        if self._speaker is not None:
            self._told.put(0)
            self._speaker.join(SECONDS_TO_SPEAK)

    def _speak(self, acknowledge: Callable[[int], None]) -> None:
        number = self._told.get()
        if number:
            acknowledge(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == self.number and number != signal.SIGHUP and now > self._until:   # a closed terminal may send it several times
            raise SystemExit(128 + number)
        if not self.number:
            self.number, self._until = number, now + ONE_REQUEST
            self._told.put(number)
        if self._interruptible:
            self._interruptible = False
            raise _Interrupted


class Agreement:
    """Tells all ranks, one step later, that some rank got a signal or cannot go on.

    sent: one all-reduce of 2 elements per step
    """

    def __init__(self, world: World):
        self._world = world
        self._handle: Any = None

    def exchange(self, signal_number: int, problem: bool) -> tuple[int, bool]:
        """Start an exchange of this rank's two flags; returns the result of the previous one."""
        known = self.last()
        # On the CPU: copies to and from a GPU would wait for the step.
        mine = torch.tensor([float(signal_number), float(problem)], dtype=torch.float32, device="cpu")
        self._handle = self._world.all_reduce(mine, op="max", label="stop?", async_op=True)
        return known

    def last(self) -> tuple[int, bool]:
        """Wait for the exchange in flight: the greatest signal number and whether any rank has a problem. None in flight: (0, False)."""
        if self._handle is None:
            return 0, False
        number, problem = self._handle.wait().tolist()
        self._handle = None
        return int(number), bool(problem)
