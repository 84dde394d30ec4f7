"""Units in several streams of a GPU, on streams that only note what they have waited for: who reads what is gathered waits for it, and
nobody is given memory that is still read."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.shard.flat import FlatBuffer, move_into
from rankloom.shard.unit import Formats, State, Unit
from rankloom.world.handle import Handle
from rankloom.world.paper import PaperGroup
from streams import Stream, pretend, queue, stream

FP32 = Formats(torch.float32, torch.float32, torch.float32)


class OnGpu(PaperGroup):
    """The first of two ranks on paper. Once it says that it has a GPU, its gathers are work of a stream."""

    def all_gather(self, x, *, out=None, label="", async_op=False):
        return Handle(self, label, [self], lambda: out)

    def wait(self):
        queue("the gather")


@pytest.fixture
def unit():
    """A unit that stays in memory, between an update and the gather."""
    made = Unit("u", {"w": nn.Parameter(torch.empty(4, device="meta"))}, OnGpu(0, range(2)), FP32, keep=True)
    made.group.device = torch.device("cuda")
    return made


def test_when_another_stream_reads_parameters_first_that_of_the_step_waits_for_them_too(unit, monkeypatch):
    """As where an average of parameters is kept beside the next forward."""
    main, side = pretend(monkeypatch), Stream()
    side.known.add("an earlier copy")
    unit.start_gather()
    assert main.known == set()
    with stream(side):
        unit.params["w"] + 1
    assert unit.state is State.GATHERED and "the gather" in side.known
    assert main.known == {"the gather"}, "it waits, and for nothing else"


def test_where_one_stream_starts_a_gather_and_reads_it_waits_once(unit, monkeypatch):
    main, waits = pretend(monkeypatch), []
    monkeypatch.setattr(unit.group, "wait", lambda: waits.append(1))
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: pytest.fail("a second wait"))
    unit.start_gather()
    unit.wait()
    assert waits == [1] and main.known == set()


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("taken_by", ["a flat buffer", "a unit"])
def test_memory_that_a_parameter_leaves_is_kept_until_the_stream_that_copies_it_has_done_so(taken_by, on_gpu, monkeypatch):
    main, kept = pretend(monkeypatch), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: kept.append((x.data_ptr(), stream)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu, raising=False)
    params = {"w": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(3))}
    old = [(param.data_ptr(), main) for param in params.values()]
    alive = [param.data for param in params.values()]   # or their memory would be given to others here, too
    if taken_by == "a unit":
        Unit("u", params, rl.Group(None), FP32)
    else:
        move_into(FlatBuffer(params), params)
    assert kept == (old if on_gpu else [])
    assert alive[0].data_ptr() != params["w"].data_ptr()
