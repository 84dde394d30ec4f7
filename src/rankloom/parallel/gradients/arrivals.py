"""The order in which gradients arrive, recorded in the first backward; and a check that the first forward did not write a parameter."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError
from rankloom.base.tensors import bytes_of
from rankloom.world.group import Group

BEFORE = "Where that gives first values by a batch, run one through the plain model before it is wrapped: all ranks get those of rank 0"


class Arrivals(dict[str, None]):
    """Names of parameters, in the order in which their gradients arrived. In the first step also: which of them the forward wrote.

    A forward that initialises a parameter from the rows it sees (ActNorm) writes other values on each rank, which is an error. One that
    writes the same on all ranks (it normalises a weight) is fine.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]):
        super().__init__()
        self._params = dict(params)
        self._versions: dict[str, int] = {}

    def begin(self) -> None:
        """Before a forward: note the versions of the parameters."""
        if self or not self._versions:   # otherwise no optimizer can have stepped since the last call
            self._versions = {name: param._version for name, param in self._params.items()}

    def note(self, name: str, param: Tensor, owner: Tensor) -> None:
        """A gradient has arrived. Raises UnitError when the forward changed `param` and not `owner`, which the optimizer updates."""
        self.setdefault(name)
        if self._versions and self._versions[name] != param._version and owner is not param and not torch.equal(param, owner.to(param)):
            raise UnitError(f"{self._told(name)}, and what is trained is a copy in {owner.dtype}: it would be lost. {BEFORE}")

    def end(self) -> None:
        """End the check: the first step is over."""
        self._params, self._versions = {}, {}

    def _written(self) -> dict[str, Tensor]:
        """Parameters written since the forward began. Loading counts too, but writes the same on all ranks."""
        return {name: self._params[name] for name, version in self._versions.items() if self._params[name]._version != version}

    def digest(self) -> int:
        """A checksum of the parameters that were written; 0 for none."""
        found = 0
        for name, param in sorted(self._written().items()):
            found = crc32(bytes_of(param.detach().cpu()).numpy().tobytes(), crc32(name.encode(), found))
        return found

    def expect_alike(self, first: int, group: Group) -> None:
        """After the first backward: raise UnitError when rank 0 has written other values. On all ranks, if rank 0 has written any.

        first: rank 0's digest
        """
        problem, root = None, group.ranks[0]
        if self.digest() != first:
            told = (f"{self._told(next(iter(written)))}, to other values than on rank {root}" if (written := self._written()) else
                    f"the forward of rank {root} has written a parameter that is trained, and the one of this rank has not")
            problem = f"rank {group.world_rank}: {told}: ranks would part. {BEFORE}"
        if first:
            group.agree(problem, error=UnitError, label="written by a forward")
        elif problem:
            raise UnitError(problem)
        self.end()

    def _told(self, name: str) -> str:
        return f"the forward has written {name}, a parameter that is trained"
