"""The order of copies between a GPU and its host, on streams that only note what they have waited for."""

import weakref
from types import SimpleNamespace

import pytest
import torch

import streams
from rankloom.shard import offload
from rankloom.shard.offload import UNDER_WAY, Host
from streams import ENDED, NOW

GPU = SimpleNamespace(type="cuda")


class Memory:
    """A tensor whose copy is work of a name."""

    def __init__(self, name):
        self.name = name

    def copy_(self, other, non_blocking):
        assert non_blocking
        NOW[-1].known.add(self.name)


@pytest.fixture
def main(monkeypatch):
    """The stream that computes."""
    return streams.pretend(monkeypatch)


def test_slices_come_in_while_gradients_go_out_and_the_computation_waits_for_neither(main):
    host, begun = Host(GPU), []

    def gather():
        begun.append(set(NOW[-1].known))
        NOW[-1].known.add("slice")
        return SimpleNamespace(wait=lambda: main.known.add("gather"))

    main.known.add("backward of 3")
    host.store(Memory("gradient of 3"), Memory("on the device"))
    arrive = host.beside(gather)
    assert begun == [{"backward of 3"}]   # it may write where that has read; but it needs nobody's gradient
    assert main.known == {"backward of 3"}
    arrive()
    assert main.known == {"backward of 3", "slice", "gather"}
    host.wait()
    assert {"backward of 3", "gradient of 3"} in ENDED, "a gradient leaves when it is there"


def test_few_gradients_wait_on_the_device_for_their_way_out(main):
    host = Host(GPU)
    for number in range(UNDER_WAY + 1):
        assert not ENDED
        host.store(Memory(f"gradient of {number}"), Memory("on the device"))
    assert len(ENDED) == 1 and "gradient of 0" in ENDED[0]


def test_the_optimizer_changes_no_slice_that_is_still_being_read(main):
    host = Host(GPU)
    host.beside(lambda: NOW[-1].known.add("slice") or SimpleNamespace(wait=lambda: None))
    gradient = Memory("on the device")
    host.store(Memory("gradient"), gradient)
    host.wait()
    assert set().union(*ENDED) == {"slice", "gradient"}
    is_there = weakref.ref(gradient)
    del gradient
    assert is_there() is None, "once it has been copied, its memory is free"


def test_what_is_large_is_pinned_to_the_byte_and_what_is_small_by_torch(monkeypatch):
    """torch's own pinned memory comes in powers of two."""
    pinned = {}
    runtime = SimpleNamespace(cudaHostRegister=lambda at, size, flags: pinned.update({at: size}) or 0, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: pytest.fail("no") if code else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = offload._pinned(offload.OWN_PAGES // 4 + 3, torch.float32)
    assert pinned == {made.data_ptr(): made.nbytes} and made.nbytes == offload.OWN_PAGES + 12 and not made.any()
    parameter = torch.nn.Parameter(made)
    del made
    assert pinned, "who has a view has the memory"
    del parameter
    assert not pinned, "it is given back when nobody has any of it"


def test_scratch_memory_has_the_dtype_and_the_size_that_are_asked_for():
    host = Host(torch.device("cpu"))
    for n, dtype in ((4, torch.float32), (2, torch.float32), (4, torch.bfloat16), (8, torch.bfloat16)):
        scratch = host.scratch(n, dtype)
        assert scratch.dtype == dtype and scratch.shape == (n,)
