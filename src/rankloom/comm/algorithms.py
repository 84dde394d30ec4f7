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
    """One way to do a collective. `path` and `bill` are pure functions of numbers."""

    run: Callable[..., Tensor]    # (x, group)
    path: Callable[..., Path]     # (nbytes, p, *, wide=1)
    bill: Callable[..., Bill]     # (n, p, itemsize, rank=0, *, wide=1)


def _named(module: ModuleType, name: str) -> Algorithm:
    """The function of that name in a module of this folder, with its `_path` and its `_bill` beside it."""
    return Algorithm(*(getattr(module, name + suffix) for suffix in ("", "_path", "_bill")))


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "naive": _named(naive, "naive_all_reduce"),
        "tree": _named(tree, "tree_all_reduce"),
        "double_tree": _named(tree, "double_tree_all_reduce"),
        "ring": _named(ring, "ring_all_reduce"),
        "halving": _named(halving, "halving_all_reduce"),
    },
    "reduce_scatter": {
        "ring": _named(ring, "ring_reduce_scatter"),
        "halving": _named(halving, "halving_reduce_scatter"),
    },
    "all_gather": {
        "ring": _named(ring, "ring_all_gather"),
        "doubling": _named(halving, "doubling_all_gather"),
    },
    "broadcast": {
        "binomial": _named(broadcast, "binomial_broadcast"),
        "chain": _named(broadcast, "chain_broadcast"),
    },
    "all_to_all": {
        "pairwise": _named(all_to_all, "pairwise_all_to_all"),
    },
}
"""By collective, then by name."""

NEEDS_TAGS = ("double_tree",)   # cannot run on a group whose messages ignore tags (`Group.in_order`), as over NCCL


def on_nodes(nodes: Nodes) -> dict[str, dict[str, Algorithm]]:
    """The two-level algorithms on these nodes. Their paths add both levels, as if all links were equal.

    `hierarchical_all_reduce_paths` and `hierarchical_all_to_all_paths` in comm/hierarchical.py give each level by itself.
    """
    def both(paths: Callable[..., tuple[Path, Path]], nbytes: int, p: int, *, wide: int = 1) -> Path:
        inside, between = paths(nbytes, nodes, wide=wide)
        return inside + between

    def bound(bill: Callable[..., Bill], n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
        return bill(n, nodes, itemsize, rank, wide=wide)

    return {
        "all_reduce": {"hierarchical": Algorithm(
            partial(hierarchical.hierarchical_all_reduce, nodes=nodes), partial(both, hierarchical.hierarchical_all_reduce_paths),
            partial(bound, hierarchical.hierarchical_all_reduce_bill))},
        "all_to_all": {"hierarchical": Algorithm(
            partial(hierarchical.hierarchical_all_to_all, nodes=nodes), partial(both, hierarchical.hierarchical_all_to_all_paths),
            partial(bound, hierarchical.hierarchical_all_to_all_bill))},
    }
