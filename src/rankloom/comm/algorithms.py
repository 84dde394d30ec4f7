"""A table of the collectives that are chosen by name and add exactly; `on_nodes` adds those of two levels, which need a map of nodes.

An entry has the function, its path (what all ranks wait for) and its bill (what one rank sends). In both, n (or `nbytes`) is the
whole: the longer side of a reduce-scatter or an all-gather, and the buffer of each rank in other collectives. `wide` is
`operands.widening(dtype)`: the size of a partial sum over the size of an element. The functions accept parameters, as `Group`
does, and refuse a tensor with a graph (ConfigError).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.comm import all_to_all, broadcast, halving, hierarchical, naive, ring, tree
from rankloom.comm.hierarchical import Nodes


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective. `path`, `bill` and `levels` are pure functions of numbers."""

    run: Callable[..., Tensor]    # (x, group)
    path: Callable[..., Path]     # (nbytes, p, *, wide=1); of two levels the sum, as if all links were equal
    bill: Callable[..., Bill]     # (n, p, itemsize, rank=0, *, wide=1)
    levels: Callable[..., tuple[Path, Path]] | None = None   # of two levels: as `path`, the one inside nodes, the one between them
    crowded: bool = False         # whether all ranks of a node send to other nodes at once
    needs_tags: bool = False      # cannot run on a group whose messages ignore tags (`Group.in_order`), as over NCCL


def _named(module: ModuleType, name: str, *, crowded: bool = False, needs_tags: bool = False) -> Algorithm:
    """The function of that name in a module of this folder, with its `_path` and its `_bill` beside it."""
    run, path, bill = (getattr(module, name + suffix) for suffix in ("", "_path", "_bill"))
    return Algorithm(run, path, bill, crowded=crowded, needs_tags=needs_tags)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "naive": _named(naive, "naive_all_reduce"),
        "tree": _named(tree, "tree_all_reduce"),
        "double_tree": _named(tree, "double_tree_all_reduce", needs_tags=True),
        "ring": _named(ring, "ring_all_reduce"),
        "halving": _named(halving, "halving_all_reduce", crowded=True),
    },
    "reduce_scatter": {
        "ring": _named(ring, "ring_reduce_scatter"),
        "halving": _named(halving, "halving_reduce_scatter", crowded=True),
    },
    "all_gather": {
        "ring": _named(ring, "ring_all_gather"),
        "doubling": _named(halving, "doubling_all_gather", crowded=True),
    },
    "broadcast": {
        "binomial": _named(broadcast, "binomial_broadcast"),
        "chain": _named(broadcast, "chain_broadcast"),
    },
    "all_to_all": {
        "pairwise": _named(all_to_all, "pairwise_all_to_all", crowded=True),
    },
}
"""By collective, then by name."""


def on_nodes(nodes: Nodes) -> dict[str, dict[str, Algorithm]]:
    """The two-level algorithms on these nodes."""
    return {collective: {"hierarchical": _named_on(nodes, f"hierarchical_{collective}")} for collective in ("all_reduce", "all_to_all")}


def _named_on(nodes: Nodes, name: str) -> Algorithm:
    """The function of that name in comm/hierarchical.py on these nodes, with its `_paths` and its `_bill`."""
    run, paths, bill = (getattr(hierarchical, name + suffix) for suffix in ("", "_paths", "_bill"))
    return Algorithm(
        run=partial(run, nodes=nodes),
        path=lambda nbytes, p, *, wide=1: sum(paths(nbytes, nodes, wide=wide), Path()),
        bill=lambda n, p, itemsize, rank=0, *, wide=1: bill(n, nodes, itemsize, rank, wide=wide),
        levels=lambda nbytes, p, *, wide=1: paths(nbytes, nodes, wide=wide))
