"""Cutting and dealing rows: nothing lost, nothing twice, in order, whatever the nesting."""

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rankloom as rl
from rankloom.base.nested import map_tensors
from rankloom.base.shares import share
from rankloom.train.batches import (
    MicroBatches,
    as_given,
    cut_again,
    cut_batch,
    deal_shards,
    laid_out_anew,
    rows_if_any,
    rows_of,
    with_halves,
)

Pair = namedtuple("Pair", "x y")


def test_a_nesting_keeps_its_types_and_what_is_no_tensor():
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(2), "text"]), "none": None, "more": (OrderedDict(z=torch.ones(2)), 5)}
    doubled = map_tensors(lambda t: t * 2, batch)
    assert type(doubled["pair"]) is Pair and type(doubled["more"][0]) is OrderedDict and type(doubled["pair"].y) is list
    assert doubled["pair"].x.tolist() == [2, 2] and doubled["pair"].y[1] == "text" and doubled["none"] is None and doubled["more"][1] == 5
    assert batch["pair"].x.tolist() == [1, 1]


class Encoding(UserDict):
    """A dict that is none, with something beside its items, as tokenizers of `transformers` give it."""

    def __init__(self, data, kind):
        super().__init__(data)
        self.kind = kind


@pytest.mark.parametrize("batch", [defaultdict(list, x=torch.ones(2)), Encoding({"x": torch.ones(2)}, kind="fast")],
                         ids=["defaultdict", "encoding"])
def test_kinds_of_dicts_keep_what_they_know_beside_their_items(batch):
    doubled = map_tensors(lambda t: t * 2, batch)
    assert type(doubled) is type(batch) and rows_of(doubled, 0) == 2
    assert getattr(doubled, "default_factory", list) is list and getattr(doubled, "kind", "fast") == "fast"
    assert doubled["x"].tolist() == [2, 2] and batch["x"].tolist() == [1, 1]


@dataclass
class Outputs(OrderedDict):
    """A dict and a dataclass, as models of `transformers` return it: items are attributes, and `update` is refused."""

    x: torch.Tensor
    more: tuple | None = None
    absent: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("x", "more"):
            self[name] = getattr(self, name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self):
        make, _, *remaining = super().__reduce__()
        return make, (self.x, self.more, self.absent), *remaining

    def update(self, *args, **kwargs):
        raise Exception("You cannot use ``update``")


def test_a_dict_that_is_a_dataclass_too_is_a_batch_with_equal_items_and_attributes():
    batch = Outputs(torch.arange(4), (torch.arange(4) * 10,))
    pieces = cut_batch(batch, 2, 0)
    assert [type(piece) for piece in pieces] == [Outputs, Outputs] and batch.x.tolist() == [0, 1, 2, 3]
    for piece, rows in zip(pieces, ([0, 1], [2, 3])):
        assert piece.x is piece["x"] and piece.x.tolist() == rows and piece.absent is None and "absent" not in piece
        assert piece.more[0].tolist() == [10 * row for row in rows]


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    kind: str
    twice: torch.Tensor = field(init=False)


def test_a_dataclass_is_a_batch_whatever_it_does_when_it_is_made():
    sample = Sample(torch.arange(3), "even")
    object.__setattr__(sample, "twice", sample.x * 2)
    first, second = cut_batch(sample, 2, 0)
    assert (first.x.tolist(), first.twice.tolist(), first.kind) == ([0, 1], [0, 2], "even")
    assert (second.x.tolist(), second.twice.tolist(), second.kind) == ([2], [4], "even")
    assert isinstance(as_given([first, second], 2, 0), MicroBatches) and sample.x.tolist() == [0, 1, 2]


class Two(tuple):
    """Made of two things."""

    def __new__(cls, x, y):
        return tuple.__new__(cls, (x, y))


class Named(list):
    """Made with a name."""

    def __init__(self, name, *values):
        super().__init__(values)
        self.name = name


def test_lists_tuples_and_dataclasses_are_batches_whatever_they_ask_for_when_they_are_made():
    pair, named = Two(torch.arange(2), "text"), Named("left", torch.arange(2))
    pair.kind = "even"
    half = cut_batch([pair, named, torch.max(torch.ones(2, 3), dim=1), Sample(torch.arange(2), "even"), torch.Size([1, 2, 3])], 2, 0)[1]
    assert type(half[0]) is Two and half[0][1] == "text" and half[0].kind == "even" and half[0][0].tolist() == [1]
    assert type(half[1]) is Named and half[1].name == "left" and half[1][0].tolist() == [1]
    assert half[2].indices.shape == (1,) and half[3].x.tolist() == [1] and not hasattr(half[3], "twice")
    assert half[4] == torch.Size([1, 2, 3])


def test_what_is_no_tensor_and_has_an_entry_for_each_row_is_cut_with_the_rows():
    x = torch.arange(3)
    batch = {"x": x, "captions": ["a", "b", "c"], "names": ("d", "e", "f"), "numpy": np.arange(3), "sparse": torch.eye(3).to_sparse(),
             "boxes": [np.zeros(4), np.zeros(1), np.zeros(2)], "nested": [["a"], ["b"], [{"c": 1}]], "pair": Pair("p", "q"),
             "sizes": [5, 6], "shape": torch.Size([1, 1, 1]), "columns": [x, x, x], "numpy columns": [np.arange(3)] * 3, "text": "abc"}
    first, second = cut_batch(batch, 2, 0)
    assert [first[key] for key in ("captions", "names", "nested")] == [["a", "b"], ("d", "e"), [["a"], ["b"]]]
    assert [second[key] for key in ("captions", "names", "nested")] == [["c"], ("f",), [[{"c": 1}]]]
    assert second["numpy"].tolist() == [2] and second["sparse"].to_dense().tolist() == [[0, 0, 1]] and len(second["boxes"]) == 1
    for key in ("pair", "sizes", "shape", "text"):
        assert first[key] == second[key] == batch[key]
    assert [column.tolist() for key in ("columns", "numpy columns") for column in second[key]] == [[2]] * 6


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
def test_a_row_alone_comes_twice_where_halves_are_asked_for(layout):
    batch = (torch.arange(1), ["a"], np.arange(1), torch.ones(1, 1).to_sparse(layout=layout))
    whole, *halves = with_halves(batch, 1, 0)
    assert whole[0].tolist() == [0, 0] and whole[1] == ["a", "a"] and whole[2].tolist() == [0, 0]
    assert whole[3].shape == (2, 1) and whole[3].layout is layout
    assert [half[1] for half in halves] == [["a"], ["a"]]
    whole, *halves = with_halves((torch.arange(4), ["a", "b", "c", "d"]), 3, 0)
    assert whole[1] == ["a", "b", "c"] and [half[1] for half in halves] == [["a", "b"], ["c"]]


def test_rows_are_counted_along_dim_0():
    assert rows_of(torch.zeros(3, 2), 0) == 3 and rows_of([torch.zeros(4), (torch.zeros(4, 1),)], 0) == 4
    assert rows_of({"x": torch.zeros(0, 5)}, 0) == 0


def test_numpy_arrays_say_how_many_rows_there_are_where_no_tensor_does():
    assert rows_of((np.zeros((3, 2)), {"y": [np.zeros(3)], "size": torch.Size([5])}), 0) == rows_of(np.zeros(3), 0) == 3
    assert rows_of((torch.zeros(2), np.zeros(3)), 0) == 2
    first, second = cut_batch((np.arange(3), np.eye(3), ["a", "b", "c"]), 2, 0)
    assert [len(part) for part in (*first, *second)] == [2, 2, 2, 1, 1, 1] and second[0].tolist() == [2] and second[2] == ["c"]
    assert cut_batch((np.zeros(3), np.ones(3), 0.5), 3, 0)[0][2] == 0.5   # as many columns as rows


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"deterministic": 6}], ids=str)
def test_a_batch_of_numpy_arrays_trains_as_one_of_tensors(p, options):
    x = np.random.default_rng(0).standard_normal((12, 3))

    def loss(model, batch):
        rows, weights = (torch.as_tensor(part) for part in batch)
        return (model(rows).squeeze(1) * weights).square().sum(), len(rows)

    def body(world, given):
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            [each.fill_(0.5) for each in model.parameters()]
        engine = rl.prepare(model, loss=loss, optimizer=lambda q: torch.optim.SGD(q, lr=0.1), world=world, **options)
        mine = x[world.rank::world.size]
        return [engine.step((given(mine), given(mine[:, 0].copy()))).loss for _ in range(3)]

    assert rl.simulate(p, lambda world: body(world, np.asarray)) == rl.simulate(p, lambda world: body(world, torch.as_tensor))


@pytest.mark.parametrize("batch", [np.float64(1.0), (np.zeros(2), np.zeros(3)), (np.zeros(2), np.array(1.0))], ids=repr)
def test_numpy_arrays_that_differ_in_length_are_no_rows(batch):
    assert rows_if_any(batch) is None and cut_batch(batch, 1, 0) == [batch]


NO_BATCHES = [[], {}, None, "text", torch.tensor(1.0), (torch.zeros(2), torch.zeros(3)), [torch.zeros(2), torch.tensor(2.0)]]


@pytest.mark.parametrize("batch", NO_BATCHES)
def test_a_batch_without_rows_or_with_different_numbers_of_them_is_refused_by_rank(batch):
    with pytest.raises(rl.BatchError, match=rf"rank 7: a batch must hold tensors .*{type(batch).__name__}"):
        rows_of(batch, 7)


class Graphs(nn.Module):
    """Adds up neighbours: nodes x [n, 6], edges [2, e]."""

    def __init__(self, rate):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(rate)) for _ in range(2))

    def forward(self, x, edges):
        for block in self.blocks:
            x = block(x.index_add(0, edges[1], x[edges[0]]))
        return x


def squares(model, graph):
    return (model(graph[0], graph[1]) - graph[2]).square().sum(), graph[2].numel()


def some_graphs():
    torch.manual_seed(0)
    sizes = (5, 2, 7, 4)   # the second graph has as many nodes as `edges` has rows, by chance
    return [(torch.randn(n, 6).double(), torch.randint(n, (2, 9)), torch.randn(n, 6).double()) for n in sizes]


def train_on_graphs(p, stage, rate):
    torch.manual_seed(1)
    model, graphs = Graphs(rate).double(), some_graphs()
    models = [copy.deepcopy(model) for _ in range(p)]

    def body(world):
        engine = rl.prepare(models[world.rank], loss=squares, optimizer=lambda q: torch.optim.SGD(q, lr=0.1), world=world, stage=stage,
                            accumulate=4 // p)
        own = graphs[world.rank * 4 // p : (world.rank + 1) * 4 // p]
        for _ in range(2):
            engine.step(own if p < 4 else own[0])
        return engine.full_state_dict()["model"]

    return rl.simulate(p, body)[0]


def train_on_graphs_plainly():
    torch.manual_seed(1)
    model, graphs = Graphs(0.0).double(), some_graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        losses, counts = zip(*(squares(model, graph) for graph in graphs))
        (sum(losses) / sum(counts)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(("p", "stage"), [(1, 0), (2, 0), (2, 3), (4, 1), (4, 3)])
def test_micro_batches_that_cannot_be_cut_train_as_on_one_process_and_drop_alike_on_any_number_of_ranks(p, stage, rate):
    expected = train_on_graphs(1, 0, rate) if rate else train_on_graphs_plainly()
    for name, value in train_on_graphs(p, stage, rate).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)   # sums in another order


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:a batch without tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_a_nested_tensor_is_a_batch_that_cannot_be_cut(p, layout):
    rows = [torch.full((n, 4), 1.0 + n, dtype=torch.float64) for n in (2, 5, 1, 3)]
    plain = nn.Linear(4, 4).double()
    models = [copy.deepcopy(plain) for _ in range(p)]

    def loss(model, batch):
        return sum(part.square().sum() for part in model(batch).unbind()), sum(map(len, batch.unbind()))

    def body(world):
        engine = rl.prepare(models[world.rank], loss=loss, optimizer=lambda q: torch.optim.SGD(q, lr=0.1), world=world)
        return engine.step(torch.nested.nested_tensor(rows[world.rank :: p], layout=layout)).loss

    with torch.no_grad():
        expected = plain(torch.cat(rows)).square().sum().item() / 11
    assert rl.simulate(p, body) == pytest.approx([expected] * p, rel=1e-12)


@pytest.mark.parametrize("pieces", [1, 2])
def test_nan_in_a_batch_that_cannot_be_cut_is_named(pieces):
    def body(world):
        engine = rl.prepare(Graphs(0.0).double(), loss=squares, optimizer=lambda q: torch.optim.SGD(q, lr=0.1), world=world,
                            accumulate=pieces)
        graphs = some_graphs()[:pieces]
        graphs[0][0][0] = torch.nan
        engine.step(graphs)

    with pytest.raises(rl.NonFinite, match="rank 0: the loss of its own batch is nan"):
        rl.simulate(1, body)


def test_one_batch_that_cannot_be_cut_in_several_is_refused_with_the_ways_out():
    def body(world):
        rl.prepare(Graphs(0.0).double(), loss=squares, optimizer=lambda q: torch.optim.SGD(q, lr=0.1), world=world,
                   accumulate=2).step(some_graphs()[0])

    with pytest.raises(rl.BatchError, match=r"found lengths \[5, 2, 5\] .*give `accumulate` micro-batches.*a leading dim of 1"):
        rl.simulate(1, body)


@given(st.integers(1, 40), st.data())
def test_pieces_are_contiguous_complete_and_even_with_the_longer_ones_first(rows, data):
    pieces = data.draw(st.integers(1, rows))
    parts = cut_batch((torch.arange(rows), {"y": torch.arange(rows)[:, None]}), pieces, 0)
    assert len(parts) == pieces
    assert torch.equal(torch.cat([x for x, _ in parts]), torch.arange(rows))
    assert all(torch.equal(x, y["y"][:, 0]) for x, y in parts)
    sizes = [len(x) for x, _ in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_pieces_are_views_and_cost_no_memory():
    x = torch.arange(6)
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in cut_batch(x, 3, 0))


def test_a_batch_that_is_a_tuple_is_one_even_where_it_could_be_its_micro_batches():
    parts = {"ids": torch.zeros(4)}, {"labels": torch.zeros(4)}
    assert as_given(parts, 2, 0) is parts and isinstance(as_given(list(parts), 2, 0), MicroBatches)


def test_a_list_of_one_micro_batch_is_that_batch_and_a_list_of_columns_is_a_batch():
    one, columns = (torch.zeros(4), torch.ones(4)), [torch.zeros(4), torch.ones(4)]
    assert as_given([one], 1, 0) is one and as_given(columns, 1, 0) is columns and as_given(iter([one]), 1, 0) is one
    assert as_given([one, one], 1, 0) == [one, one]   # a batch of two pairs


def test_more_pieces_than_rows_are_refused_by_rank():
    with pytest.raises(rl.BatchError, match="rank 2: a batch of 3 rows cannot be cut in 4 micro-batches"):
        cut_batch(torch.zeros(3), 4, rank=2)


def test_batches_to_evaluate_may_have_fewer_rows_than_pieces_and_are_cut_into_rows():
    assert [len(piece) for piece in cut_again(torch.zeros(3), 4, rank=0)] == [1, 1, 1]


def test_rows_that_are_laid_out_anew_are_contiguous_and_a_copy():
    by_columns = torch.arange(6).view(3, 2).t()
    for x in (by_columns, by_columns.contiguous()):
        anew = laid_out_anew(x)
        assert torch.equal(anew, x) and anew.is_contiguous() and anew.data_ptr() != x.data_ptr()


def deal(world: rl.World, held: list[int], leaves: int):
    """Rank r holds held[r] rows; all rows are numbered through."""
    first = sum(held[: world.rank])
    x = torch.arange(first, first + held[world.rank])
    batch = {"x": x, "mask": x % 2 == 0, "y": [torch.stack((x, x)).float().t()]}   # bools, and a tensor that lies by columns
    mine, first, used = deal_shards(batch, world, leaves)
    assert mine["x"][:1].tolist() == [first][:len(mine["x"])]
    assert torch.equal(mine["mask"], mine["x"] % 2 == 0) and torch.equal(mine["y"][0][:, 0], mine["x"].float())
    return mine["x"].tolist(), used


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(sum), st.integers(1, 9))
def test_every_rank_gets_the_rows_of_its_logical_shards_whoever_held_them(held, leaves):
    ranks, rows = len(held), sum(held)
    used = min(leaves, rows)
    if used < ranks:
        with pytest.raises(rl.BatchError, match=f"global batch of {rows} rows in {used} logical shards is too small for {ranks} ranks"):
            rl.simulate(ranks, lambda w: deal(w, held, leaves))
        return
    shards = torch.arange(rows).tensor_split(used)
    expected = [torch.cat([shards[leaf] for leaf in share(rank, ranks, used)]).tolist() for rank in range(ranks)]
    assert rl.simulate(ranks, lambda w: deal(w, held, leaves)) == [(mine, used) for mine in expected]


def test_columns_are_dealt_by_their_names_in_whatever_order_a_rank_has_them():
    """Columns of one kind were exchanged for each other, and nobody said so."""
    def body(world):
        batch = {name: torch.full((1 + 2 * world.rank,), value) for name, value in (("tokens", 1), ("targets", 2))}
        given = dict(reversed(batch.items())) if world.rank else batch
        mine, _, _ = deal_shards(given, world, 2)
        return list(mine) == list(given), {name: t.tolist() for name, t in mine.items()}

    assert rl.simulate(2, body) == [(True, {"tokens": [1, 1], "targets": [2, 2]})] * 2


def test_rows_that_are_no_tensors_are_dealt_to_nobody_and_every_rank_says_so():
    def body(world, held):
        first = sum(held[:world.rank])
        numbers = list(range(first, first + held[world.rank]))
        try:
            mine, *_ = deal_shards((torch.tensor(numbers), [str(number) for number in numbers] if world.rank else None), world, 4)
        except rl.BatchError as error:
            return str(error)
        return mine[0].tolist()

    assert rl.simulate(2, lambda world: body(world, [2, 2])) == [[0, 1], [2, 3]]
    for said in rl.simulate(2, lambda world: body(world, [1, 3])):
        assert "rank 1 brings rows that are no dense tensors" in said
        assert "brought [1, 3] rows where deterministic training wants [2, 2]" in said
    sparse = lambda rank: torch.eye(4)[:1 + 2 * rank].to_sparse()
    with pytest.raises(rl.BatchError, match="rank 0 brings rows that are no dense tensors"):
        rl.simulate(2, lambda world: deal_shards(sparse(world.rank), world, 4))


def test_rows_that_lie_right_already_do_not_travel():
    def body(world):
        before = world.ledger.calls
        deal(world, [4, 4], 8)
        return world.ledger.calls - before

    assert rl.simulate(2, body) == [1, 1]   # only how many rows everybody holds


def engine_of_pairs(world: rl.World) -> rl.Engine:
    """Its loss takes a batch (x, y)."""
    return rl.prepare(torch.nn.Linear(2, 1), world=world,
                      loss=lambda model, batch: ((model(batch[0]).squeeze(-1) - batch[1]).square().sum(), len(batch[1])),
                      optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("batch", [{"x": torch.ones(4, 2)}, UserDict(x=torch.ones(4, 2))], ids=["dict", "mapping"])
def test_a_mapping_in_place_of_several_batches_to_evaluate_is_refused(batch):
    def body(world):
        with pytest.raises(rl.BatchError, match=rf"rank {world.rank}: evaluate.* {type(batch).__name__} looks like one"):
            engine_of_pairs(world).evaluate(batch)
        return True

    assert rl.simulate(2, body) == [True] * 2


@pytest.mark.parametrize("batch", [(torch.ones(4, 2), torch.ones(4)), torch.ones(4, 2)], ids=["tuple", "tensor"])
def test_where_an_evaluation_of_what_looks_like_one_batch_fails_a_note_says_so(batch):
    def body(world):
        with pytest.raises(Exception) as error:   # whatever the loss does with a row
            engine_of_pairs(world).evaluate(batch)
        return error.value.__notes__[0]

    assert "looks like one: give them in a list, evaluate([batch])" in rl.simulate(1, body)[0]


def test_several_batches_to_evaluate_come_in_any_iterable():
    pairs = [(torch.ones(4, 2), torch.ones(4))] * 2
    found = rl.simulate(2, lambda world: [engine_of_pairs(world).evaluate(kind(pairs)).count for kind in (list, tuple, iter)])
    assert found == [[16, 16, 16]] * 2
