"""Who is in a group of ranks. Code that torch.compile turns into a graph may ask; it leaves what communicates alone (world/group.py)."""

from collections.abc import Sequence


class Members:
    """Ranks 0..size-1 of a group, of which this is `rank`. ranks: their numbers in the world; name: of the group, for error messages"""

    def __init__(self, rank: int, ranks: Sequence[int], name: str):
        self.rank, self.ranks, self.name = rank, tuple(ranks), name

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def world_rank(self) -> int:
        """This rank's number in the world, as error messages name it."""
        return self.ranks[self.rank]

    def where(self, label: str) -> str:
        """The beginning of error messages: this rank, a label and the group."""
        return f"rank {self.world_rank}: {label} in group {self.name!r}"
