"""The same promises on a CUDA device. Run there with `pytest -m gpu`; without one they are not collected as passed, but skipped.
Where packages of the command line are missing, add `--continue-on-collection-errors`: these tests need none of them.

The second half has 2, 4 and 8 processes on one GPU. What their ranks run does not know the device, so that it can be tried on the CPU.
"""

import os
import signal
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
import rankloom.transport  # registers the backend
from awkward import adamw, fingerprint, loss_sum, make_batches, make_model, share, train_plainly
from conformance.cases import COLLECTIVES, Case, begin, same_bits, values
from conformance.oracle import OPS, has_meaning
from conformance.test_torch_classes import ddp, fsdp, on_backend, train
from rankloom.base.errors import RankFailed, RankLost
from rankloom.models.config import MoEConfig, preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from seeded import seeded

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def world():
    joined = rl.init(device="cuda")
    yield joined
    joined.close()


def test_training_on_a_gpu_equals_the_cpu(world):
    engine = rl.prepare(make_model(), loss=loss_sum, optimizer=adamw, world=world, accumulate=3, clip=1.0)
    losses = [engine.step(batch).loss for batch in make_batches()]
    truth = train_plainly(clip=1.0)
    assert losses == pytest.approx(truth["losses"], rel=1e-12)   # the bound of test_equivalence.py: another order of the same sums
    for name, expected in truth["params"].items():
        torch.testing.assert_close(engine.full_state_dict()["model"][name], expected, rtol=1e-11, atol=1e-12)   # in host memory


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_training_on_a_gpu_repeats_its_bits(world, precision):
    def run() -> str:
        engine = rl.prepare(make_model(torch.float32, dropout=0.2), loss=loss_sum, optimizer=adamw, world=world, precision=precision,
                            deterministic=True)
        losses = [engine.step(batch).loss for batch in make_batches()]
        state = engine.full_state_dict()
        state["model"] = {name: t.cpu() for name, t in state["model"].items()}
        state["optimizer"]["state"] = {n: {k: v.cpu() for k, v in held.items()} for n, held in state["optimizer"]["state"].items()}
        return fingerprint(state, losses)

    assert run() == run()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_compiled_gpt_learns_on_a_gpu(world, precision):
    model = GPT(preset("1M", vocab_size=256, seq_len=64), device="cuda")
    for block in model.blocks:
        block.compile()
    engine = rl.prepare(model, loss=language_model_loss, world=world, clip=1.0, precision=precision,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True))
    text = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))
    losses = [engine.step((text[:, :-1].contiguous(), text[:, 1:].contiguous())).loss for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0], "eight rows are learned by heart"


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"stage": 3, "recompute": "full"}, {"precision": "fp8"}], ids=str)
@pytest.mark.parametrize("experts", [None, MoEConfig(experts=4, top_k=2, ffn=32)], ids=["dense", "experts"])
def test_nothing_before_the_update_waits_for_the_gpu(world, experts, options):
    """Else its queue runs dry in every micro-batch; the step's one wait comes when all of it is queued."""
    mode = torch.cuda.set_sync_debug_mode

    def loss(model, batch):
        if engine.steps_done == 2:
            mode("error")
        counted.append(1)
        items = batch[1].numel()   # of every other micro-batch as a tensor on the host
        return language_model_loss(model, batch)[0], items if len(counted) % 2 else torch.tensor(items)

    model, counted = GPT(preset("1M", vocab_size=256, seq_len=64, moe=experts)), []
    engine = rl.prepare(model, loss=loss, world=world, accumulate=2, clip=1.0, **{"precision": "bf16"} | options,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=torch.cuda.is_available()))
    update = engine.optimizer.step
    engine.optimizer.step = lambda: [mode("default"), update()]   # no hook: with one, the step is known to be finite first
    text = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0)).to("cuda")
    try:
        losses = [engine.step((text[:, :-1].contiguous(), text[:, 1:].contiguous())).loss for _ in range(4)]
    finally:
        mode("default")
    assert losses[-1] < losses[0]


class WithBuffers(nn.Module):
    """A layer with a constant table, with running statistics, and with a mean that is written so that torch does not count it."""

    def __init__(self, begins=0):
        super().__init__()
        self.linear, self.norm, self.calls, self.begins = nn.Linear(16, 16), nn.BatchNorm1d(16), 0, begins
        self.register_buffer("table", torch.ones(16))
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        if self.calls >= self.begins:
            self.seen.data.lerp_(x.mean(0), 0.5)
        self.calls += 1
        return self.norm(self.linear(x * self.table))


def own_loop(wrap, make, world):
    """Five steps in a loop of one's own, from the third on none of them may wait; losses, and the buffers after each step."""
    mode, model = torch.cuda.set_sync_debug_mode, seeded(0)(make)().to(world.device)
    wrapped = wrap(model, world)
    update = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=True)
    rows = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    losses, buffers = [], []
    try:
        for step, x in enumerate(rows):
            mode("default")
            world.barrier()   # it waits for the GPU; and ranks that are threads have one mode together
            mode("error" if step > 1 else "default")
            losses.append((wrapped(x) - 1).square().mean())
            losses[-1].backward()
            update.step()
            update.zero_grad()
            buffers.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    finally:
        mode("default")
    return [loss.item() for loss in losses], [{name: value.tolist() for name, value in found.items()} for found in buffers]


def on_gpus(ranks, body):
    """What it returns on each rank: threads where simulated ranks have GPUs (tests/pretended_gpu), else processes that share GPU 0."""
    kind, = rl.simulate(1, lambda world: world.device.type)
    return rl.simulate(ranks, body) if kind == "cuda" else on_one_gpu(ranks, body)


@pytest.mark.parametrize("make", [partial(nn.Linear, 16, 16), WithBuffers], ids=["no buffers", "buffers"])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_no_step_of_a_loop_of_one_s_own_waits_for_the_gpu(wrap, make):
    """The whole backward is still in its queue when the optimizer is called."""
    for losses, buffers in (both := on_gpus(2, partial(own_loop, wrap, make))):
        assert losses[-1] < losses[0] and buffers == both[0][1]


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_a_buffer_that_a_later_step_writes_uncounted_for_the_first_time_is_averaged_from_the_step_after_it_on(wrap):
    (_, one), (_, other) = on_gpus(2, partial(own_loop, wrap, partial(WithBuffers, begins=2)))
    assert [a == b for a, b in zip(one, other)] == [True, True, False, True, True]
    assert one[2] | {"seen": None} == other[2] | {"seen": None} and any(one[4]["seen"])


def engine_of_rows(make, options, world):
    """Of two ranks that have rows each, and a batch."""
    engine = rl.prepare(seeded(0)(make)(), loss=lambda model, x: ((model(x) - 1).square().sum(), len(x)), world=world, clip=1.0, **options,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))
    return engine, torch.randn(8, 16, generator=torch.Generator().manual_seed(world.rank)).to(world.device)


def with_dropout():
    """A layer whose masks are keyed by the numbers of rows, which ranks tell each other."""
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))


def engine_of_a_pipeline(world):
    """Of two stages that share the embedding, and a batch."""
    engine = rl.prepare(GPT(preset("1M", vocab_size=256, seq_len=64)), loss=language_model_loss, world=world, precision="bf16", clip=1.0,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True), pipe="1f1b", accumulate=2)
    text = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0)).to(world.device)
    return engine, (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def engine_loop(begin, world):
    """Four steps, from the third on nothing before the update waits, nor what makes the buffers equal after it; losses."""
    mode, (engine, batch) = torch.cuda.set_sync_debug_mode, begin(world)
    update, average = engine.optimizer.step, engine._buffer_keeper.average_changed
    # Ranks that are threads have one mode together: the barrier.
    strict = lambda: [mode("default"), world.barrier(), mode("error" if engine.steps_done >= 2 else "default")]
    engine.optimizer.step = lambda: [mode("default"), update()]
    engine._buffer_keeper.average_changed = lambda: [strict(), average(), mode("default")]
    losses = []
    try:
        for _ in range(4):
            strict()
            losses.append(engine.step(batch).loss)
    finally:
        mode("default")
    return losses


@pytest.mark.parametrize(("mesh", "begin"), [
    pytest.param(rl.Mesh(replicate=2), partial(engine_of_rows, WithBuffers, {}), id="buffers"),
    pytest.param(rl.Mesh(replicate=2), partial(engine_of_rows, with_dropout, {}), id="dropout"),
    pytest.param(rl.Mesh(shard=2), partial(engine_of_rows, with_dropout, {"stage": 3, "deterministic": 4}), id="deterministic"),
    pytest.param(rl.Mesh(pipe=2), engine_of_a_pipeline, id="tied stages"),
])
def test_no_rank_waits_for_its_gpu_before_the_update(mesh, begin):
    for losses in on_gpus(mesh, partial(engine_loop, begin)):
        assert losses[-1] < losses[0]


def norm_of_two_sizes(world):
    """How many operations take the gradient norm of a model of few layers, and of one of many, that is split over tensor ranks."""
    counts = []
    for blocks in (1, 4):
        model = GPT(replace(preset("1M", vocab_size=256, seq_len=64), layers=blocks))
        engine = rl.prepare(model, loss=language_model_loss, world=world, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        text = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0)).to(world.device)
        norm, used = engine.placement.norm, []

        def watched(totals, norm=norm, used=used):
            with Operations() as seen:
                found = norm(totals)
            used.append(seen.number)
            return found

        engine.placement.norm = watched
        engine.step((text[:, :-1].contiguous(), text[:, 1:].contiguous()))
        counts += used
    return counts


class Operations(TorchDispatchMode):
    """Counts operations that compute: views cost nothing on a device."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_norm_of_a_split_model_takes_as_many_operations_for_any_number_of_tensors():
    """Each would be a kernel of a few microseconds, several for every parameter."""
    for few, many in on_gpus(rl.Mesh(tensor=2), norm_of_two_sizes):
        assert few == many


def moved(dtype, world):
    """What a rank has after numbers of this dtype went to the next rank, in two ways; and after a sum, if they are complex."""
    mine, came, went = (torch.full((4,), world.rank + at, device=world.device).to(dtype) for at in (1, 5, 5))
    world.exchange(mine, 1 - world.rank, came, 1 - world.rank)
    for frm in (0, 1):
        world.send(mine, 1 - frm) if frm == world.rank else world.recv(went, frm)
    sums = [world.reduce_scatter(mine * 1j, op).imag.tolist() for op in ("sum", "mean")] if dtype.is_complex else []
    return came.real.tolist(), went.real.tolist(), *sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_messages_and_sums_between_gpus_are_of_any_dtype(dtype):
    """Also of those that NCCL does not know."""
    numbers = torch.tensor([[1] * 4, [2] * 4]).to(dtype).real.tolist()
    sums = [[3.0] * 2, [1.5] * 2] if dtype.is_complex else []
    assert on_gpus(2, partial(moved, dtype)) == [(numbers[1 - rank], numbers[1 - rank], *sums) for rank in (0, 1)]


# ---------------------------------------------------------------- several ranks on one GPU

RANKS = [2, 4, 8]
LIMIT = 300.0   # seconds: kernels are built at their first use, by all ranks at once


def on_one_gpu(ranks, body):
    """What `body(world)` returns on each of `ranks` processes that share GPU 0."""
    return rl.spawn(ranks, body, device="cuda", timeout=LIMIT)


def carrier(world):
    """What carries the world's tensors on its device."""
    return type(world._process_group.carrier(world.device)).__name__


def is_same(got, wanted):
    """To the last bit; but one NaN is as good as another."""
    is_nan = got.dtype == wanted.dtype and got.is_floating_point() and got.isnan() & wanted.isnan()
    return same_bits(got, wanted) or (is_nan is not False and same_bits(got.masked_fill(is_nan, 0), wanted.masked_fill(is_nan, 0)))


def check_case(world, case):
    """One call; what is wrong with what it left on this rank, or nothing."""
    collective, rank, size = COLLECTIVES[case.collective], world.rank, world.size
    brought = [[values(case, shape, frm, k) for k, shape in enumerate(shapes)] for frm, shapes in enumerate(collective.brings(case, size))]
    expected = collective.gives(brought, case, [[*range(size)]])[rank] or []
    here = [x.to(world.device, copy=True) for x in brought[rank]]
    outs = here if collective.in_place else [torch.zeros_like(x, device=world.device) for x in expected]
    begin(case, world._process_group, [] if collective.in_place else here, outs).wait()
    if all(is_same(got.cpu(), wanted) for got, wanted in zip(outs, expected)):
        return []
    return [f"rank {rank}: {case}: {outs} instead of {expected}"]


def every_collective(world):
    """Each with several dtypes; where values are combined, with every operation."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.uint16, torch.bool,
              torch.complex64)
    pairs = [(dtype, op) for op in OPS for dtype in dtypes if has_meaning(op, dtype)]
    cases = [Case(name, dtype, op, (5, 3), uneven=n % 2 == 0, root=n, how="at once" if n % 3 else "wait", seed=n)
             for n, (name, collective) in enumerate(COLLECTIVES.items())
             for dtype, op in (pairs if collective.reduces else [(dtype, "sum") for dtype in dtypes])]
    large = [Case(name, torch.float32, "sum", (400_003,), seed=n) for n, name in enumerate(COLLECTIVES)]
    return [wrong for case in cases + large for wrong in check_case(world, case)], carrier(world)


def sums_of_large_tensors(world):
    """All-reduces of more than two slots: in a buffer of the group, and elsewhere; whole numbers, so that sums are exact."""
    wrong, n, total = [], 20_000_003, sum(range(1, world.size + 1))
    expected = (torch.arange(n, device=world.device) % 1000).float() * total
    for x in (world.buffer(n), torch.empty(n, device=world.device)):
        for turn in range(3):
            x.copy_(expected).mul_((world.rank + 1) / total).round_()
            world.all_reduce(x, async_op=bool(turn)) if not turn else world.all_reduce(x, async_op=True).wait()
            wrong += [(turn, (x != expected).sum().item())] if not x.equal(expected) else []
    return wrong


def sums_beside_other_work(world):
    """Many sums on their way while the same stream goes on computing, and reads each only after its wait."""
    device, wrong = world.device, []
    for turn in range(20):
        parts = [torch.full((100_000 + 1000 * k,), float(world.rank + k), device=device) for k in range(8)]
        pending = [world.all_reduce(x, async_op=True) for x in parts]
        busy = torch.ones(512, 512, device=device)
        for _ in range(20):
            busy = (busy @ busy).clamp_(max=1)
        for k, handle in enumerate(pending):
            expected = float(sum(range(world.size)) + k * world.size)
            handle.wait().mul_(2)
            wrong += [] if parts[k].eq(2 * expected).all() else [(turn, k)]
        del parts
    return wrong


def messages_around_a_ring(world):
    """Everybody receives before he sends; several tags and lengths."""
    right, left, group = (world.rank + 1) % world.size, (world.rank - 1) % world.size, world._process_group
    wrong = []
    for n in (1, 1000, 3_000_000):
        coming = [group.recv([torch.zeros(n, device=world.device)], left, tag) for tag in (1, 2)]
        for tag in (2, 1):
            group.send([torch.full((n,), float(10 * world.rank + tag), device=world.device)], right, tag).wait()
        for tag, work in zip((1, 2), coming):
            work.wait()
            wrong += [] if work.result()[0].eq(10 * left + tag).all() else [(n, tag)]
    return wrong


@pytest.mark.parametrize("ranks", RANKS)
def test_every_collective_between_ranks_that_share_a_gpu_gives_every_bit(ranks):
    for wrong, carried_by in on_one_gpu(ranks, every_collective):
        assert not wrong and carried_by == "DeviceGroup"


@pytest.mark.parametrize("body", [sums_of_large_tensors, sums_beside_other_work, messages_around_a_ring])
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_a_gpu_wait_for_each_other_there_and_nowhere_too_short(ranks, body):
    assert on_one_gpu(ranks, body) == [[]] * ranks


def torch_classes(port, world):
    """Losses with DDP and fully_shard, in two precisions, on our backend on this device and on gloo on the CPU."""
    return {(wrap.__name__, dtype): [on_backend(port, backend, partial(train, wrap, dtype, device=device), world)
                                     for backend, device in (("rankloom", world.device), ("gloo", torch.device("cpu")))]
            for wrap in (ddp, fsdp) for dtype in (torch.float64, torch.float32)}


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_s_ddp_and_fully_shard_on_one_gpu_reach_gloo_s_losses(ranks):
    """In fp64 to what five steps make of last bits; fp32 multiplies in TF32 or not, sums with AVG, and is compared coarsely."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for told in on_one_gpu(ranks, partial(torch_classes, store.port)):
        for (_, dtype), (ours, gloos) in told.items():
            assert ours == pytest.approx(gloos, rel=1e-9 if dtype == torch.float64 else 1e-3)
            assert ours[-1] < ours[0]


def train_with_the_engine(world):
    """Five steps of data parallel; losses and parameters."""
    engine = rl.prepare(make_model(), loss=loss_sum, optimizer=adamw, world=world, accumulate=2, clip=1.0)
    losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_batches()]
    return losses, {name: x.cpu() for name, x in engine.full_state_dict()["model"].items()}


@pytest.mark.parametrize("ranks", RANKS)
def test_data_parallel_on_one_gpu_equals_one_process(ranks):
    truth = train_plainly(clip=1.0)
    for losses, params in on_one_gpu(ranks, train_with_the_engine):
        assert losses == pytest.approx(truth["losses"], rel=1e-12)
        for name, expected in truth["params"].items():
            torch.testing.assert_close(params[name], expected, rtol=1e-11, atol=1e-12)


LAYOUTS = {rl.Mesh(pipe=2, shard=2, tensor=2): 3, rl.Mesh(expert=4, tensor=2): 0}   # the mesh, and its stage
BF16 = 2.0**-8   # one rounding of the loss itself: layouts round partial sums, one rank whole ones


def train_a_layout(world, mesh=None):
    """Losses of eight steps in bf16 on this layout; with another mesh, the model of that one, on this rank alone."""
    mesh = mesh or world.mesh
    moe = MoEConfig(experts=8, top_k=2, ffn=64) if mesh.expert > 1 else None
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(preset("1M", vocab_size=256, seq_len=64, moe=moe)), loss=language_model_loss, world=world, precision="bf16",
                        stage=LAYOUTS.get(world.mesh, 0), clip=1.0, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), **pipe)
    text = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(0)).tensor_split(engine.group.size)[engine.group.rank]
    return [engine.step((text[:, :-1].contiguous(), text[:, 1:].contiguous())).loss for _ in range(8)]


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_a_layout_of_eight_ranks_on_one_gpu_has_the_losses_of_one(world, mesh):
    expected = train_a_layout(world, mesh)
    assert expected[-1] < 0.95 * expected[0]
    for losses in on_one_gpu(mesh, train_a_layout):
        assert losses == pytest.approx(expected, rel=BF16)


def lose_a_rank(folder, world):
    """Rank 1 is killed with work on its way; how long the others took to find out, in a file for each."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)   # their parent ends them at once; it is patient for a few seconds
    x = torch.ones(10_000_000, device=world.device)
    for _ in range(5):
        world.all_reduce(x)
    if world.rank == 1:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            world.all_reduce(x)
            x.sum().item()
    except RankLost as error:
        took = time.time() - float((folder / "killed").read_text())
        (folder / f"rank {world.rank}").write_text(f"{took} {error}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_killed_on_a_shared_gpu_is_named_within_seconds(ranks, tmp_path):
    with pytest.raises(RankFailed, match="rank 1"):
        on_one_gpu(ranks, partial(lose_a_rank, tmp_path))
    for rank in set(range(ranks)) - {1}:
        took, said = (tmp_path / f"rank {rank}").read_text().split(maxsplit=1)
        assert float(took) < 3 and "rank 1" in said
