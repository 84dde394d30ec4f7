"""Ranks that hold one model between them must bring the same rows, and find the same loss; others rows of their own: nothing else tells."""

import copy
import threading
import warnings

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train.first_steps import expect_one_model

SHAPE = GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=2, kv_heads=2, ffn=24)


def rows(rank: int, n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(37, (n, 13), generator=torch.Generator().manual_seed(rank))
    return drawn[:, :-1], drawn[:, 1:]


def prepare(model: nn.Module, world: rl.World, loss, **more) -> rl.Engine:
    return rl.prepare(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), world=world, **more)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}, {"pipe": 2}, {"replicate": 2, "tensor": 2}, {"pipe": 2, "tensor": 2}])
@pytest.mark.parametrize("cut", [False, True], ids=["a batch", "micro-batches"])
def test_rows_dealt_by_the_rank_in_the_world_are_refused_before_the_first_step(axes, cut):
    """Each rank computed with parts of another's activations, and the loss fell a little."""
    def body(world):
        model = GPT(SHAPE)
        before = copy.deepcopy(model.state_dict())
        engine = prepare(model, world, language_model_loss, accumulate=2)
        with pytest.raises(rl.BatchError, match="rank [13] brought other rows .* than rank [02]: tensor 0 .*`engine.group.rank`"):
            engine.step([rows(world.rank), rows(world.rank + 8)] if cut else rows(world.rank))
        after = engine.full_state_dict()["model"]
        assert all(torch.equal(after[name], value) for name, value in before.items())
        shared = engine.group.rank
        assert engine.step([rows(shared), rows(shared + 8)] if cut else rows(shared)).count > 0

    rl.simulate(rl.Mesh(**axes), body)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"deterministic": 2}], ids=str)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_a_sparse_tensor_is_a_batch(p, more, layout):
    def body(world):
        engine = prepare(nn.Linear(4, 1), world, lambda model, x: (model(x.to_dense()).square().sum(), len(x)), **more)
        return engine.step(torch.eye(4).roll(world.rank, 1).to_sparse(layout=layout)).count

    assert rl.simulate(p, body) == [4 * p] * p


@pytest.mark.parametrize("turned", [torch.Tensor.conj, torch._neg_view], ids=["conjugated", "negated"])
@pytest.mark.parametrize("more", [{}, {"accumulate": 2}], ids=str)
def test_a_tensor_that_is_conjugated_or_negated_when_read_is_a_batch(turned, more):
    def body(world):
        x = turned(torch.full((4, 4), 1 + 2j) + world.rank)
        engine = prepare(nn.Linear(4, 1), world, lambda model, x: (model(x.real).sum(), len(x)), **more)
        return engine.step(x).count

    assert rl.simulate(2, body) == [8, 8]


def test_a_run_that_goes_on_is_told_too():
    def body(world):
        start = lambda: prepare(GPT(SHAPE), world, language_model_loss)
        before, after = start(), start()
        before.step(rows(0))
        after.load_full_state_dict(before.full_state_dict())
        with pytest.raises(rl.BatchError, match="brought other rows"):
            after.step(rows(world.rank))
        before.step(rows(world.rank))   # each later batch would cost a message and a pass

    rl.simulate(rl.Mesh(tensor=2), body)


@pytest.mark.parametrize("settings", [{}, {"stage": 3}, {"deterministic": True}])
def test_rows_that_were_not_dealt_are_a_warning_in_the_first_step(settings):
    """Each of four ranks ran over all data, and an epoch took as long as on one."""
    def body(world, key, steps=1):
        engine = prepare(Two(), world, lambda model, x: (model(x).square().sum(), len(x)), **settings)
        for step in range(steps):
            engine.step(torch.randn(8, 4, generator=torch.Generator().manual_seed(key(world.rank) if step == 0 else 9)))

    with pytest.warns(UserWarning, match=r"ranks \[0, 2\] brought the same rows to the first step, so each row counts 2 times"):
        rl.simulate(3, lambda world: body(world, lambda rank: rank % 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.simulate(3, lambda world: body(world, lambda rank: rank, steps=2))
        rl.simulate(2, lambda world: prepare(Two(), world, lambda model, x: (model(x).square().sum(), len(x))).step(torch.ones(2, 4)))
        rl.simulate(1, lambda world: body(world, lambda rank: rank))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        for at, param in enumerate(self.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(at))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def penalised(model, x):
    return model(x).square().sum() + sum(param.square().sum() for param in model.parameters()), len(x)


def test_a_loss_that_reads_parts_of_parameters_is_refused_before_the_update():
    """Its value was that of rank 0's parts."""
    def body(world):
        engine = prepare(Two(), world, penalised, tensor_plan={"up": "colwise", "down": "rowwise"})
        with pytest.raises(rl.LossError, match=r"on rank 0 and .* on rank 1, .*weight_decay"):
            engine.step(torch.ones(2, 4))
        assert torch.equal(engine.full_state_dict()["model"]["down.weight"], Two().down.weight)

    rl.simulate(rl.Mesh(tensor=2), body)


def test_noise_of_a_ranks_own_where_ranks_compute_one_loss_is_refused():
    def body(world):
        draws = torch.Generator().manual_seed(world.rank)
        loss = lambda model, x: ((model(x) + torch.randn(2, 4, generator=draws).to(x.device)).square().sum(), len(x))
        engine = prepare(Two(), world, loss, tensor_plan={"up": "colwise", "down": "rowwise"})
        with pytest.raises(rl.LossError, match="Noise must be the same on these ranks"):
            engine.step(torch.ones(2, 4))

    rl.simulate(rl.Mesh(tensor=2), body)


class NormedHeads(nn.Module):
    """A norm of each head, whose weight all heads share: a rank that has some of the heads has some terms of its gradient.

    It cannot be copied, so no copies of it show that before the first call.
    """

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        self.up, self.norm, self.down = nn.Linear(4, 12), nn.RMSNorm(3), nn.Linear(12, 4)
        self.after = nn.Linear(4, 4)   # whole, and its gradient too
        for at, param in enumerate(self.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(at))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.down(self.norm(self.up(x).unflatten(-1, (-1, 3))).flatten(-2)))


HEADS = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(shard=3, tensor=2), rl.Mesh(replicate=2, tensor=4)], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_that_no_tensor_rank_has_whole_is_refused_before_the_update(mesh, stage):
    """The loss was right, and the norms of the ranks went different ways."""
    batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(5))
    loss = lambda model, x: (model(x).square().sum(), len(x))

    def body(world):
        told = prepare(NormedHeads(), world, loss, stage=stage, tensor_plan=HEADS)
        rows = batch.tensor_split(told.group.size)[told.group.rank]
        with pytest.raises(rl.LossError, match=r"the gradient of norm\.weight, which every tensor rank holds whole, .* has a part of it"):
            told.step(rows)
        assert torch.equal(told.full_state_dict()["model"]["norm.weight"], NormedHeads().norm.weight)
        right = prepare(NormedHeads(), world, loss, stage=stage, tensor_plan=HEADS | {"norm": "replicated_with_grad_allreduce"})
        return right.step(rows).grad_norm

    alone = rl.simulate(1, lambda world: prepare(NormedHeads(), world, loss).step(batch).grad_norm)
    assert rl.simulate(mesh, body) == pytest.approx(alone * mesh.size, rel=1e-5)


def test_and_one_that_comes_when_what_stands_behind_it_is_zero_no_more():
    """An output that begins with zeros gives no gradient to what is before it in the first step, and equal ones to all ranks."""
    def begin():
        model = NormedHeads()
        nn.init.zeros_(model.down.weight)
        return model

    batch, loss = torch.randn(12, 4, generator=torch.Generator().manual_seed(5)), lambda model, x: (model(x).sin().sum(), len(x))

    def body(world):
        told = prepare(begin(), world, loss, tensor_plan=HEADS)
        told.step(batch)
        with pytest.raises(rl.LossError, match=r"the gradient of norm\.weight, which every tensor rank holds whole, .* has a part of it"):
            told.step(batch)
        right = prepare(begin(), world, loss, tensor_plan=HEADS | {"norm": "replicated_with_grad_allreduce"})
        return [right.step(batch).loss for _ in range(7)]

    expected, = rl.simulate(1, lambda world: [engine.step(batch).loss for engine in [prepare(begin(), world, loss)] for _ in range(7)])
    for losses in rl.simulate(rl.Mesh(tensor=2), body):
        assert losses == pytest.approx(expected, rel=1e-4)   # fp32


@pytest.mark.parametrize(("found", "is_told"), [
    ([[3.0, 1.0], [3.0, 1.02]], True), ([[3.0, 1.0], [3.0, 1.005]], False), ([[3.0, 0.0], [3.0, 1.0]], True),
    ([[3.0, 1e-8], [3.0, 0.0]], False), ([[0.0, 0.0], [0.0, 0.0]], False), ([[float("inf"), 1.0], [float("inf"), 1.0]], False)])
def test_norms_are_told_of_unless_they_differ_by_no_more_than_rounding_leaves(found, is_told):
    def body(world):
        totals, norms = torch.tensor([2.0, 1.0]), dict(zip(("one", "other"), found[world.rank]))
        if is_told:
            with pytest.raises(rl.LossError, match="the gradient of other"):
                expect_one_model(world, totals, norms)
        else:
            expect_one_model(world, totals, norms)

    rl.simulate(rl.Mesh(tensor=2), body)


class TiedByHand(nn.Module):
    """Its head is no module, but reads the matrix of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(37, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return torch.nn.functional.linear(x + self.down(self.up(x).relu()), self.embedding.weight)


def test_torch_s_error_in_a_model_that_reads_a_cut_matrix_itself_names_what_the_plan_cuts():
    def loss(model, batch):
        logits = model(batch[0])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    def body(world):
        plan = {"embedding": "embedding_rowwise", "up": "colwise", "down": "rowwise"} if world.mesh.tensor > 1 else None
        prepare(copy.deepcopy(plain), world, loss, tensor_plan=plan).step((rows(0)[0], torch.full((2, 12), 36)))

    plain = TiedByHand()
    rl.simulate(1, body)
    with pytest.raises(IndexError, match="Target 36 is out of bounds") as caught:
        rl.simulate(rl.Mesh(tensor=2), body)
    (note,) = (note for note in caught.value.__notes__ if "plan" in note)
    assert note.startswith("the tensor plan cuts embedding.weight, up.weight, up.bias (4 in all)") and "colwise_rep" in note
