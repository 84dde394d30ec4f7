"""CUDA tensors over the group for CPU tensors: copied to the host, and results copied back.

For groups in which some ranks share a GPU and some do not: neither NCCL nor the memory of one GPU serves them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.world.transport.work import Work


class ThroughHost:
    """The methods of a process group, for tensors on a device. A method writes to its first argument only."""

    def __init__(self, host: dist.ProcessGroup):
        self._host = host

    def __getattr__(self, name: str) -> Callable[..., Work]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, written: Any, *rest: Any) -> Work:
        copies: list[tuple[Tensor, Tensor]] = []
        outputs = _on_host(written, copies)
        back = [] if name == "send" else [*copies]
        work = getattr(self._host, name)(outputs, *(_on_host(value, copies) for value in rest))
        brought = HostWork(work, back)
        if rest and not getattr(rest[-1], "asyncOp", True):
            brought.wait()
        return brought


class HostWork(Work):
    """Work on the host, and the tensors to copy to the device when it has ended: (on the device, on the host)."""

    def __init__(self, work: Any, back: list[tuple[Tensor, Tensor]]):
        super().__init__([there for there, _ in back])
        self._work, self._back = work, back

    def wait(self, timeout: Any = None) -> bool:
        """Block until it has ended, and submit the copies. raises: RankLost, CollectiveTimeout, CollectiveMismatch"""
        self._work.wait(timeout) if timeout else self._work.wait()
        back, self._back = self._back, []
        for there, here in back:
            there.detach().copy_(here)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended on the host; submits the copies when it has ended well."""
        if has_ended := self._work.is_completed() and self._work.exception() is None:
            self.wait()
        return has_ended or self._work.is_completed()

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._work.exception()

    def source_rank(self) -> int:
        """The rank that sent the message."""
        return self._work.source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future that is already set: this blocks until the work has ended."""
        future: torch.futures.Future = torch.futures.Future(devices=sorted({x.device for x in self._result if x.is_cuda}, key=str))
        self.wait()
        future.set_result(self._result)
        return future


def _on_host(value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """`value` with a copy on the host for each tensor in it, also in nested lists; each pair is added to `copies`."""
    if isinstance(value, Tensor):
        copies.append((value, value.detach().to("cpu", copy=True)))
        return copies[-1][1]
    return [_on_host(item, copies) for item in value] if isinstance(value, list | tuple) else value
