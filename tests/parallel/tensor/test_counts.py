"""What tensor parallel sends: one all-reduce forward and one backward for each half block, or a reduce-scatter and an all-gather."""

import pytest
import torch

import rankloom as rl
from rankloom.base.cost import Bill, all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.parallel.tensor import vocabulary
from rankloom.parallel.tensor.holding import holdings, sum_partial_gradients

ROWS, LENGTH, WIDTH, LAYERS, ITEM = 2, 12, 24, 3, 8
STREAM = ROWS * LENGTH * WIDTH * ITEM    # bytes of the residual stream
RANKS = [2, 3, 4]


def make(**shape) -> rl.GPT:
    numbers = dict(vocab_size=36, seq_len=LENGTH, width=WIDTH, layers=LAYERS, heads=12, kv_heads=12, ffn=48) | shape
    return rl.GPT(rl.GPTConfig(**numbers), dtype=torch.float64)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 36, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


class Count:
    """What a rank sent between two looks."""

    def __init__(self, ledger):
        self.ledger, self.seen = ledger, (0, 0, 0)
        self.look()

    def look(self) -> tuple[int, int, int]:
        """(calls, messages, bytes) since the last look."""
        now = (self.ledger.calls, self.ledger.messages, self.ledger.bytes)
        since = tuple(a - b for a, b in zip(now, self.seen))
        self.seen = now
        return since


def forward_and_backward(model, world) -> tuple[tuple, tuple]:
    ids, targets = batch()
    count = Count(world.ledger)
    total, _ = model(ids, targets=targets)
    forward = count.look()
    total.backward()
    return forward, count.look()


def total(bills: list[Bill]) -> tuple[int, int, int]:
    whole = sum(bills, Bill())
    return len(bills), whole.messages, whole.sent


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_half_block_costs_one_all_reduce_each_way(ranks, tie):
    stream, stats = all_reduce_bill(STREAM, ranks), all_gather_bill(3 * ROWS * LENGTH * ITEM, ranks)
    for forward, backward in rl.simulate(ranks, lambda world: forward_and_backward(rl.tensor_parallel(make(tie=tie), None, world), world)):
        assert forward == total([stream] * (1 + 2 * LAYERS) + [stats])    # embedding, half blocks; three numbers a row for the loss
        assert backward == total([stream] * (2 * LAYERS + 1))             # half blocks, output


@pytest.mark.parametrize("ranks", RANKS)
def test_split_by_tokens_it_costs_a_reduce_scatter_and_an_all_gather_each_way(ranks):
    def body(world):
        model = make()
        return forward_and_backward(rl.tensor_parallel(model, model.tp_sequence_plan, world, finish_gradients=False), world)

    scatter, gather = scatter_bill(STREAM, ranks), all_gather_bill(STREAM // ranks, ranks)
    for forward, backward in rl.simulate(ranks, body):
        assert forward == total([scatter, gather] * (1 + 2 * LAYERS) + [all_gather_bill(3 * ROWS * LENGTH * ITEM, ranks)])
        assert backward == total([scatter, gather] * (1 + 2 * LAYERS))
        assert scatter + gather == all_reduce_bill(STREAM, ranks)         # the same bytes as the other form


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_owed_goes_in_one_message_a_step(ranks):
    def body(world):
        model = make()
        rl.tensor_parallel(model, model.tp_sequence_plan, world, finish_gradients=False)
        forward_and_backward(model, world)
        count = Count(world.ledger)
        sum_partial_gradients([(name, param.grad) for name, param in model.named_parameters()], holdings(model), world)
        return count.look()

    norms = (2 * LAYERS + 1) * WIDTH * ITEM
    assert rl.simulate(ranks, body) == [total([all_reduce_bill(norms, ranks)])] * ranks


def test_shared_key_value_heads_are_summed_among_those_that_hold_them():
    def body(world):
        model = rl.tensor_parallel(make(kv_heads=2), None, world, finish_gradients=False)
        forward_and_backward(model, world)
        count = Count(world.ledger)
        sum_partial_gradients([(name, param.grad) for name, param in model.named_parameters()], holdings(model), world)
        return count.look()

    heads = LAYERS * 2 * 2 * WIDTH * ITEM    # keys and values, one head of width 2
    assert rl.simulate(4, body) == [(1, 1, heads)] * 4    # to the one other rank that holds the head


def test_a_loss_in_chunks_sends_one_message_for_each(monkeypatch):
    monkeypatch.setattr(vocabulary, "chunk_rows", lambda vocab, device: 7)
    stream = all_reduce_bill(STREAM, 2)
    stats = [all_gather_bill(3 * rows * ITEM, 2) for rows in (7, 7, 7, 3)]
    for forward, backward in rl.simulate(2, lambda world: forward_and_backward(rl.tensor_parallel(make(), None, world), world)):
        assert forward == total([stream] * (1 + 2 * LAYERS) + stats)
        assert backward == total([stream] * (2 * LAYERS + 1))


def test_evaluation_sends_nothing_backward_and_no_more_forward():
    def body(world):
        model = rl.tensor_parallel(make(), None, world)
        count = Count(world.ledger)
        with torch.no_grad():
            model(*batch())
        return count.look()

    stream, stats = all_reduce_bill(STREAM, 2), all_gather_bill(3 * ROWS * LENGTH * ITEM, 2)
    assert rl.simulate(2, body) == [total([stream] * (1 + 2 * LAYERS) + [stats])] * 2


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_share_of_the_matrices(ranks):
    whole = sum(p.numel() for p in make().parameters())
    norms = sum(p.numel() for p in make().parameters() if p.dim() == 1)
    for held in rl.simulate(ranks, lambda world: sum(p.numel() for p in rl.tensor_parallel(make(), None, world).parameters())):
        assert held == (whole - norms) // ranks + norms


def test_no_rank_ever_holds_the_logits(monkeypatch):
    largest = []

    def watch(function):
        def call(x, weight, *rest):
            y = function(x, weight, *rest)
            largest.append(y.shape[-1] if y.shape[0] == ROWS * LENGTH else 0)
            return y
        return call

    monkeypatch.setattr(vocabulary.F, "linear", watch(vocabulary.F.linear))
    rl.simulate(4, lambda world: forward_and_backward(rl.tensor_parallel(make(), None, world), world))
    assert max(largest) == 36 // 4
