"""Ranks on paper have the groups of real ones, and results of the right shape; nothing is sent."""

import pytest
import torch

import rankloom as rl
from rankloom.world.paper import PaperWorld

MESH = rl.Mesh(pipe=2, shard=3, tensor=2)


@pytest.mark.parametrize("axes", [("shard",), ("tensor", "pipe"), ("replicate",), ()], ids=str)
def test_groups_are_those_of_real_ranks(axes):
    real = rl.simulate(MESH, lambda world: (world.group(*axes).ranks, world.group(*axes).rank, world.alone().ranks))
    paper = [PaperWorld(rank, MESH) for rank in range(MESH.size)]
    assert [(world.group(*axes).ranks, world.group(*axes).rank, world.alone().ranks) for world in paper] == real


def use_all(group) -> list[tuple]:
    """Every collective of a model that is cut; shapes and dtypes of what comes out."""
    x = torch.zeros(6, 4, dtype=torch.bfloat16, device=group.device)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    found = [group.all_reduce(x.clone()), group.all_gather(x), group.reduce_scatter(x), group.all_to_all(x), group.broadcast(x.clone()),
             group.all_gather(x, async_op=True).wait(), group.exchange(x, right, torch.empty_like(x), left), group.buffer(3),
             group.common_buffer(6)[0], group.reduce_scatter(x, async_op=True).wait()]
    return [(tuple(t.shape), t.dtype) for t in found]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_have_the_shapes_of_real_ones_and_no_memory(ranks):
    real = rl.simulate(ranks, lambda world: use_all(world) if world.size > 1 else None)[0]
    world = PaperWorld(0, rl.Mesh(shard=ranks))
    assert world.device.type == "meta" and world.ledger.messages == 0
    if real is not None:
        assert use_all(world.group("shard")) == real and world.group("shard").ledger.bytes == 0


def test_peers_say_what_this_rank_says():
    group = PaperWorld(3, MESH).group("shard")
    assert group.all_gather_object({"a": [1, 2]}) == [{"a": [1, 2]}] * 3
    assert group.all_gather(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0] * 3, "a message on the CPU has values"
    group.barrier()
    with pytest.raises(rl.NotContiguous):
        group.all_reduce(torch.zeros(4, 4).T[:2])
