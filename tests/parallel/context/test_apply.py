"""A model under context parallel: its loss and gradients are those of one process, whatever the rows are and who holds them."""

import copy
import dataclasses
import random

import pytest
import torch

import rankloom as rl
from rankloom.models.config import GPTConfig
from rankloom.models.generate import generate
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.models.sequence_part import WHOLE
from rankloom.parallel.context.apply import context_parallel, own_tokens
from rankloom.parallel.context.rows import KINDS

RTOL = 1e-12   # fp64: the same terms in another order
RANKS = [1, 2, 3, 4]
CONFIG = GPTConfig(vocab_size=37, seq_len=24, width=24, layers=2, heads=4, kv_heads=2, ffn=24)


def documents_of(rows, length):
    """Each row packed in its own way; documents of one token too."""
    cut = random.Random(length)
    ends = [sorted(cut.sample(range(1, length), min(row + 1, length - 1))) for row in range(rows)]
    return torch.tensor([[sum(at >= end for end in row) for at in range(length)] for row in ends])


def batch_of(rows=3, length=21, seed=0):
    make = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 37, (rows, length), generator=make) for _ in range(2))
    targets[:, :4] = -100
    return tokens, targets


def loss_and_gradients(model, batch, **kwargs):
    total, count = model(batch[0], targets=batch[1], **kwargs)
    total.backward()
    return total.detach(), count, {name: p.grad for name, p in model.named_parameters()}


def one_document_at_a_time(model, batch, numbers):
    """The truth for packed rows: every document is a row of its own."""
    for row in range(len(numbers)):
        for number in numbers[row].unique():
            at = numbers[row] == number
            total, _ = model(batch[0][row:row + 1, at], targets=batch[1][row:row + 1, at])
            total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [False, True])
def test_a_model_over_context_ranks_has_the_loss_and_gradients_of_one_process(ranks, kind, tie):
    model, batch = GPT(dataclasses.replace(CONFIG, tie=tie), dtype=torch.float64), batch_of()
    truth = loss_and_gradients(copy.deepcopy(model), batch)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world, kind)
        total, count, grads = loss_and_gradients(mine, batch)
        assert count == (own_tokens(batch[1], world, kind) != -100).sum()
        assert world.all_reduce(count) == truth[1]
        torch.testing.assert_close(world.all_reduce(total.clone()), truth[0], rtol=RTOL, atol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(world.all_reduce(grad), truth[2][name], rtol=RTOL, atol=RTOL)

    rl.simulate(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_if_each_were_a_row_of_its_own(ranks, kind):
    model, batch, numbers = GPT(CONFIG, dtype=torch.float64), batch_of(), documents_of(3, 21)
    truth = one_document_at_a_time(copy.deepcopy(model), batch, numbers)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world, kind)
        _, _, grads = loss_and_gradients(mine, batch, documents=numbers)
        for name, grad in grads.items():
            torch.testing.assert_close(world.all_reduce(grad), truth[name], rtol=RTOL, atol=RTOL)

    rl.simulate(ranks, body)


class TakesDocuments(GPT):
    """Its documents may be given by position."""

    def forward(self, tokens, documents=None, targets=None, part=WHOLE):
        return super().forward(tokens, targets, documents=documents, part=part)


def test_documents_given_by_position_are_those_of_the_part_too():
    model, (tokens, targets), numbers = TakesDocuments(CONFIG, dtype=torch.float64), batch_of(), documents_of(3, 21)
    truth, _ = model(tokens, numbers, targets)

    def body(world):
        total, _ = context_parallel(copy.deepcopy(model), world)(tokens, numbers, targets)
        torch.testing.assert_close(world.all_reduce(total.detach().clone()), truth.detach(), rtol=RTOL, atol=0)

    rl.simulate(2, body)


def test_one_process_packs_documents_by_the_same_words():
    model, batch, numbers = GPT(CONFIG, dtype=torch.float64), batch_of(), documents_of(3, 21)
    truth = one_document_at_a_time(copy.deepcopy(model), batch, numbers)
    lengths = [[0, *(row.diff().nonzero().flatten() + 1).tolist(), 21] for row in numbers]   # the other form that document_cuts takes
    for documents in (numbers, lengths):
        for name, grad in loss_and_gradients(copy.deepcopy(model), batch, documents=documents)[2].items():
            torch.testing.assert_close(grad, truth[name], rtol=RTOL, atol=RTOL)
    with pytest.raises(rl.DataError, match="a document number comes back"):
        model(batch[0], documents=numbers % 2)


@pytest.mark.parametrize("mesh", [rl.Mesh(context=2, tensor=2), rl.Mesh(pipe=2, context=2), rl.Mesh(pipe=2, shard=2)], ids=str)
def test_packed_documents_train_alike_on_every_axis(mesh):
    def body(world):
        engine = rl.prepare(GPT(CONFIG, dtype=torch.float64), loss=language_model_loss, optimizer=torch.optim.AdamW, world=world, clip=0.5,
                            accumulate=2)
        mine = lambda rows: rows.tensor_split(engine.group.size)[engine.group.rank]
        tokens, targets, documents = map(mine, (*batch_of(4), documents_of(4, 21)))
        reports = [engine.step(((tokens, documents), targets)) for _ in range(2)]
        told = [value for report in reports for value in (report.loss, report.grad_norm)]
        return [*told, engine.evaluate([((tokens, documents), targets)]).loss]

    (expected,) = rl.simulate(1, body)
    for found in rl.simulate(mesh, body):
        assert found == pytest.approx(expected, rel=RTOL)


def test_logits_are_those_of_the_own_tokens_and_generation_stays_whole():
    model, (tokens, _) = GPT(CONFIG, dtype=torch.float64), batch_of()
    truth, text = model(tokens), generate(model, tokens[:, :3], max_new_tokens=5, temperature=0)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world)
        torch.testing.assert_close(mine(tokens), own_tokens(truth, world), rtol=RTOL, atol=RTOL)
        assert torch.equal(generate(mine, tokens[:, :3], max_new_tokens=5, temperature=0), text)

    rl.simulate(3, body)


class OwnModel(torch.nn.Module):
    """Has no config, and takes whatever else it is given by name."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(37, 8, dtype=torch.float64)

    def forward(self, tokens, part=WHOLE, **more):
        heads = self.embedding(tokens).unflatten(-1, (2, 4))
        return part.attend(heads, heads, heads) * more["weights"][..., None, None] * more["factor"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_the_users_own_is_given_what_it_takes_by_other_names_cut_too(kind):
    model, (tokens, _) = OwnModel(), batch_of()
    more = {"weights": torch.arange(tokens.numel(), dtype=torch.float64).view(tokens.shape), "factor": 2.0}
    truth = model(tokens, **more)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world, kind)
        torch.testing.assert_close(mine(tokens, **more), own_tokens(truth, world, kind), rtol=RTOL, atol=RTOL)

    rl.simulate(2, body)


def test_a_copy_of_the_model_has_the_same_peers_and_may_be_wrapped():
    model, (tokens, _) = GPT(CONFIG, dtype=torch.float64), batch_of()
    truth = model(tokens)

    def body(world):
        mine = copy.deepcopy(context_parallel(copy.deepcopy(model), world))
        plain = mine.forward
        mine.forward = lambda *args, **kwargs: plain(*args, **kwargs)
        torch.testing.assert_close(mine(tokens=tokens), own_tokens(truth, world), rtol=RTOL, atol=RTOL)

    rl.simulate(2, body)


def test_recomputed_blocks_of_an_older_batch_still_know_how_it_was_cut():
    model, batches = GPT(CONFIG, dtype=torch.float64), [batch_of(length=20), batch_of(length=9, seed=1)]
    truth = copy.deepcopy(model)
    sum(truth(tokens, targets=targets)[0] for tokens, targets in batches).backward()

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world)
        for block in mine.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: torch.utils.checkpoint.checkpoint(plain, *args, use_reentrant=False)
        losses = [mine(tokens, targets=targets)[0] for tokens, targets in batches]
        for loss in losses:
            loss.backward()
        for (_, mine_p), (name, p) in zip(mine.named_parameters(), truth.named_parameters(), strict=True):
            torch.testing.assert_close(world.all_reduce(mine_p.grad), p.grad, rtol=RTOL, atol=RTOL, msg=name)

    rl.simulate(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_break_their_graph_where_ranks_talk_and_nowhere_else(kind):
    model, batch = GPT(CONFIG, dtype=torch.float64), batch_of()
    truth = loss_and_gradients(copy.deepcopy(model), batch)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world, kind)
        for block in mine.blocks:
            block.compile(backend="eager")
        total, _, grads = loss_and_gradients(mine, batch)
        torch.testing.assert_close(world.all_reduce(total), truth[0], rtol=RTOL, atol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(world.all_reduce(grad), truth[2][name], rtol=RTOL, atol=RTOL)

    rl.simulate(2, body)


def in_a_process(world):
    model, batch = GPT(CONFIG, dtype=torch.float64), batch_of()
    total, count = language_model_loss(context_parallel(model, world), batch)
    return world.all_reduce(total.detach()).item() / world.all_reduce(count).item()


def test_real_processes_agree_with_one():
    total, count = language_model_loss(GPT(CONFIG, dtype=torch.float64), batch_of())
    for mean in rl.spawn(2, in_a_process):
        assert mean == pytest.approx(total.item() / count.item(), rel=RTOL)


def test_one_row_alone_and_what_is_no_model_or_group_are_refused_in_words():
    model = GPT(CONFIG)
    called = lambda world: context_parallel(copy.deepcopy(model), world)(torch.zeros(8, dtype=torch.long))
    with pytest.raises(rl.ShapeMismatch, match=r"tokens of shape \(8,\), expected rows \[B, T\]"):
        rl.simulate(2, called)
    with pytest.raises(rl.ConfigError, match="group=None is of type NoneType, expected a Group"):
        context_parallel(model, None)
    with pytest.raises(rl.ConfigError, match="model='gpt' is of type str, expected a torch module"):
        rl.simulate(2, lambda world: context_parallel("gpt", world))
