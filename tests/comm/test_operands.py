"""What is reduced may be a parameter, whatever reduces it: `Group`, a part of one, compression, a canonical order."""

from functools import partial

import pytest
import torch

import rankloom as rl
from rankloom.comm.canonical import canonical_all_reduce
from rankloom.comm.choose import all_reduce_named
from rankloom.comm.compress import compressed_all_reduce
from rankloom.comm.subgroup import Subgroup

N = 1237
SHAPES = [(0, (30, 40))]
WAYS = {   # each makes an all-reduce: compression remembers its buffer
    "Group, sum": lambda: lambda x, world: world.all_reduce(x),
    "Group, mean": lambda: lambda x, world: world.all_reduce(x, "mean"),
    "Subgroup, sum": lambda: lambda x, world: Subgroup(world, range(world.size)).all_reduce(x),
    "Subgroup, mean": lambda: lambda x, world: Subgroup(world, range(world.size)).all_reduce(x, "mean"),
    "auto": lambda: all_reduce_named("auto"),
    "hierarchical": lambda: all_reduce_named("hierarchical"),
    "canonical": lambda: lambda x, world: canonical_all_reduce([x], world, world.size),   # one leaf for each rank
    **{name: partial(compressed_all_reduce, name, SHAPES) for name in ("bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd:2")},
}


def numbers(rank: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_is_reduced_to_the_same_bits_as_a_plain_tensor(way, p):
    def body(world):
        parameter = torch.nn.Parameter(numbers(world.rank))
        plain, result = WAYS[way]()(numbers(world.rank), world), WAYS[way]()(parameter, world)
        return torch.equal(plain, result), result is parameter, result.grad_fn is None

    assert rl.simulate(p, body) == [(True, way != "canonical", True)] * p


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_with_a_graph_is_refused_by_all_of_them(way):
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: .*: a tensor of shape \(1237,\) has a graph"):
            WAYS[way]()(2 * torch.nn.Parameter(numbers(world.rank)), world)

    rl.simulate(2, body)
