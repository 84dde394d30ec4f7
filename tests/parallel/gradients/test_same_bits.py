"""CanonicalReducer: gradients folded leaf by leaf are those of the tree, on any number of ranks."""

import pytest
import torch
from torch import nn

import rankloom as rl
from awkward import fingerprint, loss_sum, make_batches, make_model, share
from rankloom.base import shares
from rankloom.comm.canonical import Fold, Node
from rankloom.parallel.gradients.same_bits import CanonicalReducer


class Model(nn.Module):
    """Weights whose gradients differ wildly in size from leaf to leaf; `rare` is used by leaf 2 only."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(n, generator=draw).to(dtype)) for n in (5, 40))
        self.rare, self.never = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, leaf: int) -> torch.Tensor:
        x = torch.randn(40, generator=torch.Generator().manual_seed(leaf)) * 10.0 ** (leaf % 5 - 2)
        total = (self.a.sum() * self.b * x.to(self.b.dtype)).sin().sum()
        return total + (self.rare * x[:3]).sum() if leaf == 2 else total


def reduce(world: rl.World, leaves: int, steps: int = 2) -> tuple[dict, list[float]]:
    model = Model()
    reducer = CanonicalReducer(dict(model.named_parameters()), world)
    for step in range(steps):
        reducer.abandon()
        reducer.begin_shards(leaves)
        for leaf in shares.share(world.rank, world.size, leaves):
            loss = model(leaf + step)
            loss.backward()
            reducer.add_shard(leaf, torch.tensor([loss.item(), 1.0], dtype=torch.float64))
        totals, _ = reducer.finish()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, totals.tolist()


def folded_here(leaves: int, step: int) -> dict:
    """The tree over plain backward passes, in one place."""
    folds: dict[str, Fold] = {}
    for leaf in range(leaves):
        model = Model()
        model(leaf + step).backward()
        for name, p in model.named_parameters():
            folds.setdefault(name, Fold(leaves)).push(Node(leaf, 0), torch.zeros_like(p) if p.grad is None else p.grad)
    return {name: fold.total() for name, fold in folds.items()}


@pytest.mark.parametrize("leaves", [4, 7, 8])
def test_gradients_are_bit_for_bit_those_of_the_tree_on_any_number_of_ranks(leaves):
    truth = folded_here(leaves, step=1)
    for ranks in (1, 2, 3, 4):
        for grads, totals in rl.simulate(ranks, lambda w: reduce(w, leaves)):
            assert grads["never"] is None
            assert all(torch.equal(grads[name], truth[name]) for name in ("a", "b", "rare"))
            assert totals[1] == leaves


def test_totals_have_the_same_bits_too():
    said = {tuple(total.hex() for total in totals) for ranks in (1, 2, 3, 5) for _, totals in rl.simulate(ranks, lambda w: reduce(w, 8))}
    assert len(said) == 1


def test_nothing_leaves_before_the_last_leaf():
    """Laid out once, after the first leaf of the first step; from then on a leaf costs no communication."""
    def body(world):
        model = Model()
        reducer = CanonicalReducer(dict(model.named_parameters()), world)
        calls = []
        for _ in range(2):
            reducer.abandon()
            reducer.begin_shards(4)
            for leaf in shares.share(world.rank, world.size, 4):
                model(leaf).backward()
                reducer.add_shard(leaf, torch.zeros(2, dtype=torch.float64))
                calls.append(world.ledger.calls)
            reducer.finish()
            calls.append(world.ledger.calls)
        return calls

    for first, second, done, third, fourth, _ in rl.simulate(2, body):
        assert first == second == 1 and done == third == fourth


def test_a_step_may_have_fewer_leaves_than_the_one_before():
    def body(world):
        model = Model()
        reducer = CanonicalReducer(dict(model.named_parameters()), world)
        for leaves in (8, 3):
            reducer.abandon()
            reducer.begin_shards(leaves)
            for leaf in shares.share(world.rank, world.size, leaves):
                model(leaf).backward()
                reducer.add_shard(leaf, torch.zeros(2, dtype=torch.float64))
            reducer.finish()
        return model.b.grad.clone()

    truth = folded_here(3, step=0)["b"]
    assert all(torch.equal(mine, truth) for ranks in (1, 2, 3) for mine in rl.simulate(ranks, body))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bits_are_the_same_where_slices_lie_in_the_hosts_memory(stage):
    """A slice there is no part of the whole gradient that ranks fold."""
    def train(world, **options):
        engine = rl.prepare(make_model(torch.float32), loss=loss_sum, world=world, deterministic=4, clip=1.0,
                            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **options)
        losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_batches(steps=2)]
        return fingerprint(engine.full_state_dict(), losses)

    expected = rl.simulate(1, train)
    for ranks in (1, 2, 3):
        assert set(rl.simulate(ranks, lambda world: train(world, stage=stage, offload=True))) == set(expected)
