"""Collectives in two levels: inside a node, where links are fast, and between nodes, where they are slow.

All-reduce, with s ranks in a node:
1. reduce-scatter inside the node: each rank has the node's sum of one slice;
2. all-reduce of each slice over the ranks at the same place in every node, all slices at once;
3. all-gather inside the node.
Each rank sends 1/s as much between nodes as in a flat ring. Step 2 may use any all-reduce, a compressed one for instance.
Where nodes differ in size, the first rank of each node sums for its node.

All-to-all: one rank of a node collects all that the node sends to one other node, and sends it as one message. A rank there deals it
out. All bytes are sent twice inside nodes, but a pair of nodes exchanges only one message each way.
Read `comm/subgroup.py` first.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.shares import chunk_sizes
from rankloom.base.topology import are_even, node_with
from rankloom.comm.broadcast import binomial_broadcast, binomial_broadcast_bill, binomial_broadcast_path
from rankloom.comm.messages import TAG
from rankloom.comm.operands import require_rows, summand, summing_dtype
from rankloom.comm.ring import (
    ring_all_gather,
    ring_all_gather_bill,
    ring_all_gather_path,
    ring_all_reduce,
    ring_all_reduce_bill,
    ring_all_reduce_path,
    ring_reduce_scatter,
    ring_reduce_scatter_bill,
    ring_reduce_scatter_path,
)
from rankloom.comm.subgroup import Subgroup
from rankloom.comm.tree import tree_reduce, tree_reduce_bill, tree_reduce_path
from rankloom.world.group import Group

Nodes = Sequence[Sequence[int]]
"""The ranks of a group, by node. Each rank in exactly one; nodes may differ in size."""


def hierarchical_all_reduce(x: Tensor, group: Group, nodes: Nodes, *,
                            between: Callable[[Tensor, Group], Tensor] = ring_all_reduce) -> Tensor:
    """Sum `x` over the group, in place: inside each node, between nodes, and back. Every rank ends with the same bits.

    x:       any shape of n elements, contiguous, the same on each of p ranks
    nodes:   the ranks of each node; the same on each rank
    between: the all-reduce between nodes: `between(slice, group) -> slice`, in place; slices are in fp32 where x is narrower
    sent:    inside 2(s-1) messages, 2n(s-1)/s elements per rank, with s ranks in a node; between 2(m-1) messages and
             2n(m-1)/(sm) elements, with m nodes, unless `between` sends less
    steps:   2(s-1) + 2(m-1)
    raises:  NotContiguous; ConfigError for bool, or when `nodes` does not name each rank once
    source:  Jia et al. 2018, "Highly scalable deep learning training system with mixed-precision"
    """
    flat = summand(x, group, "hierarchical_all_reduce")
    node = nodes[_node_of(group, nodes)]
    sums, peers, place = flat.to(summing_dtype(x.dtype)), Subgroup(group, node), node.index(group.rank)
    if are_even(nodes):
        mine = ring_reduce_scatter(sums, peers)
        if len(nodes) > 1:
            mine = between(mine, Subgroup(group, [other[place] for other in nodes]))
        ring_all_gather(mine.to(x.dtype), peers, out=flat)
        return x
    tree_reduce(sums, peers)
    if place == 0:
        flat.copy_(between(sums, Subgroup(group, [other[0] for other in nodes])))
    binomial_broadcast(flat, peers)
    return x


def hierarchical_all_to_all(x: Tensor, group: Group, nodes: Nodes) -> Tensor:
    """Send each rank an equal share of the rows of `x`, with one message each way between two nodes.

    x:      [p*n, ...] on each of p ranks -> [p*n, ...]: the rows sent to this rank, in rank order
    nodes:  the ranks of each node; the same on each rank
    sent:   inside a node 2(s-1) messages from each of its s ranks; between nodes one each way for each pair of the m nodes, of s*s*n
            rows, spread over the ranks of a node
    steps:  2(s-1), and between nodes (m-1)/s, rounded up, or a little less than twice that where several messages meet at one rank
    raises: NotContiguous; ShapeMismatch when p does not divide the rows; ConfigError when `nodes` does not name each rank once
    source: Traff & Rougier 2014, "MPI collectives and datatypes for hierarchical all-to-all communication"
    """
    label, p = "hierarchical_all_to_all", group.size
    x = require_rows(x, group, label)
    if x.shape[0] % p:
        raise ShapeMismatch(f"{group.where(label)}: a tensor of shape {tuple(x.shape)} cannot be cut in {p} equal slices "
                            "along dim 0; pad it")
    here = _node_of(group, nodes)
    node, peers, place = nodes[here], Subgroup(group, nodes[here]), nodes[here].index(group.rank)
    blocks = x.view(p, x.numel() // p)   # [to rank, what]
    partners = [_partners(nodes, here, at) for at in range(len(node))]   # of each rank of this node

    # Inside: each rank collects the blocks of this node's ranks for the nodes that it sends to.
    targets = [[*chain(*(nodes[there] for there in served))] for served in partners]   # the ranks of the nodes that each sends to
    collected = peers.all_to_all(blocks[list(chain(*targets))], send_rows=[len(ranks) for ranks in targets],
                                recv_rows=[len(targets[place])] * len(node), label=label)
    mine = partners[place]   # the nodes to which this rank sends
    by_node = collected.view(len(node), len(targets[place]), blocks.shape[1]).split([len(nodes[there]) for there in mine], dim=1)
    # Between: bundles [from rank, to rank, block], exchanged with each of those nodes.
    contacts = [nodes[there][here % len(nodes[there])] for there in mine]
    arrived = _swap(group, list(zip(contacts, by_node)), label)
    # Inside: pass to each rank of this node what arrived for it, and this rank's own block for it.
    to_deal: list[Tensor] = []
    for at, rank in enumerate(node):
        to_deal += [*(bundle[:, at] for bundle in arrived), blocks[rank].unsqueeze(0)]
    sources = [[*ranks, rank] for ranks, rank in zip(targets, node)]   # whose blocks each deals out
    dealt = peers.all_to_all(torch.cat(to_deal), send_rows=[len(sources[place])] * len(node),
                            recv_rows=[len(ranks) for ranks in sources], label=label)
    out = torch.empty_like(x)
    out.view(blocks.shape)[list(chain(*sources))] = dealt
    return out


def _swap(group: Group, bundles: Sequence[tuple[int, Tensor]], label: str) -> list[Tensor]:
    """Send each bundle [mine, theirs, ...] to its rank; returns the bundles received, [theirs, mine, ...], in the same order.

    bundles: in the order of nodes on all ranks
    """
    inboxes = [bundle.new_empty((bundle.shape[1], bundle.shape[0], bundle.shape[2])) for _, bundle in bundles]
    if group.in_order:   # there, two ranks must exchange bundles in one call; in the order of nodes no ranks wait in a circle
        for (rank, bundle), inbox in zip(bundles, inboxes):
            group.exchange(bundle.contiguous(), rank, inbox, rank, tag=TAG, label=label)
        return inboxes
    coming = [group.recv(inbox, rank, tag=TAG, label=label, async_op=True) for inbox, (rank, _) in zip(inboxes, bundles)]
    going = [group.send(bundle.contiguous(), rank, tag=TAG, label=label, async_op=True) for rank, bundle in bundles]
    for handle in coming + going:
        handle.wait()
    return inboxes


def _partners(nodes: Nodes, here: int, place: int) -> list[int]:
    """The nodes with which the rank at `place` of node `here` exchanges messages for its whole node."""
    return [there for there in range(len(nodes)) if there != here and there % len(nodes[here]) == place]


def _node_of(group: Group, nodes: Nodes) -> int:
    """The number of this rank's node. raises: ConfigError unless `nodes` names each rank once"""
    if sorted(rank for node in nodes for rank in node) != list(range(group.size)) or not all(nodes):
        raise ConfigError(f"{group.where('nodes')}: {nodes} must name each of ranks 0..{group.size - 1} exactly once, by node, none empty")
    return node_with(nodes, group.rank)


def hierarchical_all_reduce_bill(n: int, nodes: Nodes, itemsize: int, rank: int = 0, *, wide: int = 1,
                                 between: Callable[..., Bill] = ring_all_reduce_bill) -> Bill:
    """What `rank` sends in `hierarchical_all_reduce`; between: the bill of the all-reduce between nodes"""
    here = node_with(nodes, rank)
    size, place = len(nodes[here]), nodes[here].index(rank)
    if not are_even(nodes):
        leader = between(n, len(nodes), itemsize * wide, here) if place == 0 else Bill()
        return tree_reduce_bill(n, size, itemsize * wide, place) + leader + binomial_broadcast_bill(n, size, itemsize, place)
    across = between(chunk_sizes(n, size)[place], len(nodes), itemsize * wide, here)
    return ring_reduce_scatter_bill(n, size, itemsize * wide, place) + across + ring_all_gather_bill(n, size, itemsize, place)


def hierarchical_all_to_all_bill(n: int, nodes: Nodes, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `hierarchical_all_to_all` of n rows, of `itemsize` bytes each."""
    here = node_with(nodes, rank)
    size, place = len(nodes[here]), nodes[here].index(rank)
    share = n // sum(map(len, nodes)) * itemsize
    carried = [sum(len(nodes[there]) for there in _partners(nodes, here, at)) for at in range(size)]
    collect = sum(carried) - carried[place]
    deal = (size - 1) * (carried[place] + 1)
    return Bill(sent=(collect + size * carried[place] + deal) * share,
                messages=2 * (size - 1) + len(_partners(nodes, here, place)))


def hierarchical_all_reduce_paths(nbytes: int, nodes: Nodes, *, wide: int = 1) -> tuple[Path, Path]:
    """What all wait for in `hierarchical_all_reduce` of `nbytes`: the path inside nodes, and the path between them."""
    largest = max(map(len, nodes))
    if not are_even(nodes):
        up_and_down = tree_reduce_path(nbytes * wide, largest) + binomial_broadcast_path(nbytes, largest)
        return up_and_down, ring_all_reduce_path(nbytes * wide, len(nodes))
    inside = ring_reduce_scatter_path(nbytes * wide, largest) + ring_all_gather_path(nbytes, largest)
    return inside, ring_all_reduce_path(-(-nbytes // largest) * wide, len(nodes))


def hierarchical_all_to_all_paths(nbytes: int, nodes: Nodes, *, wide: int = 1) -> tuple[Path, Path]:
    """What all wait for in `hierarchical_all_to_all` of `nbytes` on each rank: at most these paths inside nodes and between them."""
    largest, share = max(map(len, nodes)), -(-nbytes // sum(map(len, nodes)))
    by_rank = [_partners(nodes, here, place) for here, node in enumerate(nodes) for place in range(len(node))]
    carried = max(sum(len(nodes[there]) for there in partners) for partners in by_rank)
    most = max(map(len, by_rank))
    steps = max(2 * most - 1, 0)   # the last message may have to wait for all others at both of its ends
    return (Path(steps=2 * (largest - 1), bytes=(largest - 1) * (2 * carried + 1) * share),
            Path(steps=steps, bytes=steps * largest**2 * share))
