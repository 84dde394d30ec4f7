"""torch's own classes and functions on `init_process_group("rankloom")`, in real processes, beside the same on gloo.

With two ranks a sum has one order only, so everything must equal gloo's to the last bit. With more, gloo adds in another
order: models are in fp64 there, and losses may differ by what five steps make of a last bit, 1e-12.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import rankloom.transport  # noqa: F401  (registers the backend, also where rankloom is not installed)
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

STEPS, ROWS, SEQ, VOCAB = 5, 2, 32, 256
_GROUPS = itertools.count()   # counts alike on all ranks


# ---------------------------------------------------------------- training


def ddp(model, world, **options):
    return DistributedDataParallel(model, bucket_cap_mb=1, **options)


def ddp_in_fp16_on_the_way(model, world):
    wrapped = ddp(model, world)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def fsdp(model, world, mesh=None, **options):
    mesh = mesh or init_device_mesh(next(model.parameters()).device.type, (world.size,))   # torch itself would take a GPU's
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(model, world):
    return fsdp(model, world, init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")))


WRAPPINGS = {
    "DDP": ddp,
    "DDP, a static graph, gradients as views of buckets": partial(ddp, static_graph=True, gradient_as_bucket_view=True),
    "DDP, looking for unused parameters": partial(ddp, find_unused_parameters=True),
    "DDP, fp16 on the way": ddp_in_fp16_on_the_way,
    "FSDP2": fsdp,
    "FSDP2, parameters kept after forward": partial(fsdp, reshard_after_forward=False),
    "FSDP2, bf16": partial(fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
}


def train(wrap, dtype, world, device="cpu"):
    """Five steps of a GPT; the losses of this rank."""
    model = wrap(GPT(preset("1M", vocab_size=VOCAB, seq_len=SEQ, layers=2), seed=0).to(device, dtype), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(world.rank)).to(device)
    losses = []
    for _ in range(STEPS):
        total, count = language_model_loss(model, (rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


def on_backend(port, backend, body, world):
    """`body(world)` inside a default group on `backend`."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    store = dist.PrefixStore(f"{backend} {next(_GROUPS)}", dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    try:
        return body(world)
    finally:
        dist.destroy_process_group()


def train_all(names, dtype, world):
    return {name: train(WRAPPINGS[name], dtype, world) for name in names}


def uneven(world):
    """DDP on ranks with unequal numbers of batches, of which those that are still at work count."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double())
    rows = torch.linspace(-1, 1 + world.rank, 32, dtype=torch.float64).view(4, 8)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + world.rank):
            model.zero_grad()
            model(rows * (1 + step)).square().sum().backward()
    return [param.grad.tolist() for param in model.parameters()]


def compiled(world):
    """What compiled functions that call torch.distributed return."""
    def calls(x):
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.barrier()
        return x + 1

    def messages(x):
        dist.send(x, 1) if world.rank == 0 else dist.recv(x, 0)
        return x + 1

    told = [torch.compile(function, backend="eager")(torch.arange(4.0) + world.rank).tolist() for function in (messages, calls)]
    torch.manual_seed(0)
    model = torch.compile(DistributedDataParallel(torch.nn.Linear(4, 1)), backend="eager")
    for _ in range(2):   # the second forward begins with a broadcast
        model(torch.arange(4.0) + world.rank).sum().backward()
    return told + [param.grad.tolist() for param in model.parameters()]


# ---------------------------------------------------------------- torch.distributed's functions


def numbers(rank, n=4):
    return torch.arange(n) + 10 * rank


def each_call(world):
    """One call of each function of torch.distributed; what it leaves on this rank, by name."""
    rank, size = world.rank, world.size
    right, left, told = (rank + 1) % size, (rank - 1) % size, {}

    def note(name, *tensors):
        told[name] = [x.tolist() if isinstance(x, torch.Tensor) else x for x in tensors]

    dist.all_reduce(x := numbers(rank))
    note("all_reduce", x)
    work = dist.all_reduce(x := numbers(rank), dist.ReduceOp.MAX, async_op=True)
    note("all_reduce in the background", work.wait(), x)
    dist.all_reduce_coalesced(xs := [numbers(rank), numbers(rank, 2)])
    note("all_reduce_coalesced", *xs)
    dist.broadcast(x := numbers(rank), src=1)
    note("broadcast", x)
    dist.reduce(x := numbers(rank), dst=1)
    note("reduce", x if rank == 1 else None)
    dist.all_gather(xs := [torch.zeros(4, dtype=torch.int64) for _ in range(size)], numbers(rank))
    note("all_gather", *xs)
    dist.all_gather_into_tensor(x := torch.zeros(4 * size, dtype=torch.int64), numbers(rank))
    note("all_gather_into_tensor", x)
    dist.reduce_scatter(x := torch.zeros(4, dtype=torch.int64), [numbers(rank + other) for other in range(size)])
    note("reduce_scatter", x)
    dist.reduce_scatter_tensor(x := torch.zeros(2, dtype=torch.int64), numbers(rank, 2 * size))
    note("reduce_scatter_tensor", x)
    dist.all_to_all_single(x := torch.zeros(size, dtype=torch.int64), numbers(rank, size))
    note("all_to_all_single", x)
    dist.all_to_all_single(x := torch.zeros(rank * size, dtype=torch.int64), numbers(rank, sum(range(size))), [rank] * size, [*range(size)])
    note("all_to_all_single, uneven", x)
    dist.gather(numbers(rank), xs := [torch.zeros(4, dtype=torch.int64) for _ in range(size)] if rank == 0 else None)
    note("gather", *(xs or []))
    dist.scatter(x := torch.zeros(4, dtype=torch.int64), [numbers(other) for other in range(size)] if rank == 1 else None, src=1)
    note("scatter", x)
    incoming = dist.irecv(x := torch.zeros(4, dtype=torch.int64), left)
    dist.send(numbers(rank), right)
    note("send and irecv", incoming.wait() is not False, x)
    works = [dist.isend(numbers(rank), left, tag=3), dist.irecv(x := torch.zeros(4, dtype=torch.int64), tag=3)]   # from anyone
    note("from anyone", [work.wait() is not False for work in works], x)
    exchange = [dist.P2POp(dist.isend, numbers(rank), right), dist.P2POp(dist.irecv, x := torch.zeros(4, dtype=torch.int64), left)]
    note("batch_isend_irecv", [work.wait() is not False for work in dist.batch_isend_irecv(exchange)] and x)
    dist.all_gather_object(things := [None] * size, {"rank": rank})
    note("all_gather_object", *things)
    dist.broadcast_object_list(things := [("from", rank)], src=1)
    note("broadcast_object_list", *things)
    dist.gather_object(rank, things := [None] * size if rank == 0 else None)
    note("gather_object", things)
    dist.scatter_object_list(things := [None], [f"for {other}" for other in range(size)] if rank == 0 else None)
    note("scatter_object_list", *things)
    dist.barrier()
    note("barrier in the background", dist.barrier(async_op=True).wait())
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(x := numbers(rank))
        dist.all_reduce(y := numbers(rank, 2))
    works.wait()
    note("coalescing manager", x, y)
    return told


def groups_and_tensors(world):
    """Groups made from the default one, and what stands on them."""
    rank, told = world.rank, {}
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(x := numbers(rank), group=pair)
        told["new_group"] = x.tolist(), dist.get_rank(pair), dist.get_world_size(pair)
    subgroup, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    dist.all_reduce(x := numbers(rank), group=subgroup)
    told["new_subgroups"] = x.tolist()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(x := numbers(rank), group=mesh["b"].get_group())
    told["mesh"] = x.tolist()
    whole = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    told["DTensor"] = sharded.to_local().tolist(), sharded.full_tensor().tolist(), (sharded @ sharded.t()).full_tensor().tolist()
    partial_sum = DTensor.from_local(torch.ones(4) * rank, mesh, [Replicate(), Shard(0)]).sum()
    told["DTensor, a sum"] = partial_sum.full_tensor().item(), partial_sum.redistribute(mesh, [Replicate(), Replicate()]).to_local().item()
    dist.destroy_process_group(pair)
    return told


# ---------------------------------------------------------------- all of it: torch's classes are imported once, then ranks are forked


class Rank(NamedTuple):
    """Who a process is."""

    rank: int
    size: int


def begin(port, world):
    """Every way to name the backend, and split_group, which gloo does not have."""
    rank, size, sums = world.rank, world.size, []
    for at, name in enumerate(("rankloom", "cpu:rankloom", "cpu:rankloom,cuda:nccl")):
        store = dist.PrefixStore(f"begin {at}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group(name, store=store, rank=rank, world_size=size)
        dist.all_reduce(x := numbers(rank))
        half = dist.group.WORLD.split_group([0, 2], group_name=f"half {at}", device_types=None)   # as torch calls it
        if rank in (0, 2):
            half.allreduce([y := numbers(rank)]).wait()
            assert y.tolist() == (numbers(0) + numbers(2)).tolist() and half.size() == 2
            assert half.group_name == f"half {at}"
        sums.append(x.tolist())
        dist.destroy_process_group()
    return sums


BODIES = {   # by the number of ranks
    2: {"compiled": compiled, "training": partial(train_all, list(WRAPPINGS), torch.float32), "calls": each_call, "uneven": uneven},
    3: {"training": partial(train_all, ["DDP", "FSDP2"], torch.float64), "calls": each_call},
    4: {"training": partial(train, hybrid, torch.float64), "groups": groups_and_tensors},
}


def tell(port, world):
    """Everything on both backends in the same processes: the first is gone without a trace when the second comes."""
    told = {name: [on_backend(port, backend, body, world) for backend in ("rankloom", "gloo")]
            for name, body in BODIES[world.size].items()}
    return told | {"begin": begin(port, world) if world.size == 3 else None}


def fork_rank(port, world):
    """Start a rank; the file that it writes what it has to tell to."""
    file = tempfile.TemporaryFile("w+")   # noqa: SIM115
    if os.fork() == 0:
        torch.set_num_threads(1)
        json.dump(tell(port, world), file)
        file.flush()
        os._exit(0)
    return file


def main(ports):
    """Run the ranks of every world, and print what each has to tell."""
    worlds = {}
    for size, port in zip(BODIES, ports):
        files = [fork_rank(int(port), Rank(rank, size)) for rank in range(size)]
        for _ in files:
            os.wait()
        worlds[size] = [file.seek(0) or json.load(file) for file in files]
    print(json.dumps(worlds))   # noqa: T201


@pytest.fixture(scope="module")
def told():
    """What each rank of a world of 2, 3 and 4 has to tell of each body, on rankloom and on gloo."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in BODIES]
    command = [sys.executable, __file__, *(str(store.port) for store in stores)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return {int(size): ranks for size, ranks in json.loads(done.stdout.splitlines()[-1]).items()}   # gloo may have printed before


def test_with_two_ranks_ddp_and_fsdp2_reach_gloos_losses_to_the_last_bit(told):
    for rank in told[2]:
        ours, gloos = rank["training"]
        assert ours == gloos
        assert all(losses[-1] < losses[0] for losses in ours.values()), "and they learn"


@pytest.mark.parametrize("what", ["uneven", "compiled"])
def test_ddp_with_uneven_batches_and_compiled_calls_do_what_they_do_on_gloo(told, what):
    for rank in told[2]:
        ours, gloos = rank[what]
        assert ours == gloos and ours


def test_with_three_ranks_ddp_and_fsdp2_reach_gloos_losses(told):
    for rank in told[3]:
        ours, gloos = rank["training"]
        for name in ours:
            assert ours[name] == pytest.approx(gloos[name], rel=1e-12)


def test_hybrid_shards_on_a_mesh_of_groups_reach_gloos_losses(told):
    for rank in told[4]:
        ours, gloos = rank["training"]
        assert ours == pytest.approx(gloos, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_function_of_torch_distributed_does_what_it_does_on_gloo(told, ranks):
    for rank in told[ranks]:
        ours, gloos = rank["calls"]
        assert ours == gloos


def test_groups_meshes_and_dtensors_are_those_of_gloo(told):
    for rank in told[4]:
        ours, gloos = rank["groups"]
        assert ours == gloos


def test_the_backend_has_several_names_and_is_left_and_entered_again(told):
    for rank in told[3]:
        assert rank["begin"] == [sum(numbers(rank) for rank in range(3)).tolist()] * 3


def test_torch_knows_the_backend_without_an_import_and_a_program_may_end_in_its_group():
    """Through the entry point that torch reads when it is imported."""
    program = ("import torch, torch.distributed as dist; x = torch.ones(2);"
               "dist.init_process_group('rankloom', store=dist.HashStore(), rank=0, world_size=1);"
               "dist.all_reduce(x); print(x.tolist(), dist.get_backend())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[1.0, 1.0] rankloom\n", 0), done.stderr


@pytest.mark.parametrize("begin", ["dist.all_reduce(x, async_op=True)", "dist.group.WORLD.recv([x], 0, 0)"])
def test_a_program_may_end_while_a_future_calls_back(begin):
    """The last futures of DDP's backward may do so."""
    program = ("import threading, time, torch, torch.distributed as dist;"
               "x, go, began = torch.ones(2), threading.Event(), threading.Event();"
               "dist.init_process_group('rankloom', store=dist.HashStore(), rank=0, world_size=1);"
               f"dist.group.WORLD.send([torch.ones(2)], 0, 0); work = {begin}; work.stand_for([], [x], go.wait);"
               "future = work.get_future().then(lambda _: (began.set(), time.sleep(1), print('called back')));"
               "go.set(); began.wait(); print('the program ends', flush=True)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("the program ends\ncalled back\n", 0), done.stderr


def test_who_asks_where_the_compiler_is_does_not_hinder_it():
    program = ("import importlib.util, rankloom.transport, torch, torch.distributed as dist; importlib.util.find_spec('torch._dynamo');"
               "dist.init_process_group('rankloom', store=dist.HashStore(), rank=0, world_size=1);"
               "f = torch.compile(lambda x: (dist.all_reduce(x, async_op=True).wait(), x + 1)[1], backend='eager');"
               "print(f(torch.ones(2)).tolist())")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[2.0, 2.0]\n", 0), done.stderr


@pytest.mark.parametrize("imports", ["import rankloom.transport; import torch", "from rankloom import transport; import torch"])
def test_the_backend_may_be_imported_before_torch(imports):
    """torch, which it imports, loads the plug-in while it is being imported itself."""
    program = f"{imports}; import torch.distributed as dist; print('rankloom' in dist.Backend.backend_list)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


if __name__ == "__main__":
    main(sys.argv[1:])
