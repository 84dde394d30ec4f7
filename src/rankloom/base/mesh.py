"""Name the axes of a grid of ranks. Pure arithmetic: needs no process group."""

from dataclasses import dataclass, fields
from math import prod

from rankloom.base.errors import ConfigError, MeshError, did_you_mean
from rankloom.base.expect import is_whole_number

# Ranks that differ along these axes only
DATA_AXES = ("replicate", "shard")                          # have the same part of the model; some keep slices of it
ROW_AXES = ("replicate", "shard", "expert")                 # bring different rows
TOKEN_AXES = ("replicate", "shard", "context", "expert")    # see different tokens
SHARING_AXES = ("pipe", "context", "tensor")                # work on the same rows
PART_AXES = ("pipe", "shard", "tensor", "expert")           # hold different elements of the model


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks whose axes have names; the last axis varies fastest.

    >>> mesh = Mesh(pipe=2, replicate=2, tensor=2)
    >>> mesh.size
    8
    >>> mesh.coords(5)["pipe"], mesh.coords(5)["replicate"], mesh.coords(5)["tensor"]
    (1, 0, 1)
    >>> mesh.peers(5, "replicate")            # ranks that differ from 5 along replicate only
    (5, 7)
    >>> mesh.peers(5, "replicate", "tensor")  # two axes flattened into one group
    (4, 5, 6, 7)
    """

    pipe: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis, n in self.sizes().items():
            if not is_whole_number(n, 1):
                raise ConfigError(f"mesh axis {axis!r} is {n!r}; it must be a whole number of ranks, 1 or more")

    def sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks along it, slowest axis first."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def in_use(self) -> dict[str, int]:
        """The axes along which there is more than one rank.

        >>> Mesh(pipe=2, tensor=4).in_use()
        {'pipe': 2, 'tensor': 4}
        """
        return {axis: n for axis, n in self.sizes().items() if n > 1}

    @property
    def size(self) -> int:
        """The number of ranks the whole grid needs."""
        return prod(self.sizes().values())

    def coords(self, rank: int) -> dict[str, int]:
        """Where `rank` stands: axis name -> position along it. raises: MeshError"""
        if not 0 <= rank < self.size:
            raise MeshError(f"there is no rank {rank} in {self}: its ranks are 0 to {self.size - 1}")
        place = {}
        for axis, n in reversed(self.sizes().items()):
            rank, place[axis] = divmod(rank, n)
        return dict(reversed(place.items()))

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in rank order, `rank` included."""
        sizes = self.sizes()
        for axis in axes:
            if axis not in sizes:
                raise MeshError(f"no mesh axis {axis!r}. {did_you_mean(axis, sizes)}")
        here, step, offsets = self.coords(rank), 1, [0]   # step: between two ranks that are neighbours along an axis
        for axis, n in reversed(sizes.items()):
            if axis in axes:
                offsets = [(place - here[axis]) * step + offset for place in range(n) for offset in offsets]
            step *= n
        return tuple(rank + offset for offset in offsets)

    def expect_ranks(self, ranks: int) -> None:
        """Raise unless the grid needs exactly `ranks` ranks; the message shows the arithmetic."""
        if self.size != ranks:
            raise MeshError(f"mesh {self} needs {self.product()} = {self.size} ranks, but there are {ranks}: start as many, or name "
                            "another mesh")

    def product(self) -> str:
        """The product of the axes in use, for messages: `pipe 2 x tensor 2`."""
        return " x ".join(f"{axis} {n}" for axis, n in self.in_use().items()) or "1"

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={n}' for axis, n in self.in_use().items())})"
