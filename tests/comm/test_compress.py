"""Compressed all-reduces: bounds, bits, bills, exact accounts of what is remembered, and what goes wrong without it."""

import math
import random
import time

import pytest
import torch

import rankloom as rl
from rankloom.comm import blockwise
from rankloom.comm.blockwise import PIECE_BYTES, Blockwise, staggered
from rankloom.comm.compress import Summing, compressed_all_reduce
from rankloom.comm.lossy import Compressed
from rankloom.comm.power import PowerSGD
from rankloom.comm.quantize import INT4, INT8, ONE_BIT, Floats
from rankloom.comm.sparse import TopK
from rankloom.comm.subgroup import Subgroup

NAMES = ["bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd"]
BLOCKS = {"int8": INT8, "int4": INT4, "1bit": ONE_BIT}
PARTS = [(0, (64, 48)), (3072, (30,)), (3104, (40, 3, 7)), (3950, ())]   # with gaps, as flat buffers have them
N = 3951


def draw(n: int, *key: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def small_pieces(name: str) -> Compressed:
    """As by name, but in pieces so small that even a short buffer is cut in several."""
    made = compressed_all_reduce(name, PARTS)
    return Blockwise(made.form, piece=1500) if isinstance(made, Blockwise) else made


def remembered(reduce: Compressed, rank: int, p: int, n: int = N) -> torch.Tensor:
    """What one rank still owes, in its place in the buffer."""
    owed = torch.zeros(n, dtype=torch.float64)
    if isinstance(reduce, TopK):
        return owed + reduce._error
    if isinstance(reduce, PowerSGD):
        for matrix in reduce._matrices:
            matrix.of(owed).add_(matrix.kept.double() - matrix.p.double() @ matrix.own.double())
        return owed
    owed += reduce._own
    step, block = reduce.values_in_piece(p), reduce.form.block
    for at in range(0, n, step):
        each = -(-min(step, n - at) // (p * block)) * block   # values of a rank's chunk
        chunk = owed[at : at + step][rank * each : (rank + 1) * each]
        chunk += reduce._sums[at // p :][: len(chunk)]
    return owed


# ---------------------------------------------------------------------- one call


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("p", [2, 3, 4, 5])
@pytest.mark.parametrize("n", [1, 127, 257, 1000, 4001])
def test_a_sum_is_off_by_half_a_step_of_every_rank_and_half_a_step_of_the_sum(name, p, n):
    form = BLOCKS[name]
    levels = 2 ** (form.bits - 1) - 1
    inputs = [draw(n, rank) * 10.0**rank for rank in range(p)]
    tops = lambda x: torch.cat([block.abs().max().expand(len(block)) for block in x.double().split(form.block)])
    # Half a step, the step rounded up to bf16 (2**-7), the code found with two roundings, and the sum added in fp32.
    half_step = lambda top: top / levels / 2 * (1 + 2**-7) * (1 + levels * 2**-22)
    first = sum(half_step(tops(x)) for x in inputs)
    exact = sum(x.double() for x in inputs)
    bound = first + half_step(tops(exact) + tops(first)) + p * 2**-23 * sum(tops(x) for x in inputs)
    for got in rl.simulate(p, lambda world: Blockwise(form, piece=1500)(inputs[world.rank].clone(), world)):
        assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradients_are_weighed_by_the_items_of_all_ranks_and_each_rank_keeps_its_own_count(p):
    """A pipeline gives a view of the totals of its step, which are summed over the ranks later."""
    def body(world):
        summing, totals = Summing(compress="int8"), torch.tensor([7.0, world.rank + 1.0], dtype=torch.float64)
        summing.weigh(totals[1], 2.0, [world])
        return summing.factor, totals.tolist()

    factor = 1.0 if p == 1 else 1 / (2 * sum(range(1, p + 1)))
    assert rl.simulate(p, body) == [(factor, [7.0, rank + 1.0]) for rank in range(p)]


def test_a_step_in_which_no_rank_has_counted_anything_can_be_weighed():
    def body(world):
        summing = Summing(compress="int8")
        summing.weigh(torch.zeros((), dtype=torch.float64), 2.0, [world])
        return summing.factor

    assert rl.simulate(2, body) == [1.0, 1.0]


def test_exact_steps_are_not_weighed_after_compressed_ones_either():
    def body(world):
        summing, items, factors = Summing(compress="int8", after=1), torch.ones((), dtype=torch.float64), []
        for step in range(3):
            if step == 2:
                summing.begin_anew()
            summing.weigh(items, 2.0, [world])
            factors.append(summing.factor)
            summing.end_step()
        return factors

    assert rl.simulate(2, body) == [[1.0, 0.25, 1.0]] * 2


def test_what_pads_a_message_is_zeros_and_not_what_lay_in_memory(monkeypatch):
    """Of three ranks, each with a record of its own, two have nothing but padding: a block makes one record."""
    sent = {"start_all_to_all": [], "start_all_gather": []}

    def noting(name):
        start = getattr(blockwise, name)
        return lambda x, group, *, label: (sent[name].append(x.clone()), start(x, group, label=label))[1]

    for name in sent:
        monkeypatch.setattr(blockwise, name, noting(name))
    torch.use_deterministic_algorithms(True)   # new memory is filled with 255
    try:
        rl.simulate(3, lambda world: Blockwise(INT8)(torch.ones(100), world))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [bool(records[1:].any()) for records in sent["start_all_to_all"]] == [False] * 3
    assert sorted(bool(record.any()) for record in sent["start_all_gather"]) == [False, False, True]


@pytest.mark.parametrize(("name", "digits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_sixteen_bits_are_rounded_twice_and_summed_in_fp32(name, digits, p):
    inputs = [draw(1000, rank) for rank in range(p)]
    exact, sizes = sum(x.double() for x in inputs), sum(x.double().abs() for x in inputs)
    for got in rl.simulate(p, lambda world: small_pieces(name)(inputs[world.rank].clone(), world)):
        # Each addend, then the sum, is rounded to so many digits: half a unit in the last place each.
        assert ((got.double() - exact).abs() <= sizes * 2.0**-digits * 2.01).all()
    ones = rl.simulate(p, lambda world: small_pieces(name)(torch.full((9,), 1.0 if world.rank else 2.0**digits), world))
    assert (ones[0] == torch.tensor(2.0**digits + p - 1).to(Floats(torch.bfloat16 if name == "bf16" else torch.float16).dtype)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_all_ranks_end_with_the_same_bits_and_pay_their_bill(name, p):
    def body(world):
        reduce, seen, paid = small_pieces(name), [], []
        reduce.rescale(2.0)   # nothing is remembered yet
        for step in range(3):
            before = (world.ledger.bytes, world.ledger.messages)
            seen.append(reduce(draw(N, world.rank, step), world).clone())
            paid.append(rl.Bill(sent=world.ledger.bytes - before[0], messages=world.ledger.messages - before[1]))
        return torch.stack(seen), paid, reduce.bill(N, world)

    (first, *_), *others = results = rl.simulate(p, body)
    assert first.isfinite().all() and all(torch.equal(first, other) for other, _, _ in others)
    assert all(paid == [bill] * 3 for _, paid, bill in results)


@pytest.mark.parametrize("name", ["int8", "1bit", "bf16", "topk"])
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1537, 3000])
@pytest.mark.parametrize("p", [2, 3])
def test_any_length_pays_its_bill(name, n, p):
    def body(world):
        reduce = small_pieces(name)
        x = reduce(draw(n, world.rank), world)
        return x, rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages) == reduce.bill(n, world)

    results = rl.simulate(p, body)
    assert all(fine and torch.equal(x, results[0][0]) and len(x) == n for x, fine in results)


def test_the_bytes_on_the_wire_shrink_as_promised():
    n, (group, _) = 1 << 20, rl.simulate(2, lambda world: world)
    ratio = lambda name, parts=(): 4 * n / compressed_all_reduce(name, parts).bill(n, group).sent   # an exact sum sends 2n(p-1)/p values
    assert ratio("bf16") == ratio("fp16") == 2
    assert ratio("int8") > 3.96 and ratio("int4") > 7.75 and ratio("1bit") > 30 and ratio("topk") > 49
    matrix = [(0, (1024, 1024))]
    assert ratio("powersgd", matrix) == ratio("powersgd:4", matrix) == 128 and ratio("powersgd:16", matrix) == 32


def test_none_is_no_compressed_all_reduce():
    with pytest.raises(rl.ConfigError, match="'none' compresses nothing"):
        compressed_all_reduce("none")


@pytest.mark.parametrize("name", ["int8", "int4", "1bit", "bf16"])
@pytest.mark.parametrize("p", [2, 3])
def test_the_bits_do_not_depend_on_how_the_buffer_is_cut_in_pieces(name, p):
    def body(world, piece):
        reduce = Blockwise(compressed_all_reduce(name).form, piece=piece)
        return torch.stack([reduce(draw(N, world.rank, step), world).clone() for step in range(3)])

    results = [rl.simulate(p, lambda world, piece=piece: body(world, piece))[0] for piece in (1, 1500, 1 << 20)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_a_stage_of_a_piece_runs_two_turns_before_the_next_one_waits_for_what_it_sent():
    seen = []

    def piece(name):
        for stage in range(2):
            seen.append(f"{name}{stage}")
            yield
        seen.append(f"{name}2")

    staggered([piece(name) for name in "abcd"])
    assert seen == ["a0", "b0", "c0", "a1", "d0", "b1", "c1", "a2", "d1", "b2", "c2", "d2"]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "1bit"])
def test_a_piece_sends_as_many_bytes_in_every_format(name):
    reduce = compressed_all_reduce(name)
    sent = reduce.values_in_piece(2) // reduce.form.block * reduce.form.record
    assert PIECE_BYTES - 2 * reduce.form.record < sent <= PIECE_BYTES   # whole blocks on each of two ranks


@pytest.mark.parametrize("name", NAMES)
def test_slow_ranks_change_nothing(name):
    """A missing wait would read what has not arrived yet."""
    def body(world, delays):
        reduce, pick = small_pieces(name), random.Random(world.rank)
        for method in ("send", "recv", "all_gather", "all_reduce") if delays else ():
            plain = getattr(world, method)
            setattr(world, method, lambda *a, plain=plain, **more: time.sleep(pick.random() / 100) or plain(*a, **more))
        return torch.stack([reduce(draw(N, world.rank, step), world).clone() for step in range(3)])

    calm, delayed = (rl.simulate(3, lambda world, delays=delays: body(world, delays)) for delays in (False, True))
    assert torch.equal(calm[0], delayed[0])


# ---------------------------------------------------------------------- over many steps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 44, 300, 2000])
def test_ones_that_cancel_come_to_nothing_in_blocks_that_are_not_full_too(name, n):
    """With 1 bit, padding came out as the step of each rank, counted in the step of the sum, and its error was remembered."""
    def body(world):
        reduce = compressed_all_reduce(name, [(0, (n,))])
        return [reduce(torch.full((n,), 1.0 - 2.0 * world.rank), world).abs().max().item() for _ in range(3)]

    expected = [0.0] * 3
    assert rl.simulate(2, body) == [expected, expected]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 3, 5])
def test_what_was_delivered_and_what_is_still_owed_are_the_sum_of_all(name, p):
    steps = 20

    def body(world):
        reduce, delivered, brought = small_pieces(name), torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
        for step in range(steps):
            x = draw(N, world.rank, step)
            brought += x
            delivered += reduce(x, world)
        return delivered, brought, remembered(reduce, world.rank, p)

    results = rl.simulate(p, body)
    brought, owed = sum(b for _, b, _ in results), sum(o for _, _, o in results)
    # Each step adds the error to a gradient of size 1 in fp32; the largest error of these is below 100.
    torch.testing.assert_close(results[0][0] + owed, brought, rtol=0, atol=steps * p * 100 * 2**-24)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_what_is_delivered_converges_to_the_exact_sum(name):
    def body(world):
        reduce, total, apart = small_pieces(name), torch.zeros(N), []
        exact = sum(draw(N, rank) for rank in range(2))
        for step in range(1, 401):
            total += reduce(draw(N, world.rank), world)
            if step in (100, 400):
                apart.append(((total / step - exact).norm() / exact.norm()).item())
        return apart

    early, late = rl.simulate(2, body)[0]
    assert late < 0.5 * early and late < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_an_adversarial_example_fails_without_error_feedback_and_converges_with_it(name):
    """Descent on |w - target|^2 / 2 with noise that cancels over a few steps, but hides the gradient in each of them.

    Rounding and choosing lose the quiet values beside loud ones that change sign in every step; 16 bits lose what a value is off from
    a loud one, which another rank cancels. A sign is wrong in two steps of three where the noise is 3, 3, -6. So without memory the
    gradient never arrives.
    """
    a, b, p = 16, 24, 2
    target, loud = draw(a * b, 1), torch.zeros(a, b)
    loud[:, :4] = (300 if name == "int8" else 50) * draw(a * 4, 2).view(a, 4)
    by_step = lambda step: 3.0 - 9.0 * (step % 3 == 2) if name == "1bit" else loud.view(-1) * (-1) ** step
    by_rank = {"bf16": 2000.0, "fp16": 20000.0}.get(name)

    def body(world, remember):
        fresh = lambda: compressed_all_reduce(name, [(0, (a, b))])
        reduce, w = fresh(), torch.zeros(a * b)
        noise = by_step if by_rank is None else lambda step: by_rank * (-1) ** world.rank
        for step in range(700):
            reduce = reduce if remember else fresh()
            w -= 0.5 / (1 + step / 5) * reduce((w - target + noise(step)) / p, world)
        apart = lambda w: (w - target).view(a, b)[:, 4:].norm()
        return (apart(w) / apart(torch.zeros(a * b))).item()

    assert rl.simulate(p, lambda world: body(world, True))[0] < 0.2
    assert rl.simulate(p, lambda world: body(world, False))[0] > 0.8


# ---------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_arrives_on_every_rank_and_poisons_nothing_that_is_remembered(name, poison):
    def body(world):
        reduce = small_pieces(name)
        reduce(draw(N, world.rank), world)
        sick = draw(N, world.rank, 1)
        if world.rank == 1:
            sick[2000] = poison
        seen = reduce(sick, world).clone()
        after = [reduce(draw(N, world.rank, step), world).clone() for step in range(2, 60)]
        return seen, torch.stack(after)

    results = rl.simulate(3, body)
    for seen, after in results:
        assert not seen[2000].isfinite() and after.isfinite().all()
        assert torch.equal(after, results[0][1])
    exact = sum(draw(N, rank, step) for rank in range(3) for step in range(2, 60))
    off = (results[0][1].sum(0) - exact).norm() / exact.norm()
    assert off < (6 if name == "1bit" else 4)   # what is still owed, in units of 58 steps' sum: no NaN, no runaway


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [3.4e38, -3.38e38, 1.7e38, 2.0**118, 2.0**117])
def test_a_finite_value_near_the_top_of_fp32_leaves_nothing_that_stays_non_finite(name, size):
    """Seven steps of a block's size, or its magnitudes added up, overflowed; and what was remembered was minus infinity for good."""
    def body(world):
        reduce = small_pieces(name)
        x = draw(N, world.rank)
        x[2000] = size if world.rank == 1 else 0.0
        reduce(x, world)
        return torch.stack([reduce(draw(N, world.rank, step), world).clone() for step in range(2, 12)])

    for after in rl.simulate(3, body):
        assert after[1:].isfinite().all()   # one more step may deliver what the first has left


@pytest.mark.parametrize("name", NAMES)
def test_what_was_remembered_before_a_poisoned_step_is_still_owed_after_it(name):
    def body(world):
        reduce = small_pieces(name)
        reduce(draw(N, world.rank), world)
        before = remembered(reduce, world.rank, 2)
        reduce(torch.full((N,), math.nan), world)
        return before, remembered(reduce, world.rank, 2)

    for before, after in rl.simulate(2, body):
        if name == "powersgd":   # it cannot undo an addition of NaN, so it starts afresh
            assert not after.any()
        else:
            assert torch.equal(before, after) and before.any()


@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_a_step_that_was_poisoned_on_another_rank_is_undone(name):
    """With topk, 99 % of a step that is skipped came with the next one, from the ranks whose own values were finite."""
    def body(world):
        reduce = compressed_all_reduce(name, PARTS)
        reduce(draw(N, world.rank), world)
        before = remembered(reduce, world.rank, 2)
        reduce(draw(N, 5) if world.rank == 0 else torch.full((N,), math.inf), world)
        return before, remembered(reduce, world.rank, 2)

    before, after = rl.simulate(2, body)[0]
    torch.testing.assert_close(before, after, rtol=0, atol=2**-20)   # one addition and one subtraction of numbers of size 1 to 8
    assert before.any()


@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_a_step_that_changes_no_error_delivers_nothing(name):
    """With topk, values that were finite came again later: those of parameters that the step does not use wait for the next (late.py)."""
    def body(world):
        x = draw(N, world.rank)
        x[7] = math.inf
        return compressed_all_reduce(name, PARTS)(x, world)

    for x in rl.simulate(2, body):
        assert x.isnan().all()


# ---------------------------------------------------------------------- inputs


@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_and_shapes_come_back_as_they_were(name):
    def body(world):
        out = []
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            x = torch.full((64, 48), 2.0 ** world.rank, dtype=dtype)
            out.append((x, compressed_all_reduce(name, [(0, (64, 48))])(x, world)))
        return out

    for results in rl.simulate(2, body):
        for dtype, (x, returned) in zip((torch.bfloat16, torch.float16, torch.float64), results):
            assert returned is x and x.dtype == dtype and x.shape == (64, 48)
            assert name == "topk" or torch.allclose(x, torch.tensor(3.0, dtype=dtype), rtol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_compressed_is_refused_before_anything_is_sent(name):
    def body(world):
        reduce = compressed_all_reduce(name, PARTS)
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: .* torch.int64 cannot be compressed"):
            reduce(torch.zeros(N, dtype=torch.int64), world)
        with pytest.raises(rl.NotContiguous, match=rf"rank {world.rank}: "):
            reduce(torch.zeros(8, 4).t(), world)
        assert world.ledger.calls == 0
        reduce(torch.zeros(N), world)
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: .*{N + 1} values on 3 ranks, but it remembers .*{N} values on 3"):
            reduce(torch.zeros(N + 1), world)
        if world.rank < 2:
            with pytest.raises(rl.ShapeMismatch, match=rf"{N} values on 2 ranks, but it remembers .*{N} values on 3"):
                reduce(torch.zeros(N), Subgroup(world, (0, 1)))

    rl.simulate(3, body)


def test_one_rank_sends_nothing_and_loses_nothing():
    def body(world):
        x = draw(N, 1)
        return all(torch.equal(compressed_all_reduce(name, PARTS)(x.clone(), world), x) for name in NAMES), world.ledger.calls

    assert rl.simulate(1, body) == [(True, 0)]


def test_powersgd_wants_to_know_where_the_matrices_are_and_that_they_fit():
    with pytest.raises(rl.ConfigError, match="powersgd needs to know where the matrices"):
        compressed_all_reduce("powersgd")

    def body(world):
        for parts in ([(0, (40, 40))], [(0, (20, 30)), (500, (20, 30))]):
            with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: .*1200 values, in which the parts do not lie"):
                PowerSGD(parts)(torch.zeros(1200), world)

    rl.simulate(2, body)


def test_an_unknown_name_is_answered_with_the_nearest_known_one():
    with pytest.raises(rl.ConfigError, match="there is no compression 'int88'. Did you mean 'int8'"):
        compressed_all_reduce("int88")
