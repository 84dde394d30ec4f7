"""Context parallel: attention of tokens on many ranks is that of one process, forward and backward, at the price that is told."""

import dataclasses
import math
import random
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from noting import late, noting
from rankloom.base.documents import document_cuts
from rankloom.base.errors import ConfigError, DataError, ShapeMismatch
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.pieces import gpt_pieces
from rankloom.parallel.context import ring_attention as ring_attention_file
from rankloom.parallel.context import tiles
from rankloom.parallel.context.all_to_all_attention import all_to_all_attention_bill, deal_heads
from rankloom.parallel.context.apply import context_parallel, own_tokens
from rankloom.parallel.context.part import Context
from rankloom.parallel.context.ring_attention import ring_attention_backward_bill, ring_attention_bill
from rankloom.parallel.context.rows import KINDS
from rankloom.parallel.context.sequences import cut_sequence
from rankloom.world.group import Group

RTOL = 1e-12   # fp64: the same terms in another order
RANKS = [1, 2, 3, 4]


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(query, key, value, causal, numbers=None):
    """Attention by its formula over whole rows [B, T, heads, D]; `numbers` [B, T] are those of documents."""
    reads = [head * key.shape[2] // query.shape[2] for head in range(query.shape[2])]
    q, k, v = query.transpose(1, 2), key[:, :, reads].transpose(1, 2), value[:, :, reads].transpose(1, 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool() if causal else torch.zeros(scores.shape[-2:]).bool()
    if numbers is not None:
        hidden = hidden | (numbers[:, None, :, None] != numbers[:, None, None, :])
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def documents_of(rows, length):
    """Each row packed in its own way; documents of one token too."""
    cut = random.Random(length)
    ends = [sorted(cut.sample(range(1, length), min(row + 1, length - 1))) for row in range(rows)]
    return torch.tensor([[sum(at >= end for end in row) for at in range(length)] for row in ends])


def whole_rows(length, kv_heads, heads=4, rows=2, dtype=torch.float64):
    shapes = [(rows, length, n, 6) for n in (heads, kv_heads, kv_heads, heads)]
    return [draw(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def on_one_rank(inputs, grad, causal, numbers):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = dense(*leaves, causal, numbers)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def on_this_rank(context, inputs, grad):
    leaves = [context.own(x).requires_grad_() for x in inputs]
    out = context.attend(*leaves)
    out.backward(context.own(grad))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_over_ranks_is_attention_in_one_process(ranks, kind, kv_heads):
    def body(world):
        for length in (5, 8, 19):
            *inputs, grad = whole_rows(length, kv_heads)
            for causal in (True, False):
                for numbers in (None, documents_of(2, length)):
                    cuts = None if numbers is None else document_cuts(numbers, length)
                    context = Context(world, length, kind, causal, documents=cuts)
                    truth = [context.own(x) for x in on_one_rank(inputs, grad, causal, numbers)]
                    torch.testing.assert_close(on_this_rank(context, inputs, grad), truth, rtol=RTOL, atol=RTOL)

    rl.simulate(ranks, body)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 2, 4), (6, 2, 5), (8, 4, 3), (12, 4, 3)])
def test_heads_need_not_divide_by_the_ranks_that_trade_them(heads, kv_heads, ranks):
    def body(world):
        *inputs, grad = whole_rows(11, kv_heads, heads)
        context = Context(world, 11, "all_to_all")
        truth = [context.own(x) for x in on_one_rank(inputs, grad, True, None)]
        torch.testing.assert_close(on_this_rank(context, inputs, grad), truth, rtol=RTOL, atol=RTOL)

    rl.simulate(ranks, body)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_gathered_shares_are_the_whole_rows_again(ranks, kind):
    def body(world):
        for length in (4, 9, 16):
            context, rows = Context(world, length, kind), torch.arange(3 * length * 2).view(3, length, 2)
            assert torch.equal(context.gather(context.own(rows)), rows)
            assert torch.equal(context.own(torch.arange(length)[None])[0], context.positions)

    rl.simulate(ranks, body)


def test_the_next_keys_are_on_their_way_while_a_rank_computes(monkeypatch):
    notes, forward = {}, ring_attention_file.tile_forward
    note = lambda word: notes.setdefault(threading.current_thread().name, []).append(word)
    monkeypatch.setattr(ring_attention_file, "tile_forward", lambda *args: note("computes") or forward(*args))

    def body(world):
        world.exchange = noting(world.exchange, note)
        context = Context(world, 9, causal=False)
        context.attend(*(context.own(x) for x in whole_rows(9, kv_heads=2)[:3]))

    rl.simulate(3, body)
    assert len(notes) == 3
    assert all(said == ["begins", "computes", "waits", "begins", "computes", "waits", "computes"] for said in notes.values())


def test_late_ranks_change_nothing():
    def body(world):
        world.exchange = late(world.exchange, random.Random(world.rank), 0.02)
        *inputs, grad = whole_rows(9, kv_heads=2)
        context = Context(world, 9)
        truth = [context.own(x) for x in on_one_rank(inputs, grad, True, None)]
        torch.testing.assert_close(on_this_rank(context, inputs, grad), truth, rtol=RTOL, atol=RTOL)

    rl.simulate(3, body)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_either_backend_16_bit_attention_is_off_by_its_roundings_only(backend, kind):
    def body(world):
        *inputs, grad = whole_rows(16, kv_heads=2, dtype=torch.bfloat16)
        context = Context(world, 16, kind)
        truth = [context.own(x) for x in on_one_rank([x.double() for x in inputs], grad.double(), True, None)]
        found = on_this_rank(context, inputs, grad)
        assert {x.dtype for x in found} == {torch.bfloat16}
        torch.testing.assert_close([x.double() for x in found], truth, rtol=2 ** -5, atol=2 ** -5)   # 8 bits, a few times

    rl.simulate(2, body, backend=backend)


def test_gradients_of_many_tiles_are_added_up_in_32_bits(monkeypatch):
    of_tiles = {0: 1.0}   # the first tile's; the others' are too small to change 1.0 in bf16, but not all three together
    monkeypatch.setattr(ring_attention_file, "tile_backward", lambda grad, saved, causal: tiles.TileGradients(
        *(torch.full_like(x, of_tiles.pop(0, 2 ** -9)) for x in saved[:3])))

    def body(world):
        context = Context(Group(None, 0, (0,)), 16, causal=False, documents=((0, 16),))
        object.__setattr__(context, "tiles", (context.tiles[0] * 4,))
        query, key, value = (torch.ones(1, 16, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        context.attend(query, key, value).sum().backward()
        return query.grad.unique().item()

    assert rl.simulate(1, body) == [1 + 2 ** -7]


def test_a_causal_ring_is_dealt_in_zigzag_and_everything_else_as_it_lies():
    def body(world):
        assert Context(world, 16).spans == cut_sequence(16, 2, zigzag=True)
        assert Context(world, 16, causal=False).spans == Context(world, 16, "all_to_all").spans == cut_sequence(16, 2, zigzag=False)

    rl.simulate(2, body)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_ring_sends_keys_and_values_once_around_and_their_gradients_behind_them(ranks, dtype):
    def body(world):
        *inputs, grad = whole_rows(13, kv_heads=2, dtype=dtype)
        context = Context(world, 13)
        leaves = [context.own(x).requires_grad_() for x in inputs]
        token_bytes = 2 * 2 * 2 * 6 * dtype.itemsize   # keys and values, 2 rows, 2 heads of 6
        out = context.attend(*leaves)
        bill = ring_attention_bill(context.tokens, token_bytes, world.rank)
        assert (world.ledger.messages, world.ledger.bytes) == (bill.messages, bill.sent)
        assert bill.messages == ranks - 1 and sum(context.tokens) == 13
        out.backward(context.own(grad))
        bill += ring_attention_backward_bill(context.tokens, token_bytes, world.rank, wide=1 if dtype.itemsize == 8 else 2)
        assert (world.ledger.messages, world.ledger.bytes) == (bill.messages, bill.sent)
        assert bill.messages == 3 * (ranks - 1)

    rl.simulate(ranks, body)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_all_to_all_sends_what_its_bill_says_both_ways(ranks, kv_heads):
    def body(world):
        *inputs, grad = whole_rows(13, kv_heads)
        context = Context(world, 13, "all_to_all")
        leaves = [context.own(x).requires_grad_() for x in inputs]
        out = context.attend(*leaves)
        bill = all_to_all_attention_bill(context.tokens, 4, kv_heads, 2 * 6 * 8, world.rank)
        forward = world.ledger.bytes
        assert (world.ledger.messages, forward) == (bill.messages, bill.sent) and bill.messages == 4 * (ranks - 1)
        out.backward(context.own(grad))
        assert world.ledger.messages == 2 * bill.messages
        return forward, world.ledger.bytes - forward

    sent = rl.simulate(ranks, body)
    assert sum(there for there, _ in sent) == sum(back for _, back in sent)   # who sent a row gets its gradient


def test_all_to_all_sends_a_fraction_of_the_ring_where_all_heads_are_of_their_own():
    ring = ring_attention_bill([64] * 8, 2 * 16, rank=0).sent               # 16 heads of one byte
    dealt = all_to_all_attention_bill([64] * 8, 16, 16, 1, rank=0).sent
    assert dealt * 4 == ring                                               # 4/p of each token's heads against 2 (p-1)/p of all


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returned, messages among them, which may be views of bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.bytes = max([self.bytes, *(x.nbytes for x in made if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("kernel", ["of the CPU", "plain formulas"])
def test_no_rank_ever_holds_the_scores_of_all_tokens_nor_more_than_a_block_of_keys(kernel, monkeypatch):
    length, ranks, block = 512, 4, 2 * 128 * 4 * 6
    if kernel != "of the CPU":
        monkeypatch.setattr(tiles, "_kernel", lambda query: "plain")
        monkeypatch.setattr(tiles, "SCORES", block)

    def body(world):
        context, inputs = Context(world, length), whole_rows(length, kv_heads=4, rows=1)
        *own, grad = (context.own(x) for x in inputs)
        leaves = [x.requires_grad_() for x in own]
        with Largest() as seen:
            context.attend(*leaves).backward(grad)
        return seen.bytes

    for largest in rl.simulate(ranks, body):
        assert largest / 8 <= block < length * length / 40   # keys and values of one rank's tokens, in fp64


CONFIG = GPTConfig(vocab_size=37, seq_len=24, width=24, layers=2, heads=4, kv_heads=2, ffn=24)


def test_a_sequence_with_fewer_tokens_than_ranks_is_refused():
    def body(world):
        with pytest.raises(DataError, match=r"a sequence of 2 tokens leaves some of 3 ranks without any"):
            context_parallel(GPT(CONFIG), world)(torch.zeros(1, 2, dtype=torch.long))

    rl.simulate(3, body)


class OtherNames(torch.nn.Module):
    def forward(self, input_ids, part=None):
        return input_ids


def test_what_cannot_be_is_refused_with_the_reason():
    def body(world):
        model = GPT(CONFIG)
        with pytest.raises(ConfigError, match=r"no context parallelism 'rng'. Did you mean 'ring'"):
            context_parallel(model, world, "rng")
        with pytest.raises(ConfigError, match="Linear.forward takes no `part`"):
            context_parallel(torch.nn.Linear(2, 2), world)
        with pytest.raises(ConfigError, match="OtherNames.forward takes no `tokens`, .* it takes input_ids, part"):
            context_parallel(OtherNames(), world)
        with pytest.raises(ConfigError, match=r"embedding_dropout draws its mask by how many tokens are here, .* let rl.prepare draw"):
            context_parallel(GPT(dataclasses.replace(CONFIG, dropout=0.1)), world)
        context_parallel(model, world, "all_to_all")
        with pytest.raises(ConfigError, match="GPT is context parallel already"):
            context_parallel(model, world)
        with pytest.raises(DataError, match="a sequence of 25 tokens, but the model reads at most 24"):
            model(torch.zeros(1, 25, dtype=torch.long))
        with pytest.raises(ConfigError, match="4 query heads cannot be dealt to 5 ranks"):
            model(torch.zeros(1, 20, dtype=torch.long))
        with pytest.raises(ShapeMismatch, match="expected rows of 20 tokens"):
            Context(world, 20).own(torch.zeros(1, 19))
        with pytest.raises(ShapeMismatch, match="expected 4 of 20 tokens here"):
            Context(world, 20).attend(*torch.zeros(3, 1, 5, 2, 4))
        with pytest.raises(ShapeMismatch, match="expected 4 of 20 tokens here"):
            Context(world, 20).attend(torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 2, 4))
        with pytest.raises(ShapeMismatch, match="documents for 1 row or for all, not 2"):
            Context(world, 20, documents=((0, 20), (0, 20))).attend(*torch.zeros(3, 3, 4, 2, 4))

    rl.simulate(5, body)
    rl.simulate(1, lambda world: context_parallel(GPT(dataclasses.replace(CONFIG, dropout=0.1)), world))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_refuses_documents_of_more_rows_than_it_is_given(ranks):
    def body(world):
        model = GPT(CONFIG)
        if world.size > 1:
            context_parallel(model, world)
        with pytest.raises(DataError, match="documents are a tensor of shape .* for 2 rows"):
            model(torch.zeros(2, 20, dtype=torch.long), documents=torch.zeros(3, 20))

    rl.simulate(ranks, body)


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize("query, key, value", [
    (torch.zeros(3, 4, 2, 4), torch.zeros(1, 4, 2, 4), None),                          # rows: kernels would read what lies behind
    (torch.zeros(1, 4, 2, 4), torch.zeros(3, 4, 2, 4), None),
    (torch.zeros(1, 4, 0, 4), torch.zeros(1, 4, 0, 4), None),                          # no heads
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 0, 4), None),
    (torch.zeros(1, 4, 0, 4), torch.zeros(1, 4, 2, 4), None),
    (torch.zeros(1, 4, 5, 4), torch.zeros(1, 4, 2, 4), None),                          # heads that do not divide
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 4, 4), None),
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 3), None),                          # widths
    (torch.zeros(1, 4, 2, 0), torch.zeros(1, 4, 2, 0), None),
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 3)),
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 3, 2, 4), None),                          # tokens
    (torch.zeros(4, 2, 4), torch.zeros(4, 2, 4), None),                                # no rows
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4, dtype=torch.float64), None),     # dtypes
    (torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 2, 4, dtype=torch.bfloat16)),
    (*torch.ones(2, 1, 4, 2, 4, dtype=torch.int64), None),
])
def test_a_query_and_keys_that_do_not_fit_each_other_are_refused(kind, query, key, value):
    def body(world):
        with pytest.raises(ShapeMismatch, match=r"rank \d: .*query \(.*key \(.*value \(.*floats alike"):
            Context(world, 8, kind).attend(query, key, key if value is None else value)

    rl.simulate(2, body)


def test_the_pieces_of_a_model_that_cuts_its_own_tokens_are_refused_without_a_part():
    """A pipeline calls the pieces, and every rank would compute all tokens."""
    def body(world):
        model = context_parallel(GPT(CONFIG), world)
        with pytest.raises(ConfigError, match="the model is context parallel, which cuts the tokens of its forward, .* say by `part`"):
            gpt_pieces(model)
        return len(gpt_pieces(model, part=lambda: Context(world, 20)))

    assert rl.simulate(2, body) == [CONFIG.layers + 2] * 2


def test_the_own_tokens_are_those_of_the_models_that_were_cut_over_the_group():
    def body(world):
        rows, kinds = torch.arange(8)[None], []
        kinds.append(own_tokens(rows, world))
        context_parallel(GPT(CONFIG), world, "all_to_all")
        kinds.append(own_tokens(rows, world))
        context_parallel(GPT(CONFIG), world, "ring")
        with pytest.raises(ConfigError, match="models were cut over this group as all_to_all and ring, which own other tokens; name"):
            own_tokens(rows, world)
        return [own.tolist() for own in kinds], own_tokens(rows, world, "ring").tolist()

    assert rl.simulate(2, body) == [([[[0, 1, 6, 7]], [[0, 1, 2, 3]]], [[0, 1, 6, 7]]), ([[[2, 3, 4, 5]], [[4, 5, 6, 7]]], [[2, 3, 4, 5]])]


def test_rows_without_tokens_are_refused():
    with pytest.raises(ShapeMismatch, match=r"own tokens.* x has shape \(5,\), expected whole rows \[B, T, ...\]"):
        rl.simulate(2, lambda world: own_tokens(torch.zeros(5), world))


def test_every_query_head_finds_the_key_value_head_it_reads():
    for heads, kv_heads, ranks in [(8, 8, 4), (8, 2, 4), (8, 1, 8), (6, 3, 4), (12, 4, 5)]:
        dealt = deal_heads(heads, kv_heads, ranks)
        assert [head for mine in dealt.query for head in mine] == list(range(heads))
        assert all(set(reads) == {head * kv_heads // heads for head in mine} for mine, reads in zip(*dealt, strict=True))
