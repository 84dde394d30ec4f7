"""The ring: right sums, the price on its bill, and a proof by histories that every chunk travels as it should."""

from collections import Counter

import pytest
import torch

import rankloom as rl
from rankloom.base.cost import all_reduce_bill
from rankloom.comm.ring import ring_all_reduce_bill

RANKS = [1, 2, 3, 4, 5]


class Traced:
    """A chunk that remembers only which (rank, chunk) it is made of."""

    def __init__(self, history: Counter):
        self.history = history

    def add_(self, other: "Traced") -> "Traced":
        self.history = self.history + other.history
        return self

    def numel(self) -> int:
        return 1

    def __getitem__(self, _: slice) -> "Traced":
        return self


class TracedBuffer:
    """What `ring_all_reduce` wants of a tensor, cut in traced chunks."""

    def __init__(self, rank: int):
        self.rank, self.chunks = rank, []

    def is_contiguous(self) -> bool:
        return True

    def view(self, _: int) -> "TracedBuffer":
        return self

    def tensor_split(self, p: int) -> list[Traced]:
        self.chunks = [Traced(Counter({(self.rank, chunk): 1})) for chunk in range(p)]
        return self.chunks


class TracedGroup:
    """Passes histories over a real group, as JSON."""

    def __init__(self, world: rl.World):
        self.world, self.rank, self.size = world, world.rank, world.size
        self.sent: list[Counter] = []

    def exchange(self, out: Traced, to: int, into: Traced, frm: int, *, label: str) -> Traced:
        assert (to - self.rank) % self.size == 1 and (self.rank - frm) % self.size == 1, "only neighbours talk"
        self.sent.append(out.history.copy())
        everybody = self.world.all_gather_object([[*key, n] for key, n in out.history.items()])
        into.history = Counter({(rank, chunk): n for rank, chunk, n in everybody[frm]})
        return into


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_every_rank_ends_with_every_ranks_part_of_every_chunk_exactly_once(p, monkeypatch):
    monkeypatch.setattr(torch, "empty_like", lambda chunk: Traced(Counter()))

    def body(world):
        buffer, group = TracedBuffer(world.rank), TracedGroup(world)
        rl.ring_all_reduce(buffer, group)
        return buffer.chunks, group.sent

    for chunks, sent in rl.simulate(p, body):
        for chunk, held in enumerate(chunks):
            assert held.history == Counter({(rank, chunk): 1 for rank in range(p)})
        # Reduce-scatter sends partial sums of 1, 2, ... parts; all-gather sends finished chunks only.
        assert [len(history) for history in sent] == [*range(1, p), *[p] * (p - 1)]


@pytest.mark.parametrize("n", [0, 1, 5, 24, 31])
@pytest.mark.parametrize("p", RANKS)
def test_the_ring_sums_and_pays_exactly_its_bill(p, n):
    def body(world):
        x = torch.arange(n, dtype=torch.float64) + 1000 * world.rank
        returned = rl.ring_all_reduce(x, world)
        return x, returned is x, world.ledger

    expected = p * torch.arange(n, dtype=torch.float64) + 1000 * sum(range(p))
    for rank, (x, in_place, ledger) in enumerate(rl.simulate(p, body)):
        assert torch.equal(x, expected) and in_place
        assert rl.Bill(sent=ledger.bytes, messages=ledger.messages) == ring_all_reduce_bill(n, p, itemsize=8, rank=rank)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("n", [7, 60])
def test_the_bills_of_all_ranks_together_are_what_the_docstring_says(p, n):
    bills = [ring_all_reduce_bill(n, p, itemsize=4, rank=rank) for rank in range(p)]
    assert sum(bill.sent for bill in bills) == 2 * n * (p - 1) * 4
    assert {bill.messages for bill in bills} == {2 * (p - 1)}
    if n % p == 0:
        assert set(bills) == {all_reduce_bill(4 * n, p)}


@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_ranks_end_with_the_same_bits(p):
    def body(world):
        x = torch.randn(101, generator=torch.Generator().manual_seed(world.rank))
        return rl.ring_all_reduce(x, world)

    first, *others = rl.simulate(p, body)
    assert all(torch.equal(first, other) for other in others)


def test_any_shape_and_dtype_keeps_its_shape_and_dtype():
    def body(world):
        return [rl.ring_all_reduce(torch.full(shape, 2, dtype=dtype), world)
                for shape, dtype in (((3, 5), torch.int64), ((), torch.float32), ((2, 1, 3), torch.bfloat16))]

    for matrix, number, cube in rl.simulate(3, body):
        assert matrix.tolist() == [[6] * 5] * 3 and number.item() == 6.0 and number.dim() == 0
        assert cube.dtype == torch.bfloat16 and cube.shape == (2, 1, 3) and (cube == 6).all()


def test_a_tensor_with_gaps_is_refused_before_anything_is_sent():
    def body(world):
        with pytest.raises(rl.NotContiguous, match=rf"rank {world.rank}: ring_all_reduce .*strides \(1, 4\)"):
            rl.ring_all_reduce(torch.zeros(3, 4).t(), world)
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]
