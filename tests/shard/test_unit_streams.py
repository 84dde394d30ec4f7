"""Units in several streams of a GPU, on streams that only note what they have waited for: who reads what is gathered waits for it."""

import pytest
import torch
from torch import nn

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
