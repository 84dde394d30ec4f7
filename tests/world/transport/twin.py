"""A device in host memory, for tests: a thread runs what was submitted, later and at a pace of its own, as a GPU does.

It is stricter than a GPU: to follow a mark that nobody has submitted yet is an error, and so is a mark that goes back.
"""

import contextlib
import ctypes
import itertools
import queue
import random
import threading
import time
import weakref

import torch

from rankloom.base.errors import DeviceError
from rankloom.world.transport.device import RELEASED

PATIENCE = 10.0   # seconds: what is not done by then hangs


class Twin:
    """One rank's end of the device. All of one process share its memory; `room` is what is left of it in bytes."""

    exported, handles = {}, itertools.count()
    submitted, news = {}, threading.Condition()   # by the address of a flag: what somebody will write
    room = 1 << 40

    def __init__(self, seed=0):
        self.device, self.log = torch.device("cpu"), []
        self._random, self._queue, self._failure = random.Random(seed), queue.SimpleQueue(), None
        self._thread = threading.Thread(target=_work, args=(weakref.ref(self), self._queue), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)

    # -------------------------------------------------------------- memory

    def memory(self, address, nbytes):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    def export(self, nbytes):
        if nbytes > self.room:
            raise MemoryError(f"{nbytes} bytes")
        handle = str(next(self.handles))
        self.exported[handle] = torch.zeros(nbytes, dtype=torch.uint8)
        return self.exported[handle], handle

    def give_back(self, handle):
        self.exported.pop(handle).fill_(255)   # whoever reads it from here on learns so

    def lend(self, part, on_end):
        held = (ctypes.c_uint8 * part.nbytes).from_address(part.data_ptr())
        weakref.finalize(held, on_end).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def open(self, handle, nbytes):
        if handle not in self.exported:
            raise DeviceError(f"there is no memory {handle}")
        return self.exported[handle][:nbytes]

    # -------------------------------------------------------------- the queue

    def caller(self):
        return None   # who is done with all at once

    @contextlib.contextmanager
    def behind(self, place):
        yield

    def run(self, work):
        self._put(work, "run")

    def mark(self, flag, value):
        place = flag.data_ptr()
        assert self.submitted.get(place, 0) < value, "a mark goes back"
        self.submitted[place] = value
        self._put(lambda: self._write(flag, value), "mark")

    def follow(self, flag, value):
        assert self.submitted.get(flag.data_ptr(), 0) >= value, "it would wait for what nobody has submitted"
        self._put(lambda: self._wait(flag, value), "follow")

    def release(self, flag):
        self._write(flag, RELEASED)

    def end(self):
        ending = TwinEnding(self)
        self._put(ending.reached.set, "end")
        return ending

    def keep(self, tensors):
        self._queue.put((lambda: tensors, 0.0))

    def future(self):
        return torch.futures.Future()

    def finish(self):
        self.end().wait()

    drain = finish

    def check(self):
        if self._failure:
            raise self._failure

    def _put(self, work, what):
        self.log.append(what)
        pause = self._random.random() * 1e-3 if self._random.random() < 0.1 else 0.0
        self._queue.put((work, pause))

    def _write(self, flag, value):
        with self.news:
            flag.fill_(value)
            self.news.notify_all()

    def _wait(self, flag, value):
        with self.news:
            assert self.news.wait_for(lambda: flag.item() >= value, PATIENCE), "nobody has made this mark"


class TwinEnding:
    """A place in the queue."""

    def __init__(self, twin):
        self.reached, self._twin = threading.Event(), twin

    def wait(self):
        assert self.reached.wait(2 * PATIENCE), "the queue hangs"
        self._twin.check()

    def is_done(self):
        return self.reached.is_set()

    def settle(self, future, result):
        self.wait()
        future.set_result(result)


def _work(twin, todo):
    """Run what comes, in order, until None comes."""
    while (item := todo.get()) is not None:
        work, pause = item
        time.sleep(pause) if pause else None
        try:
            work()
        except BaseException as error:   # shown to whoever waits
            if owner := twin():
                owner._failure = owner._failure or error
        del item, work
