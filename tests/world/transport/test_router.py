"""Which group carries a call, decided by where its tensors lie. CUDA is pretended: tensors stay in host memory."""

import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from conformance.cases import COLLECTIVES, Case
from conformance.ranks import Ranks, seconds
from conformance.test_collectives import run_and_check
from patience import AT_ONCE
from rankloom.base.errors import RankLost, ShapeMismatch
from rankloom.comm.subgroup import Subgroup
from rankloom.world import connect
from rankloom.world.transport import backend, router
from rankloom.world.transport.device_group import DeviceGroup
from rankloom.world.transport.nccl import Nccl
from rankloom.world.transport.router import HOST, NCCL, ONE_GPU, DeviceRouter, GpuPlace, choose_carrier
from rankloom.world.transport.through_host import ThroughHost
from world.transport.twin import Twin

GPU = torch.device("cuda", 0)
backend.register()   # also where rankloom is not installed


class Routed(DeviceRouter):
    """A router that takes all tensors for ones on a device, and notes what it was asked for."""

    def __init__(self, cpu, timeout, kind):
        super().__init__(cpu, timeout)
        self.asked = Counter()
        self.on_device = DeviceGroup(cpu, Twin()) if kind == ONE_GPU else ThroughHost(cpu)

    def _for(self, tensors, ranks=()):
        self.asked[tuple(ranks)] += 1
        return self.on_device


class RoutedRanks(Ranks):
    def __init__(self, size, kind):
        self.kind = kind
        super().__init__(size)

    def group(self, members):
        return [Routed(cpu, 20.0, self.kind) for cpu in super().group(members)]

    def _arena(self, group):
        return super()._arena(group.cpu)


@pytest.fixture(scope="module", params=[ONE_GPU, HOST])
def routed(request):
    made = RoutedRanks(3, request.param)
    yield made
    made.close()


def test_both_forms_of_a_call_are_carried(routed):
    def body(rank):
        group, x = routed.groups[rank], torch.full((2,), float(rank))
        group.allreduce(x, op=dist.ReduceOp.MAX).wait()
        highest = x.tolist()
        group.broadcast(x.fill_(rank), root=1).wait()
        everyone = [torch.zeros(2) for _ in range(3)]
        group.allgather(everyone, x + rank).wait()
        group.barrier(timeout=seconds(60)).wait()
        return highest, x.tolist(), [y[0].item() for y in everyone]

    assert routed.run(body) == [([2.0, 2.0], [1.0, 1.0], [1.0, 2.0, 3.0])] * 3


# ---------------------------------------------------------------- the choice


PIDS = itertools.count(1)


def place(host="a", gpu="0", pid=None):
    return GpuPlace(host, gpu, next(PIDS) if pid is None else pid)


@pytest.mark.parametrize("nccl_is_there", [True, False])
def test_the_carrier_is_chosen_by_who_shares_a_gpu(monkeypatch, nccl_is_there):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl_is_there)
    nccl = NCCL if nccl_is_there else HOST
    assert choose_carrier([place(), place(), place()]) == ONE_GPU
    assert choose_carrier([place()]) == ONE_GPU, "a rank alone needs nobody"
    assert choose_carrier([place(gpu="0"), place(gpu="1")]) == nccl
    assert choose_carrier([place("a"), place("b")]) == nccl, "GPUs of two hosts may have one name"
    assert choose_carrier([place(gpu="0"), place(gpu="0"), place(gpu="1")]) == HOST
    assert choose_carrier([place("a"), place("a"), place("b"), place("b")]) == HOST
    assert choose_carrier([place(pid=7), place(pid=7)]) == HOST, "threads of one process cannot map each other's memory"


def pretend_gpus(monkeypatch, gpu_of):
    """Each thread's GPU is what `gpu_of(rank)` says; ranks look like processes."""
    ranks = iter(range(100))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpu_of(next(ranks))))
    monkeypatch.setattr(router, "os", SimpleNamespace(getpid=lambda: next(PIDS)))
    monkeypatch.setattr(router, "CudaDevice", lambda device: Twin())
    monkeypatch.setattr(router, "Nccl", lambda *where: "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize("gpus, kind", [("aaa", DeviceGroup), ("abc", str), ("aab", ThroughHost)])
def test_ranks_tell_each_other_their_gpus_at_the_first_call_and_agree(monkeypatch, gpus, kind):
    plain = Ranks(3)   # before processes are pretended: they open each other's memory by process number
    routers = [DeviceRouter(group, 20.0) for group in plain.groups]
    pretend_gpus(monkeypatch, lambda rank: gpus[rank])
    carriers = plain.run(lambda rank: routers[rank].carrier(GPU))
    again = plain.run(lambda rank: routers[rank].carrier(torch.device("cuda")))
    monkeypatch.undo()
    assert all(isinstance(carrier, kind) for carrier in carriers)
    assert all(a is b for a, b in zip(carriers, again)), "made once"
    plain.close()


def test_a_carrier_that_is_known_is_not_chosen_again(monkeypatch):
    """Every call asks for it."""
    plain = Ranks(2)
    routers = [DeviceRouter(group, 20.0) for group in plain.groups]
    pretend_gpus(monkeypatch, lambda rank: "a")
    ask = lambda rank: (routers[rank].carrier(GPU), routers[rank].carrier(GPU, (0, 1)))
    chosen = plain.run(ask)
    for each in routers:
        monkeypatch.setattr(each, "_find", None)
    again = plain.run(ask)
    monkeypatch.undo()
    assert all(a is b for first, second in zip(chosen, again) for a, b in zip(first, second))
    plain.close()


@pytest.mark.parametrize("gpus, in_order", [("aaa", False), ("abc", True), ("aab", True)])
def test_messages_come_in_the_order_of_sending_where_nccl_carries_some_of_them(monkeypatch, gpus, in_order):
    plain = Ranks(3)
    groups = [rl.Group(DeviceRouter(group, 20.0), device=GPU) for group in plain.groups]
    pretend_gpus(monkeypatch, lambda rank: gpus[rank])
    told = plain.run(lambda rank: groups[rank].in_order)
    monkeypatch.undo()
    assert told == [in_order] * 3
    plain.close()


@pytest.mark.parametrize("gpus, in_order", [("aa", False), ("ab", True)])
def test_ranks_of_a_part_ask_each_other_only_how_their_messages_come(monkeypatch, gpus, in_order):
    """The third rank has told nobody which GPU it has."""
    plain = Ranks(3)
    groups = [rl.Group(DeviceRouter(group, 20.0), device=GPU) for group in plain.groups]
    pretend_gpus(monkeypatch, lambda rank: gpus[rank])
    told = plain.run(lambda rank: Subgroup(groups[rank], (0, 1)).in_order if rank < 2 else None)
    monkeypatch.undo()
    assert told == [in_order, in_order, None]
    plain.close()


class OneEnd(SimpleNamespace):
    """As an inspector: the tags with which messages are announced."""

    def announce(self, op, x, peer, tag):
        self.tags.append(tag)
        return []


@pytest.mark.parametrize("gpus, tag", [("aaa", 7), ("abb", 0), ("aab", 7)])
def test_in_debug_mode_a_message_is_announced_without_its_tag_where_nccl_carries_it_and_without_the_rank_that_it_does_not_concern(
        monkeypatch, gpus, tag):
    plain, ends = Ranks(3), [OneEnd(tags=[]) for _ in range(3)]
    groups = [rl.Group(DeviceRouter(cpu, AT_ONCE), device=GPU, inspector=end) for cpu, end in zip(plain.groups, ends)]
    pretend_gpus(monkeypatch, lambda rank: gpus[rank])
    plain.run(lambda rank: groups[rank]._announced("send", SimpleNamespace(device=GPU), 1 - rank, 7) if rank < 2 else None)
    plain.run(lambda rank: groups[rank]._announced("send", torch.zeros(1), 1 - rank, 8) if rank < 2 else None)
    monkeypatch.undo()
    assert [end.tags for end in ends] == [[tag, 8], [tag, 8], []], "gloo and shared memory, which carry CPU tensors, keep tags"
    plain.close()


def test_in_debug_mode_messages_of_the_cpu_keep_their_tags_beside_nccl(monkeypatch):
    served = SimpleNamespace(rank=lambda: 0, size=lambda: 2, _device_types=[GPU, torch.device("cpu")],
                             _get_backend=lambda device: SimpleNamespace(name=lambda: "nccl" if device.type == "cuda" else "gloo"))
    group = rl.Group(served, device=GPU, inspector=OneEnd(tags=[]))
    for x in (torch.zeros(1), SimpleNamespace(device=GPU)):
        group._announced("recv", x, 1, 7)
    assert group._inspector.tags == [7, 0]


def test_a_message_asks_only_where_its_two_ends_are(monkeypatch):
    plain = Ranks(3)
    routers = [DeviceRouter(group, 60.0) for group in plain.groups]
    pretend_gpus(monkeypatch, lambda rank: "a")
    pair = plain.run(lambda rank: routers[rank].carrier(GPU, (0, 1)) if rank < 2 else None)
    with monkeypatch.context() as short, pytest.raises(RankLost, match="rank\\(s\\) 2 did not join"):
        short.setattr(routers[0], "_timeout", 0.5)
        routers[0].carrier(GPU)
    trio = plain.run(lambda rank: routers[rank].carrier(GPU))
    monkeypatch.undo()
    assert isinstance(pair[0], DeviceGroup) and trio[:2] == pair[:2]
    plain.close()


class Counted:
    """A store that notes for which keys it is asked."""

    def __init__(self, store):
        self._store, self.awaited, self.read = store, [], []

    def wait(self, keys, *timeout):
        self.awaited += keys
        self._store.wait(keys, *timeout)

    def get(self, key):
        self.read.append(key)
        return self._store.get(key)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_collective_asks_once_where_all_are_and_one_rank_collects_it(monkeypatch):
    """If each rank waits for each, the store holds p^2 waits."""
    plain = Ranks(3)
    routers = [DeviceRouter(group, 60.0) for group in plain.groups]
    for asking in routers:
        asking._store = Counted(asking._store)
    pretend_gpus(monkeypatch, lambda rank: "aab"[rank])
    pair = plain.run(lambda rank: routers[rank].carrier(GPU, (0, 1)) if rank < 2 else None)   # rank 0 makes no collective until rank 2 has
    late = plain.run(lambda rank: routers[rank].carrier(GPU) if rank else None)
    all_of_them = plain.run(lambda rank: routers[rank].carrier(GPU))
    monkeypatch.undo()
    assert isinstance(pair[0], DeviceGroup) and isinstance(late[1], ThroughHost) and all_of_them[1:] == late[1:]
    assert [asking._store.awaited[-1] for asking in routers] == [asking._store.read[-1] for asking in routers] == ["places"] * 3
    assert len(routers[2]._store.awaited) == len(routers[2]._store.read) == 1
    assert len({tuple(asking._places.items()) for asking in routers}) == 1
    plain.close()


def test_a_message_to_itself_in_a_group_of_two_does_not_wait_for_the_other(monkeypatch):
    plain = Ranks(2)
    one = DeviceRouter(plain.groups[0], 1.0)
    pretend_gpus(monkeypatch, lambda rank: "a")
    one.carrier(GPU, (0, 0))
    monkeypatch.undo()
    plain.close()


def test_a_part_of_a_group_waits_on_its_device_too_for_as_long_as_it_was_told(monkeypatch):
    plain = Ranks(2)
    routers = [DeviceRouter(group, 20.0) for group in plain.groups]
    parts = plain.run(lambda rank: routers[rank].split_group([0, 1], seconds(0.5)))
    pretend_gpus(monkeypatch, lambda rank: "a")
    with pytest.raises(RankLost, match="rank\\(s\\) 1 did not join the group within 0.5 s"):
        parts[0].carrier(GPU)
    routers[0].set_timeout(seconds(0.4))
    with pytest.raises(RankLost, match="rank\\(s\\) 1 did not join the group within 0.4 s"):
        routers[0].carrier(GPU)
    monkeypatch.undo()
    for part in parts:
        part.abort()
    plain.close()


def test_whatever_carries_calls_is_told_of_a_new_time_out_of_an_abort_and_of_the_end():
    plain = Ranks(1)
    cpu = plain.groups[0]
    one, carriers = DeviceRouter(cpu, 20.0), [mock.create_autospec(kind, instance=True) for kind in (DeviceGroup, Nccl)]
    one._carriers = {ONE_GPU: carriers[0], NCCL: carriers[1], HOST: ThroughHost(cpu)}
    one.set_timeout(seconds(7))
    one.shutdown()
    carriers[0].finish.assert_called_once()
    carriers[1].shutdown.assert_called_once()
    assert cpu.channel.timeout == 7.0 and cpu.channel.closed
    one.abort()
    for carrier in carriers:
        carrier.set_timeout.assert_called_once_with(seconds(7))
        carrier.abort.assert_called_once()
    plain.close()


def test_a_barrier_for_a_device_waits_for_what_was_submitted_to_it(monkeypatch):
    plain, finished, options = Ranks(1), [], dist.BarrierOptions()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: finished.append(device)))
    options.device = GPU
    DeviceRouter(plain.groups[0], 20.0).barrier(options).wait()
    assert finished == [GPU]
    plain.close()


def test_a_rank_that_changes_its_device_is_refused(monkeypatch):
    plain = Ranks(1)
    one = DeviceRouter(plain.groups[0], 20.0)
    pretend_gpus(monkeypatch, lambda rank: "a")
    one.carrier(GPU)
    with pytest.raises(ShapeMismatch, match="a tensor on cuda:1, but this rank has used cuda:0 so far"):
        one.carrier(torch.device("cuda", 1))
    monkeypatch.undo()
    plain.close()


# ---------------------------------------------------------------- the way


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_finds_its_way_with_all_it_was_given(routed, name):
    run_and_check(routed, [Case(name, dtype, "sum", (4, 3), layout, into, how, late)
                           for layout, into in (("plain", "plain"), ("transposed", "gaps"), ("gaps", "transposed"))
                           for how, late in (("at once", False), ("wait", True), ("poll", False), ("future", False))
                           for dtype in (torch.float32, torch.int64)])
    assert all(group.asked[()] for group in routed.groups)


def test_messages_find_their_way_and_ask_for_their_two_ends(routed):
    def body(rank):
        group, right, left = routed.groups[rank], (rank + 1) % 3, (rank - 1) % 3
        group.asked.clear()
        coming = group.recv([x := torch.zeros(4)], left)
        group.send([torch.full((4,), float(rank))], right).wait()
        coming.wait()
        if rank == 0:
            group.recv_anysource([torch.zeros(1)], 9).wait()
        elif rank == 1:
            group.send([torch.ones(1)], 0, 9).wait()
        return x.tolist(), [*group.asked]

    told = routed.run(body)
    assert [x for x, _ in told] == [[float((rank - 1) % 3)] * 4 for rank in range(3)]
    assert all({(rank, (rank - 1) % 3), (rank, (rank + 1) % 3)} <= {*asked} for rank, (_, asked) in enumerate(told))
    assert () in told[0][1]


def test_what_has_ended_is_there_for_who_polls(routed):
    def body(rank):
        options = dist.AllreduceOptions()
        options.asyncOp = True
        work, late = routed.groups[rank].allreduce([x := torch.ones(4)], options), time.monotonic() + AT_ONCE
        while not work.is_completed() and time.monotonic() < late:
            time.sleep(1e-3)
        routed.groups[rank].monitored_barrier(seconds(10))
        return x.tolist()

    assert routed.run(body) == [[3.0] * 4] * 3


def test_what_is_only_sent_is_not_written_to(routed):
    """Elements of it may share a place, which nobody can write."""
    def body(rank):
        if rank == 0:
            routed.groups[0].send([torch.ones(1).expand(4)], 1, 5).wait()
        elif rank == 1:
            routed.groups[1].recv([x := torch.zeros(4)], 0, 5).wait()
            assert x.tolist() == [1.0] * 4

    routed.run(body)


def test_calls_between_the_marks_of_a_batch_are_waited_for_as_one(routed):
    def body(rank):
        group = routed.groups[rank]
        group._start_coalescing(GPU)
        right, left = (rank + 1) % 3, (rank - 1) % 3
        group.recv([x := torch.zeros(2)], left)
        group.send([torch.full((2,), float(rank))], right)
        group.allreduce([y := torch.ones(3)])
        group.recv_anysource([z := torch.zeros(1)], 9)
        group.send([torch.full((1,), float(rank))], right, 9)
        group.barrier()
        batch = group._end_coalescing(GPU)
        batch.wait()
        assert group._batch.close() == [] and len(batch._works) == 6
        return x.tolist(), y.tolist(), z.item()

    assert routed.run(body) == [([(rank - 1.0) % 3] * 2, [3.0] * 3, (rank - 1.0) % 3) for rank in range(3)]


def test_tensors_on_the_cpu_never_ask_for_a_device():
    plain = Ranks(2)
    routers = [DeviceRouter(group, 20.0) for group in plain.groups]

    def body(rank):
        group = routers[rank]
        group.allreduce([x := torch.ones(3)]).wait()
        group.allgather([[torch.zeros(1), torch.zeros(1)]], [torch.ones(1)]).wait()
        group.gather([[torch.zeros(1), torch.zeros(1)]] if rank == 0 else [], [torch.ones(1)]).wait()
        group.barrier().wait()
        assert group.buffer((4,)).tolist() == [0.0] * 4
        return x.tolist(), group._device, group.rank(), group.size(), group.name(), group._carriers

    assert plain.run(body) == [([2.0] * 3, None, rank, 2, "rankloom", {}) for rank in (0, 1)]
    plain.close()


def test_a_buffer_on_a_device_whose_memory_is_not_shared_is_a_tensor_of_its_own(monkeypatch):
    plain = Ranks(1)
    one = DeviceRouter(plain.groups[0], 20.0)
    monkeypatch.setattr(one, "carrier", lambda device: ThroughHost(plain.groups[0]))
    x = one.buffer(4, torch.float64, "meta")   # the only device besides the CPU that is everywhere
    assert x.shape == (4,) and x.dtype == torch.float64 and x.is_meta
    plain.close()


# ---------------------------------------------------------------- who gets one


@pytest.mark.parametrize("name", ["rankloom", "cpu:rankloom,cuda:nccl"])
@pytest.mark.parametrize("has_cuda", [False, True])
def test_torch_gets_a_router_where_there_is_cuda(monkeypatch, name, has_cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert isinstance(group, DeviceRouter) == has_cuda
        assert dist.get_backend_config().count("rankloom") == (2 if name == "rankloom" else 1)
        dist.all_reduce(x := torch.ones(3))
        dist.barrier()
        half = dist.new_group([0])
        dist.all_reduce(x, group=half)
        assert x.tolist() == [1.0] * 3 and isinstance(half, DeviceRouter) == has_cuda
        assert [device.type for device in group._device_types] == (["cpu", "cuda"] if has_cuda else ["cpu"])
        if has_cuda:
            assert not group._get_backend(GPU).supports_splitting, "torch asks when it is given a device_id"
            assert isinstance(group.split_group([0], group_name="part"), DeviceRouter)
    finally:
        dist.destroy_process_group()


def test_the_backend_is_registered_for_both_kinds_of_tensors():
    assert dist.Backend.backend_capability["rankloom"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl", "nobody else's default changes"


def test_a_world_on_gpus_takes_the_backend_where_ranks_share_one():
    resolve, cuda = connect.resolve_backend, torch.device("cuda", 0)
    assert resolve("auto", cuda, own_gpu=False) == "rankloom"
    assert resolve("auto", cuda, own_gpu=True) == "gloo", "gloo and NCCL serve that"
    assert resolve("auto", cuda, own_gpu=True, one_host=False) == "gloo"
    assert resolve("auto", cuda, own_gpu=False, one_host=False) == "rankloom", "gloo cannot carry messages of a GPU"
    assert resolve("rankloom", cuda, own_gpu=True) == "rankloom"
    assert resolve("gloo", cuda, own_gpu=False) == "gloo"
    assert resolve("auto", torch.device("cpu")) == "rankloom"
    assert resolve("auto", torch.device("cpu"), one_host=False) == "gloo", "over a network it must be asked for"
    assert resolve("rankloom", torch.device("cpu"), one_host=False) == "rankloom"


@pytest.mark.parametrize("gpus, own", [("abc", True), ("aab", False), ("a", True)])
def test_ranks_find_out_together_whether_each_has_a_gpu_of_its_own(monkeypatch, gpus, own):
    """However few a rank sees: Slurm may show each its own only. Between nodes such ranks communicated through their hosts."""
    store, size = dist.HashStore(), len(gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device.index]))

    with ThreadPoolExecutor(size) as threads:
        told = threads.map(lambda rank: connect.has_own_gpu(store, rank, size, torch.device("cuda", rank), 60.0), range(size))
        assert [*told] == [own] * size


def test_ranks_take_the_gpus_of_a_host_in_turns(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [connect.device_for("cuda", rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [device.index for device in chosen] == [0, 1, 0, 1, 0]
    assert connect.device_for("cpu", 3) == torch.device("cpu")
