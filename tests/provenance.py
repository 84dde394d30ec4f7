"""Proof by histories: which element of which rank has landed where, and how often.

Only rank s brings anything, and its element e is 8**e. All algorithms of `comm/` add and move, so what comes out is a sum
of such numbers, and its digits to the base 8 are counts. One run for each s makes the whole history, on the real code.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rankloom as rl

MOST = 20   # elements that 8**e fits into an int64 with


@dataclass
class Trace:
    """What one rank held in the end, and what it sent: for each element a Counter of (rank, element)."""

    held: list[Counter] = field(default_factory=list)
    sent: list[tuple[int, list[Counter]]] = field(default_factory=list)   # (to, elements)


class Recorder:
    """A group that keeps what is sent through it."""

    def __init__(self, world: rl.World):
        self.world, self.messages, self.under_way = world, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def send(self, x: Tensor, to: int, **options: Any) -> Any:
        self.messages.append((to, x.clone()))
        sent = self.world.send(x, to, **options)
        return Sending(sent, self.under_way) if options.get("async_op") else sent

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, **options: Any) -> Tensor:
        self.messages.append((to, out.clone()))
        self.world.exchange(out, to, into, frm, **options)
        assert torch.equal(out, self.messages[-1][1]), "what is sent lies where something arrives meanwhile"
        return into


class Sending:
    """The handle of a message that is under way until somebody waits for it."""

    def __init__(self, handle: Any, under_way: list):
        self.handle, self.under_way = handle, under_way
        under_way.append(self)

    def wait(self) -> Tensor:
        self.under_way.remove(self)
        return self.handle.wait()


def trace(p: int, n: int, run: Callable[[Tensor, Any], Tensor]) -> list[Trace]:
    """Histories of `run(x, group)` with x: [n] on each of p ranks, one for each rank."""
    assert n <= MOST

    def body(world: rl.World) -> Trace:
        story = Trace()
        for source in range(p):
            ids = torch.tensor([8**e if world.rank == source else 0 for e in range(n)], dtype=torch.int64)
            recorder = Recorder(world)
            result = run(ids, recorder).view(-1)
            assert not recorder.under_way, "what is sent may be overwritten once the algorithm has returned"
            _merge(story, source, result, recorder.messages)
        return story

    return rl.simulate(p, body)


def _merge(story: Trace, source: int, result: Tensor, messages: list[tuple[int, Tensor]]) -> None:
    story.held = story.held or [Counter() for _ in result]
    story.sent = story.sent or [(to, [Counter() for _ in x.view(-1)]) for to, x in messages]
    for history, number in zip(story.held, result.tolist(), strict=True):
        history.update(_digits(source, number))
    for (to, histories), (now, x) in zip(story.sent, messages, strict=True):
        assert to == now, "the same messages whatever the numbers are"
        for history, number in zip(histories, x.view(-1).tolist(), strict=True):
            history.update(_digits(source, number))


def _digits(source: int, number: int) -> Counter:
    assert number >= 0, "an element came eight times or more"
    return Counter({(source, e): number >> 3 * e & 7 for e in range(MOST + 1) if number >> 3 * e & 7})
