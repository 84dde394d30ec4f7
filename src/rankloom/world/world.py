"""`World`: all ranks of a job, the mesh that names their axes, and the groups along them.

Every group has its own prefix in a store that is new for each start of the job (meet.py): a rebuilt group never reads an old address.
Read world/group.py before this file, and world/connect.py for what connects the ranks.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from rankloom.base.errors import MeshError, RankLost
from rankloom.base.expect import is_whole_number
from rankloom.base.mesh import Mesh
from rankloom.base.topology import Topology
from rankloom.world import connect
from rankloom.world.debug import Inspector
from rankloom.world.group import Group
from rankloom.world.ledger import Ledger
from rankloom.world.open_files import make_room
from rankloom.world.pairwise import is_nccl
from rankloom.world.referee import Referee, Seat
from rankloom.world.transport.meet import Reunion, name_of
from rankloom.world.transport.process_group import build
from rankloom.world.transport.router import DeviceRouter, gone

TWIN = "twin"   # the purpose of a twin. On NCCL it carries messages only, and each pair connects at its first one: it needs no first call
MEMORY = 2   # open files of a rank in shared memory, while it is being mapped; with gloo, or over TCP, a rank has one for each other
SPARE = 16   # open files besides a group's connections: for the store, and for the program itself


def as_mesh(ranks: int | Mesh) -> Mesh:
    """`ranks` itself, or for a number a mesh of that many replicas."""
    if isinstance(ranks, Mesh):
        return ranks
    if not is_whole_number(ranks, 1):
        raise MeshError(f"the number of ranks is {ranks!r}, expected a Mesh or a whole number, 1 or more")
    return Mesh(replicate=ranks)


class Meeting(NamedTuple):
    """A group that this rank is about to make with others."""

    name: str               # the same on all of its ranks, and unlike that of any other group
    ranks: Sequence[int]    # of the world
    place: int              # of this rank among them
    files: int              # that this rank will open


class SharedProcess(NamedTuple):
    """What the ranks of a group know of each other if they share a process, over gloo too."""

    gone: Callable[[], Sequence[int]]   # the ranks of the world that are gone
    referee: Referee                    # compares the calls of the group


Meet = Callable[[Meeting], AbstractContextManager[SharedProcess | None]]
"""A context in which the ranks of a group connect."""


def _in_a_process_of_its_own(_meeting: Meeting) -> AbstractContextManager[None]:
    return nullcontext()


class World(Group):
    """All ranks of the job as one group, and the mesh that names their axes.

    `group("replicate")` is the group of the ranks that differ from this one along that axis only; several axes make
    one flattened group; no axes, the world itself. Asking again returns the same group.
    `axes_named` is False if only a number of ranks was given: a technique may then use them along the axis that it needs.

    meet: ranks connect in its context, as gloo cannot be interrupted when it waits for one that will not
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int | Mesh, device: torch.device, *, timeout: float,
                 local_rank: int = 0, local_size: int = 1, one_host: bool = True, debug: bool = False,
                 topology: Topology | None = None, backend: str = connect.AUTO, meet: Meet = _in_a_process_of_its_own):
        self._meet = meet
        self.mesh, self.axes_named = as_mesh(ranks), isinstance(ranks, Mesh)
        mesh = self.mesh
        self.local_rank, self.local_size = local_rank, local_size
        self._store, self._debug, self.one_host = store, debug, one_host
        self._own_gpu = device.type == "cuda" and connect.has_own_gpu(store, rank, mesh.size, device, timeout)
        self.backend = connect.resolve_backend(backend, device, self._own_gpu, one_host)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._twins: dict[tuple[int, ...], Group] = {}
        everyone = tuple(range(mesh.size))
        pg, inspector = self._join(everyone, rank, device, timeout, "world")
        super().__init__(pg, rank, everyone, device=device, timeout=timeout, one_host=one_host, inspector=inspector,
                         topology=topology, twin=partial(_twin, weakref.ref(self), everyone))

    def group(self, *axes: str) -> Group:
        """The group of this rank's peers along `axes`. All of them must ask for their groups in the same order.

        raises: RankLost when the world is closed
        """
        ranks = self.mesh.peers(self.rank, *axes) if axes else self.ranks
        if ranks == self.ranks:
            return self
        self._connected(f"group({', '.join(axes)})")
        if ranks not in self._groups:
            # axes of one rank add none: the name that the first caller's list of axes would give is not that of the next caller
            self._groups[ranks] = self._connect(ranks, "+".join(axis for axis in axes if axis in self.mesh.in_use()) or "+".join(axes))
        return self._groups[ranks]

    @property
    def has_ended(self) -> bool:
        """Whether all calls have ended that this rank has begun in any of its groups, held or dropped."""
        return all(group.in_flight.has_ended for group in (self, *self._parts()))

    def end_within(self, seconds: float) -> bool:
        """Wait, at most so long, for all calls that this rank has begun in any of its groups. Returns whether they have ended well."""
        deadline = time.monotonic() + seconds
        return all(group.in_flight.end_within(deadline - time.monotonic()) for group in (self, *self._parts()))

    def leave(self) -> None:
        """This rank's body has returned: it makes no more calls. Those that wait for one of it are told at once, as far as it can be known:
        threads over gloo have a referee, and shared memory can be left while others still read what is in it.

        raises: CollectiveMismatch (from the referee)
        """
        for group in (self, *self._parts()):
            if group._process_group is not None and isinstance(group._inspector, Seat):
                group._inspector.leave()
        if self.backend == connect.SHARED and self.one_host and self.device.type == "cpu" and self.has_ended:
            self.close()

    def close(self) -> None:
        """Drop every connection of this rank; peers that wait for it get RankLost."""
        for group in self._parts():
            group.close()
        super().close()

    def _parts(self) -> tuple[Group, ...]:
        return *self._groups.values(), *self._twins.values()

    def _connect(self, ranks: tuple[int, ...], name: str, purpose: str = "group", ledger: Ledger | None = None) -> Group:
        pg, inspector = self._join(ranks, self.rank, self.device, self.timeout, name, purpose)
        return Group(pg, ranks.index(self.rank), ranks, name=name, device=self.device, timeout=self.timeout, one_host=self.one_host,
                     inspector=inspector, topology=self.topology.among(ranks), twin=partial(_twin, weakref.ref(self), ranks), ledger=ledger)

    def _join(self, ranks: tuple[int, ...], me: int, device: torch.device, timeout: float, name: str,
              purpose: str = "group") -> tuple[dist.ProcessGroup | None, Inspector | Seat | None]:
        if len(ranks) == 1:
            return None, None
        n, place = len(ranks), ranks.index(me)
        files = MEMORY if self.backend == connect.SHARED and self.one_host else n
        make_room(files + SPARE, f"a group of {n} ranks")
        meeting = Meeting(f"{purpose}/{name_of(ranks)}", ranks, place, files)
        store = Reunion(meeting.name, self._store, ranks, partial(_gone, weakref.ref(self)))
        with self._meet(meeting) as process:
            who_is_gone: Callable[[], Sequence[int]] = partial(_places, process.gone, ranks) if process else tuple   # gloo cannot tell
            if self.backend == connect.SHARED:
                shared = build(store, place, n, timeout, ranks=ranks, name=name)
                pg: dist.ProcessGroup = DeviceRouter(shared, timeout) if device.type == "cuda" else shared
                who_is_gone = shared.channel.gone
            else:
                pg = connect.connect(store, place, n, device, timeout=timeout, loopback=self.one_host, own_gpu=self._own_gpu)
                if purpose != TWIN and is_nccl(pg, device):
                    connect.call_first(pg, place, n, device, timeout)
        if self._debug:
            return pg, Inspector(dist.PrefixStore("debug", store), place, ranks, timeout, who_is_gone)
        return pg, Seat(process.referee, place, ranks) if process and self.backend == connect.GLOO else None


def _places(gone: Callable[[], Sequence[int]], ranks: tuple[int, ...]) -> list[int]:
    """The numbers that ranks of the world which are gone have in a group of `ranks`."""
    return [ranks.index(rank) for rank in gone() if rank in ranks]


def _gone(world: "weakref.ref[World]") -> Sequence[int]:
    """The ranks of which the world knows that they are gone: none while it is being made itself. A weak reference: see `_twin`."""
    return gone(getattr(world(), "_process_group", None))


def _twin(world: "weakref.ref[World]", ranks: tuple[int, ...]) -> Group:
    """The second connection of these ranks; the first call is a collective. A weak reference: groups must not keep the world alive.

    raises: RankLost when the world is closed, or gone
    """
    home = world()
    if home is None:
        raise RankLost(f"ranks {ranks}: their world has gone; keep it as long as its groups are used")
    group = home if ranks == home.ranks else home._groups[ranks]
    if home.backend == connect.SHARED and home.device.type == "cuda":   # the router itself keeps the directions of messages apart (nccl.py)
        return group
    if ranks not in home._twins:
        if len(ranks) > 1:
            home._connected("twin")
        home._twins[ranks] = home._connect(ranks, group.name, TWIN, Ledger(whole=group.ledger))
    return home._twins[ranks]
