"""Gradients that travel compressed: state for each bucket and rank, no strays, embeddings, accumulation, combinations that are refused."""

import time
import warnings

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.comm.compress import Summing
from rankloom.parallel.gradients.reducer import GradientReducer

NAMES = ["bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd"]


class Odd(nn.Module):
    """Tensors of odd sizes, so that the flat buffer has gaps, and one that is used on request only."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        fill = lambda *shape: nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype))
        self.wide, self.small, self.maybe = fill(33, 65), fill(7), fill(21)

    def forward(self, x: torch.Tensor, maybe: bool = False) -> torch.Tensor:
        out = (self.wide.square().t() @ x).sum() + (self.small * x[:7]).sum()
        return out + (self.maybe * x[:21]).sum() if maybe else out


def batch(*key: int) -> torch.Tensor:
    return torch.randn(33, generator=torch.Generator().manual_seed(hash(key) % 2**31))


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def run(world: rl.World, compress: str, steps: int = 3, first: int = 0, maybe=lambda step: False, all_reduce="backend", after=0,
        bucket_bytes=None) -> list[dict]:
    """The gradients of some steps, as clones."""
    model, seen = Odd(), []
    reducer = GradientReducer(named(model), world, summing=Summing(all_reduce, compress, after), bucket_bytes=bucket_bytes)
    for step in range(first, steps):
        reducer.abandon()
        model(batch(world.rank, step), maybe=maybe(step)).backward()
        reducer.finish()
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in named(model).items()})
    return seen


@pytest.fixture(params=[None, 1], ids=["together", "one by one"])
def bucket_bytes(request):
    """All gradients in one bucket, or each in its own."""
    return request.param


@pytest.mark.parametrize("compress", NAMES)
def test_complex_gradients_are_summed_exactly_beside_compressed_ones(compress):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn, self.plain = nn.Parameter(torch.ones(33, dtype=torch.complex64)), nn.Parameter(torch.eye(33))

        def forward(self, x):
            return (self.turn * x).abs().square().sum() + (self.plain @ x).square().sum()

    def body(world, name):
        replica = rl.data_parallel(Turning(), world, compress=name)
        replica(batch(world.rank)).backward()
        return replica.module.turn.grad, replica.module.plain.grad

    exact, *compressed = (rl.simulate(3, lambda world, name=name: body(world, name))[0] for name in ("none", compress))
    ((turn, plain),) = compressed
    assert torch.equal(turn, exact[0]) and not torch.equal(plain, exact[1])


@pytest.mark.parametrize("compress", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_gradients_are_near_the_exact_sums_and_equal_on_all_ranks(compress, p, bucket_bytes):
    exact = rl.simulate(p, lambda w: run(w, "none", bucket_bytes=bucket_bytes, steps=12))[0]
    first, *others = rl.simulate(p, lambda w: run(w, compress, bucket_bytes=bucket_bytes, steps=12))
    assert all(torch.equal(a[name], b[name]) for other in others for a, b in zip(first, other) for name in ("wide", "small"))
    apart, size = (sum(step["wide"] for step in steps) for steps in (first, exact))
    apart = (apart - size).norm() / size.norm()
    assert apart <= (0 if p == 1 else {"bf16": 2**-8, "fp16": 2**-11, "int8": 0.01, "int4": 0.1}.get(compress, 1.0))
    if p > 1 and compress not in ("bf16", "fp16"):
        assert not torch.equal(first[0]["wide"], exact[0]["wide"]), "nothing was compressed"


@pytest.mark.parametrize("compress", NAMES)
@pytest.mark.parametrize("p", [2, 3])
def test_steps_before_compress_after_are_exact_to_the_bit_and_then_every_rank_begins_with_nothing_remembered(compress, p, bucket_bytes):
    ways = {"exact": ("none", {}), "fresh": (compress, {"first": 2}), "later": (compress, {"after": 2})}
    exact, fresh, later = (rl.simulate(p, lambda w, c=c, m=m: run(w, c, 4, bucket_bytes=bucket_bytes, **m)) for c, m in ways.values())
    for rank in range(p):
        for name in ("wide", "small"):
            assert all(torch.equal(later[rank][step][name], exact[rank][step][name]) for step in (0, 1))
            assert all(torch.equal(later[rank][step][name], fresh[rank][step - 2][name]) for step in (2, 3))
        assert not torch.equal(later[rank][2]["wide"], exact[rank][2]["wide"])


def test_exact_steps_send_what_an_exact_run_sends_and_micro_batches_are_no_steps():
    def body(world, compress, after):
        model, sent = Odd(), []
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress, after=after))
        for step in range(5):
            reducer.abandon()
            before = world.ledger.bytes
            for micro in range(2):
                with reducer.sync(micro == 1):
                    model(batch(world.rank, step, micro)).backward()
            reducer.finish()
            sent.append(world.ledger.bytes - before)
        return sent

    exact, always, later = (rl.simulate(2, lambda w, c=c: body(w, *c))[0] for c in (("none", 0), ("int8", 0), ("int8", 3)))
    assert later == exact[:3] + always[3:] and always[3] < exact[3] / 2


def test_a_sum_in_two_levels_is_one_in_exact_steps_too():
    def body(world, compress, after):
        world.topology = rl.Topology(((0, 1), (2, 3)))
        seen = [step["wide"] for step in run(world, compress, all_reduce="hierarchical", after=after)]
        return seen, world.ledger.bytes

    exact, later, all_exact = (rl.simulate(4, lambda w, c=c: body(w, *c))[0] for c in (("none", 0), ("int8", 2), ("int8", 3)))
    assert [torch.equal(a, b) for a, b in zip(exact[0], later[0])] == [True, True, False]
    assert all_exact[1] == exact[1]   # bytes of two levels, not of a flat sum


@pytest.mark.parametrize("compress", NAMES)
def test_every_bucket_and_every_rank_has_a_memory_of_its_own(compress):
    """Three buckets of other lengths: one memory for two of them would refuse, or mix, what it remembers."""
    def body(world):
        model = Odd()
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress), bucket_bytes=1)
        for _ in range(2):
            reducer.abandon()
            model(batch(world.rank), maybe=True).backward()
            reducer.finish()
        return [bucket.algorithm for bucket in reducer.buckets]

    algorithms = [algorithm for mine in rl.simulate(2, body) for algorithm in mine]
    assert len({id(algorithm) for algorithm in algorithms}) == 6


@pytest.mark.parametrize("compress", NAMES)
def test_the_flat_gradients_hold_nothing_but_gradients(compress, bucket_bytes):
    """Remembered errors must not come out between tensors, nor in a parameter that no rank used in this step."""
    def body(world):
        model, norms = Odd(), []
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress), bucket_bytes=bucket_bytes)
        for maybe in (True, True, False, False, True):
            reducer.abandon()
            model(batch(world.rank), maybe=maybe).backward()
            reducer.finish()
            assert (model.maybe.grad is None) == (not maybe)
            held = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]).double()
            norms.append((torch.cat(reducer.flat_gradients()).double().norm().item(), held.norm().item()))
        return norms

    for norms in rl.simulate(2, body):
        for flat, by_parameter in norms:
            assert flat == pytest.approx(by_parameter, rel=1e-12)


@pytest.mark.parametrize(("compress", "off"), [("int8", 0.03), ("bf16", 0.01)])
def test_only_the_last_micro_batch_sends(compress, off):
    def body(world, micros):
        model = Odd()
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress))
        for step in range(2):
            reducer.abandon()
            before = world.ledger.bytes
            for micro in range(micros):
                with reducer.sync(micro == micros - 1):
                    model(batch(world.rank, step, micro)).backward()
            reducer.finish()
        return world.ledger.bytes - before, model.wide.grad.clone()

    once, thrice = (rl.simulate(2, lambda w, n=n: body(w, n))[0] for n in (1, 3))
    assert once[0] == thrice[0]
    exact = sum(2 * Odd().wide.detach() * batch(rank, 1, micro)[:, None] for rank in range(2) for micro in range(3))
    assert (thrice[1] - exact).norm() < off * exact.norm()


def test_data_parallel_averages_compressed_sums():
    def body(world, compress):
        model = rl.data_parallel(Odd(), world, compress=compress)
        model(batch(world.rank)).backward()
        return model.module.wide.grad.clone()

    exact, int8 = (rl.simulate(2, lambda w, c=c: body(w, c))[0] for c in ("none", "int8"))
    assert 0 < (int8 - exact).norm() < 0.02 * exact.norm()


class Table(nn.Module):
    """An embedding of 400 rows, and its output when tied."""

    def __init__(self, tied: bool):
        super().__init__()
        self.tied, self.table = tied, nn.Embedding(400, 16)
        nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.table(tokens)
        return (out @ self.table.weight.t()).square().mean() if self.tied else out.square().sum()


@pytest.mark.parametrize("compress", ["int8", "powersgd"])
def test_an_embedding_that_does_not_go_by_rows_is_exact_in_exact_steps(compress):
    def body(world, compress, after):
        model, seen = Table(tied=True), []
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress, after=after), by_rows=frozenset(["table.weight"]))
        for step in range(3):
            reducer.abandon()
            model(torch.tensor([3, 5 + world.rank, 9 * step])).backward()
            reducer.finish()
            seen.append(model.table.weight.grad.clone())
        return seen

    exact, later = (rl.simulate(2, lambda w, c=c: body(w, *c))[0] for c in (("none", 0), (compress, 2)))
    assert [torch.equal(a, b) for a, b in zip(exact, later)] == [True, True, False]


@pytest.mark.parametrize("compress", ["int8", "1bit", "powersgd"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_goes_by_rows_exactly_where_that_is_cheaper_and_else_compressed(compress, tied):
    def body(world, compress):
        model = Table(tied)
        reducer = GradientReducer(named(model), world, summing=Summing(compress=compress), by_rows=frozenset(["table.weight"]))
        for step in range(2):
            reducer.abandon()
            before = world.ledger.bytes
            model(torch.tensor([3, 5 + world.rank, 9 * step])).backward()
            reducer.finish()
        return world.ledger.bytes - before, model.table.weight.grad.clone()

    exact, lossy = (rl.simulate(2, lambda w, c=c: body(w, c))[0] for c in ("none", compress))
    if tied:
        assert lossy[0] < exact[0] / 2 and not torch.equal(lossy[1], exact[1])
    else:
        assert lossy[0] == exact[0] and torch.equal(lossy[1], exact[1])


class Late(torch.autograd.Function):
    """The sum over ranks, of values and of gradients; backward comes to its sum later on each rank than on the one before."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, world: rl.World) -> torch.Tensor:
        ctx.world = world
        return world.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(0.05 * ctx.world.rank)   # so that another thread comes before it on some ranks, and behind it on others
        return ctx.world.all_reduce(gradient.clone()), None


@pytest.mark.parametrize("how", [{"compress": name} for name in NAMES] + [{"all_reduce": "ring"}, {"all_reduce": "hierarchical"}], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_backward_may_have_sums_of_its_own_and_end_in_two_models_while_buckets_are_summed(backend, how):
    def body(world):
        models = [nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)) for _ in range(2)]
        for at, param in enumerate(param for model in models for param in model.parameters()):
            nn.init.normal_(param.data, generator=torch.Generator().manual_seed(at))
        reducers = [GradientReducer(named(model), world, summing=Summing(**how), bucket_bytes=1) for model in models]
        for step in range(3):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + world.rank))
            for layer in (layer for pair in zip(*models) for layer in pair):
                x = Late.apply(layer(x), world).tanh()
            x.square().sum().backward()
            for reducer in reducers:
                reducer.finish()
        return [reducer.flat_gradients() for reducer in reducers]

    first, *others = rl.simulate(2, body, backend=backend)
    assert all(torch.equal(a, b) for other in others for mine, its in zip(first, other) for a, b in zip(mine, its))


def test_rows_are_compared_with_what_the_compressed_sum_costs():
    """200 rows of 400 are half of an exact sum's bytes, but more than 8 bits of all: they go compressed, although rows are fewer."""
    def body(world):
        model = Table(False)
        reducer = GradientReducer(named(model), world, summing=Summing(compress="1bit"), by_rows=frozenset(["table.weight"]))
        model(torch.arange(0, 400, 2)).backward()
        reducer.finish()
        return world.ledger.bytes

    assert rl.simulate(2, body)[0] < 200 * 17 * 4


def test_hierarchical_compresses_between_nodes_and_is_exact_inside():
    """Two nodes of two ranks. Equal inputs inside a node make the exact part visible: a scale of 1 survives int8 untouched."""
    nodes = ((0, 1), (2, 3))

    def body(world, compress, all_reduce):
        world.topology = rl.Topology(nodes)
        seen = run(world, compress, all_reduce=all_reduce)
        return world.ledger.bytes, seen[-1]["wide"]

    flat = rl.simulate(4, lambda w: body(w, "int8", "backend"))
    levels = rl.simulate(4, lambda w: body(w, "int8", "hierarchical"))
    exact = rl.simulate(4, lambda w: body(w, "none", "hierarchical"))
    assert all(torch.equal(levels[0][1], other) for _, other in levels)
    off = lambda results: ((results[0][1] - exact[0][1]).norm() / exact[0][1].norm()).item()
    assert 0 < off(levels) < off(flat) < 0.03   # two nodes' roundings in place of four ranks'
    assert levels[0][0] < exact[0][0]


@pytest.mark.parametrize(("compress", "all_reduce", "said"), [
    ("int88", "backend", "no compression 'int88'. Did you mean 'int8'"),
    ("int8", "ring", "sums in its own way, without all_reduce='ring'"),
    ("int8", "auto", "sums in its own way, without all_reduce='auto'"),
    ("powersgd", "hierarchical", "needs whole matrices"),
    ("powersgd:8", "hierarchical", "'powersgd:8' needs whole matrices"),
    ("powersgd:8", "ring", "sums in its own way, without all_reduce='ring'"),
    ("int8:8", "backend", "int8 has no rank"),
])
def test_what_has_no_meaning_is_refused_before_anything_is_sent(compress, all_reduce, said):
    def body(world):
        with pytest.raises(rl.ConfigError, match=said):
            GradientReducer(named(Odd()), world, summing=Summing(all_reduce, compress))
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


@pytest.mark.parametrize(("compress", "after", "said"), [
    ("int8", -1, "compress_after=-1, expected a whole number of steps"),
    ("int8", True, "compress_after=True, expected"),
    ("int8", 1.5, "compress_after=1.5, expected"),
    ("none", 3, "compress_after=3 has no meaning with compress='none'"),
])
def test_a_number_of_exact_steps_that_cannot_be_is_refused(compress, after, said):
    def body(world):
        with pytest.raises(rl.ConfigError, match=said):
            rl.data_parallel(Odd(), world, compress=compress, compress_after=after)

    rl.simulate(2, body)


@pytest.mark.parametrize(("nodes", "compress", "told"), [(((0, 1, 2, 3),), "int8", 1), (((0, 1), (2, 3)), "int8", 0),
                                                         (((0, 1, 2, 3),), "none", 0)])
def test_one_rank_warns_once_where_all_are_on_one_node_and_only_what_goes_between_nodes_would_be_compressed(nodes, compress, told):
    def body(world):
        world.topology = rl.Topology(nodes)
        rl.data_parallel(Odd(), world, compress=compress, all_reduce="hierarchical")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        rl.simulate(4, body)
    mine = [str(one.message) for one in seen if "between nodes" in str(one.message)]
    assert len(mine) == told and all("all 4 ranks are on one: nothing is compressed" in said for said in mine)


@pytest.mark.parametrize("inside", [False, True])
def test_loading_values_drops_what_is_owed_to_the_old_ones_and_begins_with_exact_steps(inside):
    def body(world):
        plain = nn.Linear(64, 64, bias=False)
        nn.init.eye_(plain.weight)
        model = rl.data_parallel(plain, world, compress="topk", compress_after=1)
        holder = nn.Sequential(model) if inside else model
        first = {name: value.clone() for name, value in holder.state_dict().items()}
        for step in range(4):
            model(batch(step, world.rank).repeat(2)[:64]).square().sum().backward()
            model.zero_grad()
        holder.load_state_dict(first)
        model(torch.ones(64)).sum().backward()
        return model.module.weight.grad.clone()

    for gradient in rl.simulate(2, body):
        assert torch.equal(gradient, torch.ones(64, 64))
