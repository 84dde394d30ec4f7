"""What a rank holds at each moment of a step, counted in two ways, and what it sends: the formulas of ZeRO, to the padding."""

import gc
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from awkward import adamw, loss_sum, share
from awkward import drawn as drawn_from
from blocky import make_blocky, make_turns
from rankloom.parallel.zero import step_bill
from rankloom.shard import frames
from rankloom.shard.unit import Residence
from rankloom.train.engine import Held

pytestmark = pytest.mark.gloo

WIDTH, BLOCKS = 32, 4
PRECISIONS = {"fp32": (4, 4), "bf16": (2, 4)}   # bytes of an element gathered, and of one owned, reduced, remembered


class Block(nn.Module):
    """Two matrices, no biases: sizes that divide by all the ranks, so that there is no padding at all."""

    def __init__(self, watch) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.watch = watch

    def forward(self, x):
        self.watch("forward")
        y = self.down(torch.tanh(self.up(x)))
        if y.requires_grad:
            y.register_hook(lambda grad: self.watch("backward"))
        return x + y


class Tower(nn.Module):
    """Blocks between two matrices of the root's."""

    def __init__(self, watch) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.blocks = nn.Sequential(*(Block(watch) for _ in range(BLOCKS)))

    def forward(self, x):
        return self.last(self.first(self.blocks(x)))


def squares(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A sum over rows, and their number."""
    return model(x).square().sum(), len(x)


drawn = partial(drawn_from, dtype=torch.float32, scale=0.1)


N = 4 * WIDTH * WIDTH        # elements of a block, and of the root
WHOLE = (BLOCKS + 1) * N


@dataclass
class Trace:
    """What was held at each moment, by name."""

    moments: list[tuple[str, Held, int]]
    gives_back: bool = False   # what gradients take, when a step begins

    def most_gathered(self, moment: str) -> int:
        """In bytes."""
        return max(held.gathered for name, held, _ in self.moments if name == moment)


def run(world: rl.World, stage: int, precision: str, *, change=lambda model: model, **options) -> Trace:
    """Two steps; the trace of the second."""
    trace = Trace([], gives_back=frames.has_allocator(world.device))

    def watch(moment: str) -> None:
        if engine:
            trace.moments.append((moment, engine[0].held(), alive(engine[0])))

    engine: list[rl.Engine] = []
    made = rl.prepare(change(drawn(Tower(watch))), loss=squares, world=world, stage=stage, precision=precision,
                      optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **options)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    made.step(x)
    engine.append(made)
    watch("before")
    made.step(x)
    watch("after")
    return trace


def alive(engine: rl.Engine) -> int:
    """Bytes of all storages that the sharding, the model and the optimizer reach, each once: counted apart from `held`."""
    reached = [engine.model, engine.optimizer.state, vars(engine.placement)]
    seen, found = set(), {}
    while reached:
        thing = reached.pop()
        if id(thing) in seen or isinstance(thing, type | threading.Thread | rl.World):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor) and not thing.dim():   # Adam's count of steps
            continue
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
            reached += [thing.grad] if thing.is_leaf and thing.grad is not None else []
        elif isinstance(thing, dict):
            reached += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            reached += thing
        elif type(thing).__module__.startswith(("rankloom.parallel", "rankloom.shard", "rankloom.train", "tests", "torch.nn", "test_")) or (
                type(thing).__module__ == "collections"):
            reached += [part for part in gc.get_referents(thing) if not callable(part) or isinstance(part, nn.Module)]
    return sum(found.values())


def kept_whole(p: int, precision: str, gradients: int) -> Held:
    """The formulas of stages 1 and 2: what is owned, what of the wholes is beyond that, gradients, two moments of Adam."""
    compute, master = PRECISIONS[precision]
    own = WHOLE // p * master
    return Held(own, WHOLE * compute - (own if compute == master else 0), gradients, 2 * own)


@pytest.mark.parametrize("p, precision", [(2, "fp32"), (4, "fp32"), (1, "bf16"), (2, "bf16"), (4, "bf16")])
def test_stage_3_holds_its_slices_the_root_and_the_blocks_in_use_and_ahead(p, precision):
    compute, master = PRECISIONS[precision]
    for ahead in (0, 1, 2):
        for trace in rl.simulate(p, lambda world, ahead=ahead: run(world, 3, precision, ahead=ahead)):
            own = WHOLE // p * master
            lent = 2 * N * master   # two buffers in turn, of the one size that there is
            arriving = lent * (p - 1) // p   # what others send of this rank's slices of them
            for moment, held, counted in trace.moments:
                assert (held.parameters, held.optimizer) == (own, 2 * own), moment
                assert held.gathered <= (1 + 1 + ahead) * N * compute, moment   # the root, the one in use, those ahead
                assert held.gradients <= lent + arriving + own, moment
                assert counted == sum((held.parameters, held.gathered, held.gradients, held.optimizer)), moment
            between = [held for moment, held, _ in trace.moments if moment in ("before", "after")]
            assert [held.gathered for held in between] == [0, 0]
            assert [held.gradients for held in between] == [own] * 2   # what was lent has gone back
            assert {held.gradients for moment, held, _ in trace.moments if moment == "forward"} == {0 if trace.gives_back else own}
            assert trace.most_gathered("forward") == (2 + min(ahead, BLOCKS - 1)) * N * compute
            assert trace.most_gathered("backward") == trace.most_gathered("forward")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_hold_whole_parameters_and_stage_2_a_slice_of_gradients(stage, p, precision):
    _, master = PRECISIONS[precision]
    own = WHOLE // p * master
    whole_gradients = WHOLE * master if stage == 1 or p == 1 else own
    lent, arriving = (0 if stage == 1 or p == 1 else 2 * N * master), 2 * N * master * (p - 1) // p
    for trace in rl.simulate(p, lambda world: run(world, stage, precision)):
        for moment, held, counted in trace.moments:
            assert held == kept_whole(p, precision, held.gradients), moment
            assert held.gradients <= whole_gradients + lent + arriving, moment
            rest = 0 if moment == "forward" and trace.gives_back else whole_gradients
            assert held.gradients == rest or moment == "backward", moment
            assert counted == sum((held.parameters, held.gathered, held.gradients, held.optimizer)), moment


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_begins_without_the_memory_of_gradients_where_a_device_can_use_it(stage, p, options, monkeypatch):
    monkeypatch.setattr(frames, "has_allocator", lambda device: True)
    for trace in rl.simulate(p, lambda world: run(world, stage, "bf16", **options)):
        passes = [(moment, held.gradients) for moment, held, _ in trace.moments]
        rests = [held for moment, held in passes if moment in ("before", "after")]
        until_backward = passes[1 : [moment for moment, _ in passes].index("backward")]
        assert until_backward and not any(held for _, held in until_backward)
        assert rests == [WHOLE * 4 // (1 if stage < 2 or options.get("deterministic") else p)] * 2
        for moment, held, counted in trace.moments if stage else ():
            assert counted == sum((held.parameters, held.gathered, held.gradients, held.optimizer)), moment


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_lies_in_new_memory_of_gradients_is_never_read(stage, options, monkeypatch):
    """Not between tensors either, where norms read."""
    def body(world):
        engine = rl.prepare(make_blocky(), loss=loss_sum, optimizer=adamw, world=world, stage=stage, clip=1.0, **options)
        batches = [tuple(t[6 * world.rank:][:6] for t in turn) for turn in make_turns()[:3]]
        return [(report.loss, report.grad_norm) for report in map(engine.step, batches)]

    def open_with_nan(self) -> None:
        opened(self)
        self.tensor.fill_(torch.nan)

    expected, opened = rl.simulate(2, body), frames._Fresh.open
    monkeypatch.setattr(frames, "has_allocator", lambda device: True)
    monkeypatch.setattr(frames._Fresh, "open", lambda self: None if self.held else open_with_nan(self))
    assert rl.simulate(2, body) == expected


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_in_a_loop_of_ones_own_a_forward_gives_back_gradients_that_the_optimizer_has_forgotten(wrap, monkeypatch):
    monkeypatch.setattr(frames, "has_allocator", lambda device: True)

    def held(model) -> int:
        if wrap is rl.data_parallel:
            return sum(bucket.flat.nbytes for bucket in model._reducer.buckets)
        return sum(gradient.held() for gradient in model._sharding.gradients())

    def body(world):
        seen = []
        model = wrap(drawn(Tower(lambda moment: seen.append(held(model)) if moment == "forward" else None)).to(world.device), world)
        plain = drawn(Tower(lambda moment: None)).to(world.device)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(world.device)
        updates = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, plain)]
        for to_none in (True, True, False, True):
            for each, update in zip((model, plain), updates):
                squares(each, x)[0].backward()
                update.step()
                update.zero_grad(set_to_none=to_none)
        for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values()):
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=0)   # two equal halves of one sum
        return [bool(seen[at * BLOCKS]) for at in range(4)]

    assert rl.simulate(2, body) == [[False, False, False, True]] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_where_pages_are_common_a_rank_holds_its_share_of_everything(stage):
    p = 4
    for trace in rl.simulate(p, lambda world: run(world, stage, "fp32"), backend="rankloom"):
        for moment, held, _ in trace.moments:
            assert (held.parameters, held.gathered, held.optimizer) == (WHOLE * 4 // p, 0, 2 * WHOLE * 4 // p), moment
            assert held.gradients <= WHOLE * 4 // p + 2 * N * 4, moment


def test_blocks_that_are_frozen_in_part_are_let_go_in_backward_too():
    def frozen(model):
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    for trace in rl.simulate(2, lambda world: run(world, 3, "fp32", change=frozen)):
        assert trace.most_gathered("backward") <= 3 * N * 4   # the root, the one in use, one ahead
    trace, = rl.simulate(1, lambda world: run(world, 3, "bf16", change=frozen))   # where what is frozen stays: it is its slice
    assert [held.gathered for moment, held, _ in trace.moments if moment in ("before", "after")] == [0, 0]


def test_parameters_that_are_kept_gathered_are_whole_from_forward_to_backward():
    for trace in rl.simulate(2, lambda world: run(world, 3, "fp32", reshard_after_forward=False)):
        assert trace.most_gathered("backward") == WHOLE * 4
        assert trace.moments[-1][1].gathered == 0


def test_parameters_that_stay_cut_over_neighbours_hold_that_share_between():
    for trace in rl.simulate(rl.Mesh(shard=4), lambda world: run(world, 3, "fp32", reshard_after_forward=2)):
        backward = [held.gathered for moment, held, _ in trace.moments if moment == "backward"]
        assert backward[0] <= 3 * N * 4 + (BLOCKS - 1) * N * 4 // 2
        assert trace.moments[-1][1].gathered == 0


def test_what_neighbours_need_for_backward_is_kept_until_it_has_gathered_and_by_no_forward_without_gradients():
    def body(world):
        model = rl.fully_shard(drawn(Tower(lambda moment: None)).to(world.device), world, reshard_after_forward=2)
        gathered = lambda: sum(unit.held()[1] for unit in model._sharding.units)
        x, seen = torch.ones(2, WIDTH, device=world.device), []
        with torch.no_grad():
            model(x)
        seen.append(gathered())
        loss = model(x).sum()
        seen.append(gathered())
        loss.backward()
        return [*seen, gathered()]

    assert rl.simulate(4, body) == [[0, N * 4 + BLOCKS * N * 4 // 2, 0]] * 4   # between: the root, and a half of each block


def test_a_second_backward_of_one_graph_lets_go_as_the_first_does():
    def body(world):
        gathered = lambda: sum(unit.held()[1] for unit in model._sharding.units)
        model, seen = rl.fully_shard(drawn(Tower(lambda moment: seen.append(gathered()))).to(world.device), world), []
        loss = model(torch.ones(2, WIDTH, device=world.device)).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        return seen[BLOCKS:]

    for seen in rl.simulate(2, body):
        assert seen[:BLOCKS] == seen[BLOCKS:] and max(seen) == 3 * N * 4


@pytest.mark.parametrize("memory", [0, 2 * N * 4, WHOLE * 4])
def test_gradients_that_accumulate_stay_within_the_memory_that_is_given(memory):
    for trace in rl.simulate(2, lambda world: run(world, 3, "fp32", accumulate=3, gradient_memory=memory)):
        for moment, held, _ in trace.moments:
            assert held.gradients <= WHOLE * 4 // 2 + memory + 3 * N * 4, moment   # two on their way, and what arrives for them


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kept", [1, 2, BLOCKS + 1])   # the root comes first
def test_a_section_whose_gradients_fit_the_memory_that_is_given_is_reduced_once_a_step(kept, stage):
    step = lambda memory: rl.simulate(2, partial(sent_in_a_step, stage=stage, accumulate=3, gradient_memory=memory))
    for (often, _), (seldom, _) in zip(step(N * 4 - 1), step((kept + 1) * N * 4 - 1), strict=True):
        assert often - seldom == (3 - 1) * kept * N * 4 // 2   # a rank sends half of each section to the other


class Twice(Tower):
    """Calls its blocks in changing order, some of them twice, some not at all."""

    turn = 0

    def forward(self, x):
        orders = [(0, 1, 2, 3), (0, 1, 2, 1, 3), (0, 0, 0), (3, 2, 1, 0), (0, 3)]
        for at in orders[self.turn % len(orders)]:
            x = self.blocks[at](x)
        return self.last(self.first(x))


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("grad", [True, False])
def test_what_was_gathered_ahead_for_a_call_that_did_not_come_is_let_go(ahead, grad):
    def body(world):
        seen, engine = [], []

        def watch(moment):
            if engine:
                seen.append(engine[0].held().gathered // (N * 4))

        made = rl.prepare(drawn(Twice(watch)), loss=squares, world=world, stage=3, ahead=ahead,
                          optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        made.step(x)
        engine.append(made)
        rests = []
        for turn in range(7):
            made.model.turn = turn
            made.step(x) if grad else made.evaluate([x])
            rests.append(made.held().gathered)
        return max(seen), rests

    for most, rests in rl.simulate(2, body):
        assert most <= 2 + ahead + grad   # a block that is called twice stays between the two parts of its backward
        assert not any(rests)


def sent_in_a_step(world, stage, **options):
    """Bytes of parameters and gradients that a rank sends in a step, and what the bill says of it."""
    made = rl.prepare(drawn(Tower(lambda moment: None)), loss=squares, world=world, stage=stage,
                      optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **options)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(world.rank))
    made.step(x)
    before = world.ledger.bytes
    made.step(x)
    flags = 8 * (2 * (BLOCKS + 1) + 6) * (world.size - 1)   # parameters used, the order of gathers, rates, loss and count: fp64
    norm = 2 * 8 * (world.size - 1) // world.size
    return world.ledger.bytes - before - flags - norm, step_bill(made.placement.sharding, options.get("accumulate", 1)).sent


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"accumulate": 3, "gradient_memory": 1 << 30}, {"reshard_after_forward": False},
                                     {"ahead": 0}, {"ahead": 3}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_step_sends_is_its_bill(stage, options):
    body = partial(sent_in_a_step, stage=stage, **options)
    senseless = {1: {"reshard_after_forward", "ahead", "gradient_memory"}, 2: {"reshard_after_forward", "ahead"}, 3: set()}[stage]
    if senseless & options.keys():
        with pytest.raises(rl.ConfigError, match="has no meaning at stage"):
            rl.simulate(2, body)
        return
    for p in (2, 4):
        for sent, bill in rl.simulate(p, body):
            assert sent == bill
            if not options:
                root = N if stage == 3 else 0   # which is gathered once, not twice
                assert bill == ((3 if stage == 3 else 2) * WHOLE - root) * 4 * (p - 1) // p


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_pages_are_common_a_gather_sends_one_number(stage):
    for p in (2, 4):
        for sent, bill in rl.simulate(p, partial(sent_in_a_step, stage=stage), backend="rankloom"):
            assert bill == WHOLE * 4 * (p - 1) // p   # gradients
            assert sent == bill + (BLOCKS + 1) * 2 * 4 * (p - 1) // p   # a gather is a barrier, which sums one number


def test_neighbours_send_less_for_backward():
    def body(world, near):
        made = rl.prepare(drawn(Tower(lambda moment: None)), loss=squares, world=world, stage=3, reshard_after_forward=near,
                          optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        made.step(x)
        before = world.group("shard").ledger.bytes
        made.step(x)
        return world.group("shard").ledger.bytes - before

    sent = {near: rl.simulate(rl.Mesh(shard=4), lambda world, near=near: body(world, near))[0] for near in (True, 2)}
    assert sent[True] - sent[2] == BLOCKS * N * 4 * 3 // 4 - BLOCKS * N * 4 // 2   # over two ranks, not four


def test_units_tell_their_memory_apart():
    def body(world, stage, **options):
        made = rl.prepare(make_blocky(), loss=loss_sum, optimizer=adamw, world=world, stage=stage, **options)
        return {unit.residence for section in made.placement.sharding.sections for unit in section.units}

    assert rl.simulate(2, lambda world: body(world, 3))[0] == {Residence.FREED}
    assert rl.simulate(2, lambda world: body(world, 2))[0] == {Residence.KEPT}
    assert rl.simulate(2, lambda world: body(world, 3), backend="rankloom")[0] == {Residence.COMMON}
    assert rl.simulate(1, lambda world: body(world, 3))[0] == {Residence.KEPT}   # the slice is the whole
    # frozen parameters have no master
    assert rl.simulate(1, lambda world: body(world, 3, precision="bf16"))[0] == {Residence.FREED, Residence.KEPT}
    assert rl.simulate(1, lambda world: body(world, 2, precision="bf16"))[0] == {Residence.KEPT}


# ---------------------------------------------------------------------- evaluation with what batches there are

@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_batch_may_be_none_where_the_loss_has_rows_of_its_own(stage):
    def body(world):
        own = share(make_turns()[0], world.rank, world.size)
        engine = rl.prepare(make_blocky(), loss=lambda model, batch: loss_sum(model, own), optimizer=adamw, world=world, stage=stage)
        return engine.evaluate([None] * world.rank).loss   # rank 0 brings no batch

    with torch.no_grad():
        total, count = loss_sum(make_blocky(), share(make_turns()[0], 1, 2))
    assert rl.simulate(2, body) == pytest.approx([total.item() / count] * 2, rel=1e-12)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_may_evaluate_different_numbers_of_batches_before_and_between_steps(stage, ahead, backend):
    turns = make_turns()
    numbers = {0: 4, 1: 1, 2: 0}

    def truth(model):
        with torch.no_grad():
            found = [loss_sum(model, batch) for batch in turns]
        held = [found[at] for number in numbers.values() for at in range(number)]
        return float(sum(total for total, _ in held)) / sum(count for _, count in held)

    def body(world):
        options = {"ahead": ahead} if stage == 3 else {}
        engine = rl.prepare(make_blocky(), loss=loss_sum, optimizer=adamw, world=world, stage=stage, **options)
        losses = []
        for batch in turns[:3]:
            losses.append(engine.evaluate(turns[: numbers[world.rank]]).loss)
            engine.step(share(batch, world.rank, world.size))
        return losses, engine.full_state_dict()["model"]

    plain = make_blocky()
    update = adamw([p for p in plain.parameters() if p.requires_grad])
    expected = []
    for batch in turns[:3]:
        expected.append(truth(plain))
        update.zero_grad()
        total, count = loss_sum(plain, batch)
        (total / count).backward()
        update.step()
    for losses, state in rl.simulate(3, body, backend=backend):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batches", [(2, 2), (2, 0)])
def test_a_loss_may_read_parameters_of_the_root_behind_the_model_in_an_evaluation_too(batches):
    def loss(model, batch):
        total, count = loss_sum(model, batch)
        return total * model.norm.weight.square().sum(), count

    def body(world, stage):
        engine = rl.prepare(make_blocky(), loss=loss, optimizer=adamw, world=world, stage=stage)
        losses, held = [], []
        for batch in make_turns()[:2]:
            losses.append(engine.step(share(batch, world.rank, world.size)).loss)
            losses.append(engine.evaluate(make_turns()[: batches[world.rank]]).loss)
            held.append(engine.held().gathered)
        return losses, held

    (expected, _), *_ = rl.simulate(2, lambda world: body(world, 0))
    for losses, held in rl.simulate(2, lambda world: body(world, 3)):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert held == [0, 0], "the root stayed behind the evaluation"


@pytest.mark.parametrize("more", [{"precision": "bf16"}, {"offload": True}], ids=str)
def test_an_evaluation_on_one_rank_gathers_no_more_at_once_than_a_step(more):
    def body(world):
        gathered = []

        def loss(model, batch):
            gathered.append(engine.held().gathered)
            return loss_sum(model, batch)

        engine = rl.prepare(make_blocky(), loss=loss, optimizer=adamw, world=world, stage=3, **more)
        engine.evaluate(make_turns()[:2])
        return gathered

    assert rl.simulate(1, body) == [[0, 0]]


def test_a_rank_that_follows_an_evaluation_holds_the_root_and_one_block_at_once():
    def body(world):
        engine = rl.prepare(drawn(Tower(lambda moment: None)), loss=squares, world=world, stage=3, optimizer=adamw)
        guide, seen = engine.placement.sharding.guide, []
        say = guide._say
        guide._say = lambda following: (seen.append(engine.held().gathered), say(following))[1]
        engine.evaluate([] if world.rank else [torch.ones(2, WIDTH)] * 2)
        return max(seen)

    assert rl.simulate(2, body)[1] == 2 * N * 4
