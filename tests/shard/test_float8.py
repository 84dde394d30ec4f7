"""Weights gathered in eight bits are bit for bit what casting the gathered weights gives, wherever they are cut."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from rankloom.base.float8 import E4M3, cast, magnitude
from rankloom.shard.float8 import decode, encode_slice, own_amaxes
from rankloom.shard.layout import lay_out_evenly

SHAPES = {"a": (48, 16), "b": (16, 16), "c": (80, 32), "tiny": (1, 16)}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Each with its largest value somewhere else, and of another size."""
    made = torch.Generator().manual_seed(0)
    found = {name: (torch.randn(shape, generator=made) * 10.0 ** (at - 2)) for at, (name, shape) in enumerate(SHAPES.items())}
    for at, weight in enumerate(found.values()):
        weight.view(-1)[(at * 7 + 3) % weight.numel()] = 5.0 * weight.abs().max()
    return {name: weight.to(dtype) for name, weight in found.items()}


def gathered(world: rl.World, given: dict[str, torch.Tensor]):
    """What a unit does: each rank begins with its slice only."""
    group = world.group("shard")
    layout = lay_out_evenly({name: weight.shape for name, weight in given.items()}, 1, group.size)
    flat = torch.zeros(layout.total, dtype=next(iter(given.values())).dtype)
    for slot in layout.slots:
        flat[slot.start : slot.end] = given[slot.name].flatten()
    own = flat[slice(*layout.span(group.rank))].clone()
    amaxes = group.all_reduce(own_amaxes(own, layout, group.rank), "max")
    encoded = torch.full((len(own),), 255, dtype=torch.uint8)
    encode_slice(own, layout, group.rank, amaxes, encoded)
    return decode(group.all_gather(encoded), layout, amaxes), layout


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathering_in_eight_bits_gives_what_casting_the_whole_weight_gives(p, dtype):
    whole = {name: cast(weight, E4M3, magnitude(weight)) for name, weight in weights(dtype).items()}
    for found, layout in rl.simulate(rl.Mesh(shard=p), lambda world: gathered(world, weights(dtype))):
        assert list(found) == list(whole)
        assert p == 1 or any(layout.slice_of(name, rank) != (0, 0) for name in whole for rank in range(1, p))
        for name, weight in whole.items():
            assert torch.equal(found[name].data.view(torch.uint8), weight.data.view(torch.uint8)), name
            assert torch.equal(found[name].scale, weight.scale)


def test_what_lies_between_weights_travels_as_zeros():
    layout = lay_out_evenly({"a": torch.Size((3, 5)), "b": torch.Size((7,))}, 1, 2)
    encoded = torch.full((2, layout.total // 2), 255, dtype=torch.uint8)
    for rank, out in enumerate(encoded):
        encode_slice(torch.ones(len(out)), layout, rank, torch.ones(2), out)
    gaps = torch.ones(layout.total, dtype=torch.bool)
    for slot in layout.slots:
        gaps[slot.start : slot.end] = False
    assert gaps.any() and (encoded.flatten() == 0).equal(gaps)


def test_weights_are_cut_inside_and_some_ranks_own_nothing_of_some():
    """Else the test above would prove little."""
    layout = lay_out_evenly({name: torch.Size(shape) for name, shape in SHAPES.items()}, 1, 4)
    slices = {name: [layout.slice_of(name, rank) for rank in range(4)] for name in SHAPES}
    assert any(first > 0 for parts in slices.values() for first, _ in parts)
    assert any((0, 0) in parts for parts in slices.values())


def test_the_magnitudes_of_a_slice_take_as_many_operations_for_any_number_of_weights():
    """Each is a kernel on a GPU, which waits for them after every update."""
    def operations(n):
        layout, number = lay_out_evenly({f"w{at}": torch.Size((16, 16)) for at in range(n)}, 1, 2), 0

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal number
                number += not func.is_view
                return func(*args, **(kwargs or {}))

        with Counting():
            own_amaxes(torch.ones(layout.total // 2), layout, 0)
        return number
    assert operations(2) == operations(20)


def test_a_weight_that_is_not_finite_is_not_finite_on_every_rank():
    def body(world):
        given = weights()
        given["c"][70, 3] = torch.inf          # on the last rank only
        return gathered(world, given)[0]

    for found in rl.simulate(rl.Mesh(shard=3), body):
        assert found["c"].scale.isnan() and found["a"].scale.isfinite()


def test_one_byte_travels_for_each_element_and_four_for_each_weight():
    def body(world):
        group = world.group("shard")
        before = group.ledger.bytes
        layout = gathered(world, weights())[1]
        return group.ledger.bytes - before, layout

    for sent, layout in rl.simulate(rl.Mesh(shard=2), body):
        assert sent == layout.total // 2 + 4 * len(SHAPES)
