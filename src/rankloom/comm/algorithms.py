"""Every collective of this folder in one table: what to call, what all wait for, what one rank pays.

In bills and paths, n (or `nbytes`) is always the whole: the longer side of a reduce-scatter or an all-gather, what each rank
holds in the others. `wide` is `operands.widening(dtype)`: how many times the bytes of an element its partial sums have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "naive": Algorithm(naive.naive_all_reduce, naive.naive_all_reduce_path, naive.naive_all_reduce_bill),
        "tree": Algorithm(tree.tree_all_reduce, tree.tree_all_reduce_path, tree.tree_all_reduce_bill),
        "double_tree": Algorithm(tree.double_tree_all_reduce, tree.double_tree_all_reduce_path, tree.double_tree_all_reduce_bill),
        "ring": Algorithm(ring.ring_all_reduce, ring.ring_all_reduce_path, ring.ring_all_reduce_bill),
        "halving": Algorithm(halving.halving_all_reduce, halving.halving_all_reduce_path, halving.halving_all_reduce_bill),
    },
    "reduce_scatter": {
        "ring": Algorithm(ring.ring_reduce_scatter, ring.ring_reduce_scatter_path, ring.ring_reduce_scatter_bill),
        "halving": Algorithm(halving.halving_reduce_scatter, halving.halving_reduce_scatter_path, halving.halving_reduce_scatter_bill),
    },
    "all_gather": {
        "ring": Algorithm(ring.ring_all_gather, ring.ring_all_gather_path, ring.ring_all_gather_bill),
        "doubling": Algorithm(halving.doubling_all_gather, halving.doubling_all_gather_path, halving.doubling_all_gather_bill),
    },
    "broadcast": {
        "binomial": Algorithm(broadcast.binomial_broadcast, broadcast.binomial_broadcast_path, broadcast.binomial_broadcast_bill),
        "chain": Algorithm(broadcast.chain_broadcast, broadcast.chain_broadcast_path, broadcast.chain_broadcast_bill),
    },
    "all_to_all": {
        "pairwise": Algorithm(all_to_all.pairwise_all_to_all, all_to_all.pairwise_all_to_all_path, all_to_all.pairwise_all_to_all_bill),
    },
}
"""By collective, then by name. What needs to know the nodes is in `on_nodes`."""

NEEDS_TAGS = ("double_tree",)   # so none of these where a group has its messages in order, as over NCCL


def on_nodes(nodes: Nodes) -> dict[str, dict[str, Algorithm]]:
    """The algorithms in two levels, bound to `nodes`; their paths add both levels as if all links were equal.

    `hierarchical.hierarchical_all_reduce_paths` and `hierarchical_all_to_all_paths` tell the levels apart.
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
