"""End a run early without leaving a rank behind: all ranks stop after the same step.

Ctrl-C (SIGINT), SIGTERM and a closed terminal (SIGHUP) only raise a flag; one that was ignored before (nohup) stays
ignored. At each step boundary the ranks add their flags up, in an all-reduce of two numbers that travels while the next
step computes; so a stop takes effect at most two steps after the signal, and costs no waiting. Work after the last step that no
other rank waits for is broken off where it is. A second signal of the same kind ends this rank at once.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from rankloom.world.connect import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _BrokenOff(BaseException):
    """A signal came while work was done that may be left as it is."""


class StopSignal:
    """While it is entered, `number` is the signal that asked for a stop, or 0.

    A launcher that was stopped by Ctrl-C may pass SIGTERM on to ranks that had SIGINT already: only a repetition of the
    same signal means "at once". Outside the main thread no handler can be set; `number` then stays 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._may_break_off = False
        self._before: dict[int, Any] = {}

    def unless_asked(self, work: Callable[[], None]) -> None:
        """Do `work` that this rank does alone; not at all after a signal, and no further than to one that comes meanwhile."""
        self._may_break_off = True
        try:
            if not self.number:
                work()
        except _BrokenOff:
            pass
        finally:
            self._may_break_off = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self.number and number != signal.SIGHUP:   # one closed terminal may say so several times
            raise SystemExit(128 + number)
        self.number = self.number or number
        if self._may_break_off:
            self._may_break_off = False
            raise _BrokenOff


class Agreement:
    """What any rank knows, all ranks know one step later: that a signal came, or that a rank cannot go on.

    sent: one all-reduce of 2 elements per step
    """

    def __init__(self, world: World):
        self._world = world
        self._handle: Any = None

    def exchange(self, signal_number: int, problem: bool) -> tuple[int, bool]:
        """Say what is so here; returns what was so anywhere when all ranks called this the last time."""
        known = self.last()
        mine = torch.tensor([float(signal_number), float(problem)])   # on the CPU: to bring it to a GPU, and back, would wait for the step
        self._handle = self._world.all_reduce(mine, op="max", label="stop?", async_op=True)
        return known

    def last(self) -> tuple[int, bool]:
        """What was so anywhere at the last exchange; (0, False) before there was one. Waits for it."""
        if self._handle is None:
            return 0, False
        number, problem = self._handle.wait().tolist()
        self._handle = None
        return int(number), bool(problem)
