"""What cuda.py and cuda_driver.py ask of torch and of the driver, with both pretended in host memory, where all is done at once."""

import contextlib
import ctypes
import gc
import threading

import pytest
import torch
import torch.distributed as dist

from conformance.cases import COLLECTIVES, Case
from conformance.ranks import Ranks
from conformance.test_collectives import run_and_check
from patience import wait_until
from rankloom.base.errors import DeviceError
from rankloom.world.transport import cuda, cuda_driver, rounds
from rankloom.world.transport.cuda import CudaDevice
from rankloom.world.transport.device import RELEASED
from rankloom.world.transport.device_group import DeviceGroup

PRIMARY, GONE, ILLEGAL = 77, 4, 700
FSDP2 = -1   # the priority of the streams in which it communicates


class Driver:
    """libcuda on host memory. A handle is an address."""

    def __init__(self):
        self.log, self.memory, self.room, self.refused = [], [], 1 << 30, {}
        self.contexts, self.captures = threading.local(), False

    def __getattr__(self, name):
        work = getattr(self, "do_" + name)

        def call(*args):
            self.log.append(name)
            if name in self.refused:
                return self.refused[name]
            if name.startswith(("cuMem", "cuIpc", "cuStream")):
                assert getattr(self.contexts, "stack", [])[-1:] == [PRIMARY], f"{name} needs a context, and this thread has none"
            return work(*args) or 0

        return call

    def do_cuGetErrorString(self, code, text):
        text._obj.value = f"text of {code}".encode()

    def do_cuDeviceGet(self, number, ordinal):
        number._obj.value = ordinal + 10

    def do_cuDevicePrimaryCtxRetain(self, context, number):
        assert number.value == 10
        context._obj.value = PRIMARY

    def do_cuCtxPushCurrent_v2(self, context):
        self.contexts.stack = [*getattr(self.contexts, "stack", []), context.value]

    def do_cuCtxPopCurrent_v2(self, context):
        self.contexts.stack.pop()

    def do_cuMemAlloc_v2(self, address, nbytes):
        if nbytes > self.room:
            return cuda_driver.OUT_OF_MEMORY
        self.memory.append(torch.full((nbytes,), 255, dtype=torch.uint8))   # not cleared
        address._obj.value = self.memory[-1].data_ptr()
        return 0

    def do_cuIpcGetMemHandle(self, handle, address):
        ctypes.memmove(ctypes.addressof(handle._obj), address.value.to_bytes(64, "little"), 64)

    def do_cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert flags == 1
        address._obj.value = int.from_bytes(bytes(handle), "little")

    def do_cuStreamWriteValue64_v2(self, stream, address, value, flags):
        assert stream and not flags
        ctypes.c_uint64.from_address(address).value = value

    def do_cuStreamWaitValue64_v2(self, stream, address, value, flags):
        wait_until(lambda: ctypes.c_uint64.from_address(address).value >= value)


class Stream:
    def __init__(self, device=None, priority=0):
        self.cuda_stream, self.priority, self.waited = id(self), priority, []

    def wait_event(self, event):
        self.waited.append(event.stream)

    def record_event(self):
        return Event(self)

    def synchronize(self):
        pass


class Event:
    def __init__(self, stream):
        self.stream = stream

    def query(self):
        return True


@pytest.fixture
def driver(monkeypatch):
    """Everything pretended; torch's "cuda:0" is the CPU."""
    pretended, current = Driver(), threading.local()

    @contextlib.contextmanager
    def stream(new):
        before, current.stream = current_stream(), new
        yield
        current.stream = before

    def current_stream(device=None):
        current.stream = getattr(current, "stream", None) or Stream()
        return current.stream

    def as_tensor(span, device):
        told = span.__cuda_array_interface__
        (nbytes,), (address, read_only) = told["shape"], told["data"]
        assert told["typestr"] == "|u1" and told["strides"] is None and not read_only
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        held.span = span   # as torch does
        return torch.frombuffer(held, dtype=torch.uint8)

    for name, pretend in {"Stream": Stream, "stream": stream, "current_stream": current_stream, "empty_cache": lambda: None,
                          "is_current_stream_capturing": lambda: pretended.captures,
                          "synchronize": lambda device: pretended.log.append("synchronize")}.items():
        monkeypatch.setattr(torch.cuda, name, pretend)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(cuda_driver, "_library", lambda: pretended)
    monkeypatch.setattr(cuda_driver, "_idle", cuda_driver.defaultdict(list))
    monkeypatch.setattr(cuda_driver, "_opened", {})
    cuda_driver._context.cache_clear()
    yield pretended
    gc.collect()
    cuda_driver._context.cache_clear()


def make_device():
    return CudaDevice(torch.device("cpu", 0))


def on_first_device(call):
    return lambda index, *args: call(0, *args)


class CudaRanks(Ranks):
    def group(self, members):
        made = []
        for host in super().group(members):
            device = make_device()
            device.device, device.keep = torch.device("cpu"), lambda tensors: None   # torch knows no streams of the CPU
            made.append(DeviceGroup(host, device))
        return made


def test_the_handle_of_an_allocation_travels_by_value_and_opens_once(driver):
    block, is_used = cuda_driver.take_block(0, 5)
    assert (block.nbytes, is_used, len(block.handle)) == (cuda_driver.UNIT, False, 128)
    assert cuda_driver.open_block(0, block.handle) == cuda_driver.open_block(0, block.handle) == block.address
    assert driver.log.count("cuIpcOpenMemHandle_v2") == 1
    assert driver.contexts.stack == [], "every context that was pushed is popped"


def test_memory_that_was_given_back_is_used_again_and_never_freed(driver):
    first, _ = cuda_driver.take_block(0, 7 << 20)
    other, _ = cuda_driver.take_block(0, 7 << 20)
    assert first.address != other.address
    cuda_driver.give_back(first)
    assert cuda_driver.take_block(0, 100)[0] != first, "twice as much as is asked for, at most"
    assert cuda_driver.take_block(0, 5 << 20) == (first, True)
    assert cuda_driver.take_block(0, 5 << 20)[1] is False
    assert not any("Free" in name or "Close" in name for name in driver.log)


def test_too_much_memory_and_other_refusals_have_words(driver):
    with pytest.raises(MemoryError, match="4,294,967,296 bytes of device memory were asked for"):
        cuda_driver.take_block(0, 1 << 32)
    driver.refused["cuStreamWriteValue64_v2"] = ILLEGAL
    with pytest.raises(DeviceError, match="the CUDA driver refused cuStreamWriteValue64_v2: text of 700 \\(error 700\\)"):
        cuda_driver.write_value(1, 8, 1)
    driver.refused["cuIpcGetMemHandle"] = GONE
    with pytest.raises(DeviceError, match="error 4"):
        cuda_driver.take_block(0, 1)
    assert driver.contexts.stack == []


def test_torch_gives_up_what_it_holds_before_memory_is_refused(driver, monkeypatch):
    driver.room = 1000
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(driver, "room", 1 << 30))
    memory, _ = make_device().export(300)
    assert len(memory) == 300 and not memory.any()
    driver.room = 1000
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(MemoryError):
        make_device().export(5 << 20)


def test_exported_memory_is_zeros_for_all_before_its_handle_is_known_also_when_it_was_used(driver):
    device = make_device()
    memory, handle = device.export(1000)
    memory.fill_(7)
    device.give_back(handle)
    driver.log.clear()
    again, same = device.export(900)
    assert same == handle and not again.any()
    assert driver.log == ["synchronize", "synchronize"], "what was submitted before is over first, and the zeros are there then"
    assert device.open(handle, 900).data_ptr() == again.data_ptr()


def test_memory_that_is_lent_tells_when_its_last_view_is_gone(driver):
    device, ended = make_device(), []
    memory, _ = device.export(1000)
    lent = device.lend(memory, lambda: ended.append(True))
    view = lent[10:20]
    del lent
    gc.collect()
    assert not ended
    del view
    gc.collect()
    assert ended == [True]


def test_the_stream_of_a_group_waits_for_the_caller_and_the_caller_only_when_he_says_so(driver):
    device, caller = make_device(), torch.cuda.current_stream()
    with device.behind(device.caller()):
        assert torch.cuda.current_stream() is device._stream
        ending = device.end()
    assert torch.cuda.current_stream() is caller
    assert device._stream.waited == [caller] and caller.waited == []
    ending.wait()
    assert caller.waited == [device._stream] and ending.is_done()


def test_a_call_that_is_captured_in_a_graph_is_refused(driver):
    """Replayed, it would write and follow the marks of a call long past."""
    device, driver.captures = make_device(), True
    with pytest.raises(DeviceError, match="cannot communicate in a CUDA graph"):
        device.caller()


def test_a_released_flag_is_written_in_a_stream_of_its_own(driver):
    device = make_device()
    flag = torch.zeros(1, dtype=torch.int64)
    device.release(flag)
    assert flag.item() == RELEASED
    assert device._rescue.priority < FSDP2 < device._stream.priority, "the others wait, and streams of one priority may share a queue"
    assert 0 < RELEASED < 2**63, "the driver compares signed numbers"


def test_a_thread_that_has_never_used_cuda_can_release_a_flag(driver):
    device, flag = make_device(), torch.zeros(1, dtype=torch.int64)
    watcher = threading.Thread(target=device.release, args=(flag,))
    watcher.start()
    watcher.join()
    assert flag.item() == RELEASED


@pytest.fixture
def first_device(monkeypatch):
    """The device of these ranks has no number."""
    for name in ("take_block", "open_block", "on_device"):
        monkeypatch.setattr(cuda, name, on_first_device(getattr(cuda_driver, name)))


def test_what_is_received_is_written_behind_who_asked_for_it_in_whatever_stream_it_is_waited_for(driver, first_device):
    """What was submitted before the receive may still read or write that memory."""
    ranks, kept = CudaRanks(2), []
    asking, (sender, receiver) = Stream(), ranks.groups
    receiver._device.keep = kept.extend
    with torch.cuda.stream(asking):
        coming = receiver.recv([x := torch.zeros(3)], 0)
    sender.send([torch.ones(3)], 1).wait()
    receiver._device._stream.waited.clear()
    coming.wait()
    assert x.tolist() == [1.0] * 3 and receiver._device._stream.waited == [asking]
    assert any(each is x for each in kept), "nobody may ever wait"
    ranks.close()


def test_a_collective_sets_the_context_of_the_thread_once(driver, first_device):
    ranks, x = CudaRanks(2), [torch.ones(3), torch.ones(3)]
    for _ in range(2):
        driver.log.clear()
        ranks.run(lambda rank: ranks.groups[rank].allreduce([x[rank]]).wait())
    assert [driver.log.count(name) for name in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamWriteValue64_v2")] == [2, 2, 2]
    ranks.close()


def test_the_caller_waits_once_for_a_call_that_is_to_end_at_once(driver, first_device):
    """Whoever made it waits for its work, too."""
    def body(rank):
        caller, options = torch.cuda.current_stream(), dist.AllreduceOptions()
        options.asyncOp = False
        work = ranks.groups[rank].allreduce([torch.ones(3)], options)
        waited = [*caller.waited]
        work.wait()
        later = ranks.groups[rank].allreduce([torch.ones(3)])
        assert caller.waited == waited == [ranks.groups[rank]._device._stream]
        later.wait()
        return len(caller.waited)

    ranks = CudaRanks(2)
    assert ranks.run(body) == [2, 2]
    ranks.close()


def test_torch_is_asked_for_the_current_stream_by_the_number_of_the_device(driver, monkeypatch):
    """For a device, it first finds the number, which takes longer than all the rest."""
    device, current, asked = make_device(), torch.cuda.current_stream, []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or current())
    device.caller()
    device.end().wait()
    assert asked == [0, 0]


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_runs_on_it(driver, first_device, monkeypatch, size):
    monkeypatch.setattr(rounds, "SLOT", 8192)
    monkeypatch.setattr(rounds, "IN_SHARES", 1024)
    ranks = CudaRanks(size)
    run_and_check(ranks, [Case(name, dtype, "sum", shape, into=into, how=how, seed=n) for n, name in enumerate(COLLECTIVES)
                          for dtype in (torch.float32, torch.bfloat16) for shape in ((5, 3), (3000,))
                          for into in ("plain", "shared", "gaps") for how in ("at once", "wait", "poll")])
    ranks.close()


CALLS = {"broadcast": lambda group, rank, x: group.broadcast([x]).wait(), "all_reduce": lambda group, rank, x: group.allreduce([x]).wait(),
         "all_gather": lambda group, rank, x: group._allgather_base(x, x[:16].clone()).wait(),
         "message": lambda group, rank, x: (group.recv if rank else group.send)([x], 1 - rank).wait()}


@pytest.mark.parametrize("name", CALLS)
def test_what_was_called_in_inference_mode_can_be_called_in_training(driver, first_device, name):
    ranks = CudaRanks(2)
    given = [torch.ones(32), torch.ones(32)]

    def evaluate_and_train(rank):
        with torch.inference_mode():
            CALLS[name](ranks.groups[rank], rank, given[rank])
        CALLS[name](ranks.groups[rank], rank, given[rank].add_(1))
        return given[rank].is_inference()

    assert ranks.run(evaluate_and_train) == [False, False]
    ranks.close()


def test_a_message_to_oneself_opens_no_memory_that_this_process_has_exported(driver, first_device):
    ranks = CudaRanks(2)
    opened = driver.log.count("cuIpcOpenMemHandle_v2")

    def body(rank):
        group, x, y = ranks.groups[rank], torch.full((3,), 5.0 + rank), torch.zeros(3)
        coming = group.recv([y], rank)
        group.send([x], rank).wait()
        coming.wait()
        return y.tolist()

    assert ranks.run(body) == [[5.0] * 3, [6.0] * 3]
    assert driver.log.count("cuIpcOpenMemHandle_v2") == opened
    ranks.close()
