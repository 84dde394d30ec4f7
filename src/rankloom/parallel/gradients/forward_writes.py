"""A check, in the first step, that no forward writes a parameter that is trained: the write would be lost, or ranks would part."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError
from rankloom.base.tensors import bytes_of
from rankloom.world.group import Group

BEFORE = "Where that gives first values by a batch, run one through the plain model before it is wrapped: all ranks get those of rank 0"


class ForwardWrites:
    """Which parameters the forwards of the first step have written, by autograd's version counters.

    A forward that initialises a parameter from the rows it sees (ActNorm) writes other values on each rank, which is an error. One that
    writes the same on all ranks (it normalises a weight) is fine.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]):
        self._params = dict(params)
        self._versions: dict[str, int] = {}

    def begin(self, *, may_have_stepped: bool) -> None:
        """Before a forward: note the versions, if there are none yet, or an optimizer may have written since."""
        if may_have_stepped or not self._versions:
            self._versions = {name: param._version for name, param in self._params.items()}

    def expect_kept(self, name: str, param: Tensor, owner: Tensor) -> None:
        """Raise UnitError when the forward changed `param` and not `owner`, which the optimizer updates."""
        if self._versions and self._versions[name] != param._version and owner is not param and not torch.equal(param, owner.to(param)):
            raise UnitError(f"{_told(name)}, and what is trained is a copy in {owner.dtype}: it would be lost. {BEFORE}")

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
        problem = None
        if self.digest() != first:
            problem = f"rank {group.world_rank}: {self._how_it_differs(group.ranks[0])}: ranks would part. {BEFORE}"
        if first:
            group.agree(problem, error=UnitError, label="written by a forward")
        elif problem:
            raise UnitError(problem)

    def _how_it_differs(self, root: int) -> str:
        if written := self._written():
            return f"{_told(next(iter(written)))}, to other values than on rank {root}"
        return f"the forward of rank {root} has written a parameter that is trained, and the one of this rank has not"


def _told(name: str) -> str:
    return f"the forward has written {name}, a parameter that is trained"
