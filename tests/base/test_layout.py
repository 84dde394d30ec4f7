"""Layouts: what a line says, what a rank holds, and which collective lies between two of them."""

import itertools
from math import prod

import pytest

from rankloom.base.cost import all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.layout import ANY, Layout, Move, Span, collective, conjugate

WHOLE, GRAD_PARTIAL, PARTIAL, ROWS, COLS = (Layout.parse(f"[rows{r}, cols{c}]{sign}") for r, c, sign in [
    ("", "", ""), ("", "", " -tensor"), ("", "", " +tensor"), ("/tensor", "", ""), ("", "/tensor", "")])
TABLE = {
    WHOLE: [(WHOLE, "nothing"), (GRAD_PARTIAL, "nothing"), (COLS, "slice(cols)"), (PARTIAL, None)],
    GRAD_PARTIAL: [(WHOLE, None), (GRAD_PARTIAL, "nothing"), (COLS, "slice(cols)"), (PARTIAL, None)],
    ROWS: [(WHOLE, "all_gather(rows)"), (GRAD_PARTIAL, "all_gather(rows)"), (COLS, "all_to_all(rows, cols)"), (PARTIAL, "pad(rows)"),
           (ROWS, "nothing")],
    PARTIAL: [(WHOLE, "all_reduce"), (GRAD_PARTIAL, "all_reduce"), (COLS, "reduce_scatter(cols)"), (PARTIAL, "nothing")],
}
STEPS = [(src, dst, move) for src, row in TABLE.items() for dst, move in row]


@pytest.mark.parametrize("text", [
    "[rows, cols]", "[rows/tensor, cols]", "[rows/shard/tensor, cols] +context", "[..., width] -tensor",
    "[..., tokens/tensor, width] +replicate +shard",
    "[]", "[x] +shard -tensor"])
def test_a_layout_prints_as_it_was_written(text):
    assert str(Layout.parse(text)) == text
    assert Layout.parse(text.replace(" ", "")) == Layout.parse(text) == Layout.parse(f"  {text} ".replace("/", " / "))


@pytest.mark.parametrize(("text", "said"), [
    ("rows, cols", "is not a layout; write it like"),
    ("[rows, cols", "is not a layout"),
    ("[rows] tensor", "is not a layout"),
    ("[rows/tenosr]", "no mesh axis 'tenosr'. Did you mean 'tensor'?"),
    ("[rows/tensor, cols/tensor]", "axis 'tensor' is named twice"),
    ("[rows/tensor] +tensor", "axis 'tensor' is named twice"),
    ("[rows] +tensor +tensor", "axis 'tensor' is named twice"),
    ("[rows] +tensor -tensor", "axis 'tensor' is named twice"),
    ("[rows, rows]", "'rows' cannot name a dim"),
    ("[rows, ]", "'' cannot name a dim"),
    ("[2, cols]", "'2' cannot name a dim"),
    ("[rows, ...]", "'...' stands first"),
    ("[.../tensor, cols]", "'...' stands first"),
    (None, "layout=None is of type NoneType, expected a line like '[rows/tensor, cols] +shard'"),
    (b"[rows]", "layout is of type bytes, expected a line like"),
])
def test_what_is_no_layout_is_refused_with_the_reason(text, said):
    with pytest.raises(ConfigError) as error:
        Layout.parse(text)
    assert said in str(error.value)


@pytest.mark.parametrize(("src", "dst", "move"), STEPS, ids=lambda value: str(value))
def test_the_collective_between_two_layouts_is_that_of_the_table(src, dst, move):
    if move is None:
        with pytest.raises(ConfigError, match="cannot turn"):
            collective(src, dst, "tensor")
    else:
        assert str(collective(src, dst, "tensor")) == move


@pytest.mark.parametrize(("there", "back"), [
    ((PARTIAL, WHOLE), "nothing"),             # the exit of a row-parallel layer
    ((WHOLE, GRAD_PARTIAL), "all_reduce"),      # the entrance of a column-parallel one
    ((PARTIAL, ROWS), "all_gather(rows)"),     # the exit, tokens split
    ((ROWS, GRAD_PARTIAL), "reduce_scatter(rows)"),   # the entrance, tokens split
    ((ROWS, WHOLE), "slice(rows)"), ((WHOLE, ROWS), "all_gather(rows)"), ((GRAD_PARTIAL, ROWS), "pad(rows)"),
    ((ROWS, PARTIAL), "slice(rows)"),
    ((ROWS, COLS), "all_to_all(cols, rows)"), ((PARTIAL, GRAD_PARTIAL), "all_reduce"),
], ids=lambda value: str(value))
def test_the_gradient_goes_back_by_the_conjugate(there, back):
    assert str(conjugate(*there, "tensor")) == back


@pytest.mark.parametrize(("src", "dst", "move"), [step for step in STEPS if step[2]], ids=lambda value: str(value))
def test_the_conjugate_of_the_conjugate_is_the_way_there(src, dst, move):
    assert str(conjugate(dst.gradient(), src.gradient(), "tensor")) == move
    assert src.gradient().gradient() == src


def test_there_is_no_move_where_its_gradient_would_have_none():
    for src, dst in itertools.product([WHOLE, GRAD_PARTIAL, PARTIAL, ROWS, COLS], repeat=2):
        def possible(derive, src=src, dst=dst):
            try:
                return derive(src, dst, "tensor") is not None
            except ConfigError:
                return False
        assert possible(collective) == possible(conjugate)


@pytest.mark.parametrize(("src", "dst", "said"), [
    ("[rows, cols]", "[rows, width]", "differ in more than the axis 'tensor'"),
    ("[rows/shard, cols]", "[rows, cols/tensor]", "differ in more than the axis 'tensor'"),
    ("[rows, cols] +shard", "[rows/tensor, cols]", "differ in more than the axis 'tensor'"),
    ("[rows/tensor/shard, cols]", "[rows/shard, cols]", "not the innermost cut; move along 'shard' first"),
])
def test_one_move_goes_along_one_axis(src, dst, said):
    with pytest.raises(ConfigError) as error:
        collective(Layout.parse(src), Layout.parse(dst), "tensor")
    assert said in str(error.value)


def test_the_inner_cut_of_a_dim_can_be_undone_and_what_is_cut_elsewhere_stays():
    src, dst = Layout.parse("[rows/shard/tensor, cols] +context"), Layout.parse("[rows/shard, cols] +context")
    assert str(collective(src, dst, "tensor")) == "all_gather(rows)"
    assert str(conjugate(src, dst, "tensor")) == "slice(rows)"
    assert str(collective(src, src, "shard")) == "nothing", "along the outer cut, too"


@pytest.mark.parametrize(("text", "shape"), [
    ("[rows/shard/tensor, cols]", (24, 5)), ("[rows/tensor/shard, cols/context]", (24, 10)), ("[..., tokens/tensor, width]", (2, 3, 8, 5)),
    ("[rows, cols] +tensor", (3, 4)), ("[...]", ()), ("[]", ()), ("[..., width/shard]", (8,))])
def test_the_spans_of_all_ranks_cover_each_element_once_per_copy(text, shape):
    layout, sizes = Layout.parse(text), {"shard": 2, "tensor": 4, "context": 2}
    seen: dict[tuple, int] = {}
    for coords in ({"shard": s, "tensor": t, "context": c} for s in range(2) for t in range(4) for c in range(2)):
        spans = layout.spans(shape, coords, sizes)
        assert layout.local_shape(shape, sizes) == tuple(stop - start for start, stop in spans)
        for element in itertools.product(*(range(start, stop) for start, stop in spans)):
            seen[element] = seen.get(element, 0) + 1
    parts = prod(sizes[axis] for axes in layout.cut for axis in axes)
    assert len(seen) == prod(shape) and set(seen.values()) == {16 // parts}


def test_the_outer_axis_cuts_first():
    sizes = {"shard": 2, "tensor": 2}
    assert Layout.parse("[x/shard/tensor]").spans((8,), {"shard": 1, "tensor": 0}, sizes) == (Span(4, 6),)
    assert Layout.parse("[x/tensor/shard]").spans((8,), {"shard": 1, "tensor": 0}, sizes) == (Span(2, 4),)


@pytest.mark.parametrize(("text", "shape", "said"), [
    ("[rows/tensor, cols]", (10, 4), "rows has 10 elements, which tensor 4 = 4 ranks do not divide; pad it to 12"),
    ("[rows/shard/tensor, cols]", (12, 4), "which shard 2 x tensor 4 = 8 ranks do not divide; pad it to 16"),
    ("[rows, cols]", (2, 3, 4), "has 3 dims, but layout [rows, cols] names 2"),
    ("[..., rows, cols]", (4,), "has 1 dims"),
])
def test_a_tensor_that_does_not_fit_its_layout_is_refused_with_the_reason(text, shape, said):
    with pytest.raises(ShapeMismatch) as error:
        Layout.parse(text).local_shape(shape, {"shard": 2, "tensor": 4})
    assert said in str(error.value)


def test_dims_are_placed_from_the_end_and_an_unknown_one_is_named():
    layout = Layout.parse(f"[{ANY}, tokens, width]")
    assert (layout.place("tokens"), layout.place("width")) == (-2, -1)
    with pytest.raises(ConfigError, match="has no dim 'widht'. Did you mean 'width'?"):
        layout.place("widht")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_move_costs_what_its_collective_costs(ranks):
    n = 240
    bills = {"nothing": 0, "slice": 0, "pad": 0, "all_gather": all_gather_bill(n, ranks), "all_reduce": all_reduce_bill(n, ranks),
             "reduce_scatter": scatter_bill(n, ranks), "all_to_all": scatter_bill(n, ranks)}
    for kind, bill in bills.items():
        paid = Move(kind, "rows").bill(n, ranks)
        assert paid == bill or (bill == 0 and paid.sent == paid.messages == 0)
