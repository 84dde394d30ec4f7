"""Ranks on paper: they know their rank and their peers, but they are not started, and their tensors have no memory.

Use them to ask what a rank *would* hold: `rl.prepare` on such a world cuts a model of any size as on real ranks, in one
process. Every peer is assumed to do and to send the same as this rank. Values that depend on another rank's do not exist here.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.mesh import Mesh
from rankloom.world.group import Group, Handle
from rankloom.world.world import World

NO_MEMORY = "meta"


class PaperGroup(Group):
    """One rank of a group whose other ranks do not exist. A collective ends at once; its result has the right shape."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str = "world"):
        Group.__init__(self, None, rank, ranks, name=name, device=NO_MEMORY)

    def all_gather(self, x: Tensor, *, out: Tensor | None = None, label: str = "", async_op: bool = False) -> Any:
        """As in a real group where all ranks have the same `x`."""
        handle = super().all_gather(x, out=out, label=label, async_op=True)
        handle.wait().view(self.size, -1).copy_(x.reshape(1, -1))
        return handle if async_op else handle.wait()

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        """As in a real group where all ranks have the same `value`."""
        return [json.loads(json.dumps(value)) for _ in self.ranks]

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """As in a real group where all ranks send the same."""
        handle = Handle(self, label, (), lambda: into.copy_(out))
        return handle if async_op else handle.wait()

    def _collect(self, op: str, x: Tensor, label: str, async_op: bool, *, bill: Bill, start: Callable,
                 finish: Callable[[], Tensor], rows: tuple[Sequence[int], Sequence[int]] | None = None) -> Any:
        handle = Handle(self, label, (), finish)
        return handle if async_op else handle.wait()


class PaperWorld(PaperGroup, World):
    """One rank of a mesh whose other ranks do not exist."""

    def __init__(self, rank: int, mesh: Mesh):
        super().__init__(rank, range(mesh.size))
        self.mesh, self.axes_named = mesh, True

    def group(self, *axes: str) -> Group:
        """The group of this rank's peers along `axes`."""
        ranks = self.mesh.peers(self.rank, *axes) if axes else self.ranks
        return PaperGroup(ranks.index(self.rank), ranks, name="+".join(axes))
