"""`rl.fully_shard(compress=...)`: near the exact run, fewer bytes, exact steps first, equal replicas, and what it refuses."""

import pytest
import torch
from torch import nn

import rankloom as rl
from awkward import drawn
from rankloom.base.tensors import bytes_of
from rankloom.comm.subgroup import Subgroup
from seeded import seeded

WIDTH, ROWS, P = 32, 6, 2
MESHES = pytest.mark.parametrize("mesh", [rl.Mesh(shard=2), rl.Mesh(shard=3), rl.Mesh(replicate=2, shard=2)], ids=str)


def net() -> nn.Module:
    """Two blocks of one kind, so two units beside the root's; equal on all ranks, whatever thread asks."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    return drawn(nn.Sequential(*blocks, nn.Linear(WIDTH, 3)), torch.float32, scale=0.2)


def sharded(world: rl.World, **more):
    """The model and its optimizer."""
    replicas = world.group("replicate") if world.mesh.replicate > 1 else None
    model = rl.fully_shard(net(), world.group("shard"), replicas=replicas, units=nn.Sequential, **more)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def backward(model: nn.Module, world: rl.World, step: int) -> None:
    """Of rows that are this rank's own."""
    draw = torch.Generator().manual_seed(10 * step + world.rank)
    model(torch.randn(ROWS, WIDTH, generator=draw)).square().mean().backward()


def gradients(model: nn.Module) -> torch.Tensor:
    """Of this rank's slices; of one without elements there is none."""
    return torch.cat([owner.grad.flatten() for owner in model.parameters() if owner.grad is not None])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: rl.World, steps: range) -> torch.Tensor:
    """All values afterwards."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, world, step)
        optimizer.step()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@MESHES
def test_gradients_in_eight_bits_end_near_the_exact_run(mesh):
    """5 %: see the test of this name for the engine, tests/train/test_compressed_slices.py."""
    def body(world):
        first, exact, near = (train(*sharded(world, compress=name), world, range(steps))
                              for steps, name in ((0, "none"), (4, "none"), (4, "int8")))
        return ((near - exact).norm() / (exact - first).norm()).item()

    for off in rl.simulate(mesh, body):
        assert 0 < off < 0.05, "0 would mean that nothing was compressed"


@MESHES
def test_ranks_see_the_same_values_and_replicas_hold_the_same_bits(mesh):
    def body(world):
        model, optimizer = sharded(world, compress="1bit")
        whole = train(model, optimizer, world, range(4))
        return bytes_of(whole).tolist(), (world.group("shard").rank, [bytes_of(owner.detach()).tolist() for owner in model.parameters()])

    values, slices = zip(*rl.simulate(mesh, body))
    assert all(value == values[0] for value in values)
    assert len({str(held) for held in slices}) == mesh.shard


@MESHES
def test_a_backward_saves_the_bytes_that_the_bills_say_once_it_compresses(mesh):
    def body(world, **more):
        model, optimizer = sharded(world, **more)
        ledgers = [world.group(axis).ledger for axis in ("shard", "replicate")]
        train(model, optimizer, world, range(1))
        before = [ledger.bytes for ledger in ledgers]
        backward(model, world, 1)
        bill = sum(gradient.sums.bill().sent for gradient in model._sharding.gradients())
        return [ledger.bytes - was for ledger, was in zip(ledgers, before)], bill

    exact, later, lossy = (rl.simulate(mesh, lambda world, more=more: body(world, **more)) for more in (
        {}, {"compress": "int8", "compress_after": 2}, {"compress": "int8"}))
    assert [sent for sent, _ in later] == [sent for sent, _ in exact]
    for ((inside, between), dear), ((fewer_inside, fewer_between), cheap) in zip(exact, lossy):
        assert cheap < dear and inside + between - fewer_inside - fewer_between == dear - cheap
        assert (fewer_inside < inside, fewer_between < between) == (mesh.replicate == 1, mesh.replicate > 1)


def test_exact_steps_first_are_those_of_the_exact_run_to_the_bit():
    def body(world):
        exact, later = (train(*sharded(world, **more), world, range(2)) for more in ({}, {"compress": "1bit", "compress_after": 2}))
        exact_3, later_3 = (train(*sharded(world, **more), world, range(3)) for more in ({}, {"compress": "1bit", "compress_after": 2}))
        return torch.equal(exact, later), torch.equal(exact_3, later_3)

    assert rl.simulate(rl.Mesh(shard=P), body) == [(True, False)] * P


def test_backwards_inside_of_no_sync_send_nothing_and_their_sum_is_compressed_once():
    def body(world, compress):
        model, _ = sharded(world, compress=compress, reshard_after_forward=False)
        ledger = world.group("shard").ledger
        with model.no_sync():
            backward(model, world, 0)
            before = ledger.bytes
            backward(model, world, 1)
            inside = ledger.bytes - before
        backward(model, world, 2)
        return inside, gradients(model)

    for (quiet, exact), (silent, near) in zip(*(rl.simulate(rl.Mesh(shard=P), lambda w, c=c: body(w, c)) for c in ("none", "int8"))):
        assert quiet == silent == 0
        assert 0 < (near - exact).norm() < 0.02 * exact.norm()   # one rounding to 1/127 of the largest of a block


def test_what_was_lost_comes_with_the_next_step_and_not_after_a_state_was_loaded():
    """Backward twice of the same rows: the second sum has the error of the first, unless a state was loaded between."""
    def body(world):
        found = []
        for load in (False, True):
            model, _ = sharded(world, compress="1bit")
            backward(model, world, 0)
            first = gradients(model)
            if load:
                model.load_state_dict(model.state_dict())
            model.zero_grad()
            backward(model, world, 0)
            found.append(torch.equal(first, gradients(model)))
        return found

    assert rl.simulate(rl.Mesh(shard=P), body) == [[False, True]] * P


@pytest.mark.parametrize(("mesh", "options", "text"), [
    (rl.Mesh(shard=2), {"compress": "int9"}, "int9.*int8"),
    (rl.Mesh(shard=2), {"compress": "powersgd"}, "fully_shard: compress='powersgd' needs whole matrices"),
    (rl.Mesh(shard=2), {"compress": "topk"}, "fully_shard: compress='topk' has no reduce-scatter"),
    (rl.Mesh(shard=2), {"compress_after": 3}, "compress_after"), (rl.Mesh(shard=2), {"compress": "int8", "compress_after": -1}, "-1"),
])
def test_what_cannot_be_compressed_is_refused(mesh, options, text):
    def body(world):
        with pytest.raises(rl.ConfigError, match=text):
            sharded(world, **options)
        return True

    assert rl.simulate(mesh, body) == [True] * mesh.size


def test_complex_parameters_are_summed_exactly():
    """Rounding them as real numbers lost what is imaginary."""
    class Turning(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(super().forward(x.to(torch.complex64))).square()

    def body(world, compress):
        model = rl.fully_shard(seeded(0)(Turning)(), world, compress=compress)
        backward(model, world, 1)
        return gradients(model)

    exact, near = (rl.simulate(rl.Mesh(shard=P), lambda world, c=c: body(world, c)) for c in ("none", "int8"))
    assert all(torch.equal(a, b) for a, b in zip(exact, near, strict=True))


def test_a_group_without_a_second_connection_compresses_between_its_gathers():
    """In a thread, both at once over one connection ended the process."""
    def body(world):
        part = Subgroup(world, (0, 1))
        model = rl.fully_shard(net(), part, units=nn.Sequential, compress="int8")
        assert all(gradient.sums.is_compressed and gradient.sums._worker is None for gradient in model._sharding.gradients())
        return train(model, torch.optim.SGD(model.parameters(), lr=0.3), world, range(6)).isfinite().all().item()

    assert rl.simulate(P, body) == [True] * P
