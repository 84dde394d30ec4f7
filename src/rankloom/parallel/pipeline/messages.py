"""Messages between stages on different ranks: activations forward, gradients back.

Communication plan: a message is one or a few tensors. A header with their shapes goes ahead, but only for the first micro-batch of a kind
of shapes, and for each whose gradients are not all there. Afterwards both sides know the shapes, and the receiver posts its next receives
before it needs them, so that bytes arrive while it computes. Sends do not block. Their memory is freed when a later message from the same
neighbour proves that they have arrived.

Every message has a tag of its own, so ranks may send and receive in different orders, as folded stages do. NCCL has no tags: all messages
between two ranks share one queue. There each direction gets a connection of its own, and a rank posts its receives in the order in which
the other sends, which follows from the schedule.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.tensors import as_bytes
from rankloom.parallel.pipeline.actions import Action, Schedule, needs
from rankloom.world.group import Group, Handle

Values = list[Tensor | None]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.complex128)
HEADER = 64      # numbers of a header
TENSORS = 15     # of a message, at most
AHEAD = 2        # receives that are posted before they are needed
KEPT = 10_000    # kinds of shapes that are known at a time, of some kilobytes each: a long run may bring new ones in every step


class Shape(NamedTuple):
    """The shape and dtype of a tensor in a message. gradient: whether its gradient must come back"""

    dtype: torch.dtype
    dims: tuple[int, ...]
    gradient: bool


class Messages:
    """The messages of one rank in a step. `begin`, then `send` and `receive` in the schedule's order, then `finish`.

    expects: whether a message will come for a receive; called when it is the next one
    raises:  ConfigError where messages have no tags and the group cannot give a second connection
    """

    def __init__(self, group: Group, schedule: Schedule, expects: Callable[[Action], bool]):
        self.group, self.schedule, self._expects = group, schedule, expects
        self._back = _second_connection(group) if group.in_order else group   # from higher ranks to lower ones
        self._arrived = proven_arrivals(schedule, group.rank)
        self._known: dict[tuple[str, int, int], list[Shape | None]] = {}    # by direction, receiving stage, kind of micro-batch
        self._numbers: dict[Hashable, int] = {}    # of the kinds of micro-batches that have come so far
        self._kinds: Sequence[int] = ()      # of this step's micro-batches
        self._next: deque[Action] = deque()
        self._told: dict[Action, list[Shape | None]] = {}    # of messages whose header came before they were asked for
        self._open: dict[Action, tuple[Values, list[Handle]]] = {}
        self._sent: dict[Action, list[tuple[Handle, Tensor]]] = {}
        if group.in_order:
            self._meet()

    def begin(self, actions: Sequence[Action], kinds: Sequence[Hashable]) -> None:
        """Begin a step of these actions. kinds: for each micro-batch a key that determines all shapes; the same on every rank"""
        if len(self._numbers) > KEPT:   # on all ranks in the same step, as all have had the same kinds
            self._numbers.clear()
            self._known.clear()
        self._kinds = [self._numbers.setdefault(kind, len(self._numbers)) for kind in kinds]
        self._told.clear()
        self._open.clear()
        self._sent.clear()
        receives = [action for action in actions if action.kind.startswith("RECV")]
        self._next = deque(in_order_of_sending(receives, self.schedule) if self.group.in_order else receives)
        self._open_ahead()

    def send(self, action: Action, values: Values) -> None:
        """Start to send the tensors. If the receiver knows the shapes, `None` is sent as zeros.

        raises: ShapeMismatch when a stage's output differs from an earlier one of equal input, ConfigError for more than a header holds
        """
        way, stage = action.kind[-1], _receiver(action).stage
        kind = self._kinds[action.microbatch or 0]
        known = self._known.get((way, stage, kind))
        shapes = [_shape_of(value) for value in values]
        sent = self._sent[action] = []
        if known is None:
            sent.append(self._start(_header(shapes, action).to(self.group.device), action, self._tag(way, stage, kind, TENSORS)))
            self._learn(way, stage, kind, shapes)
        elif len(shapes) != len(known) or any(shape and not _is_as(shape, expected) for shape, expected in zip(shapes, known)):
            raise ShapeMismatch(f"{self.group.where(str(action))}: the stage gave {shapes}, and {known} for an earlier micro-batch of "
                                "the same shapes; neither shapes nor what needs a gradient may depend on anything else. If you have "
                                "thawed parameters, build the pipeline anew")
        for index, value in enumerate(values):
            if value is None and known and (expected := known[index]):
                value = torch.zeros(expected.dims, dtype=expected.dtype, device=self.group.device)
            if value is not None and value.numel():
                plain = value.detach().resolve_conj().resolve_neg().contiguous()
                sent.append(self._start(as_bytes(plain), action, self._tag(way, stage, action.microbatch or 0, index)))

    def receive(self, action: Action) -> Values:
        """Wait for the tensors. Those whose gradient must go back are leaves that require one."""
        while action not in self._open:   # earlier receives must be posted first
            if self._expects(following := self._next[0]):
                self._post(following)
            else:
                self._next.popleft()
        values, handles = self._open.pop(action)
        for handle in handles:
            handle.wait()
        for arrived in self._arrived.get(action, ()):
            self._settle(arrived)
        self._open_ahead()
        return values

    def skip(self, action: Action) -> None:
        """Drop this receive: nothing is sent for it."""
        if action in self._next:
            self._next.remove(action)
        self._open_ahead()

    def is_answered(self, receive: Action) -> bool:
        """Whether gradients come back for what was sent. The first header decides: parameters frozen later change nothing."""
        shapes = self._known["F", receive.stage + 1, self._kinds[receive.microbatch or 0]]
        return any(shape is not None and shape.gradient for shape in shapes)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for action in list(self._sent):
            self._settle(action)

    # ------------------------------------------------------------------ inside

    def _lane(self, frm: int, to: int) -> Group:
        """The connection for messages in this direction."""
        return self.group if frm < to else self._back

    def _meet(self) -> None:
        """Make all connections in one order on all ranks: the first message between two ranks makes theirs, and waits for both."""
        owner, me = self.schedule.owner, self.group.rank
        sends = [action for actions in self.schedule.ranks for action in actions if action.kind.startswith("SEND")]
        for frm, to in sorted({(owner[action.stage], owner[_receiver(action).stage]) for action in sends}):
            hello = torch.zeros(1, dtype=torch.float32, device=self.group.device)
            if me == frm:
                self._lane(frm, to).send(hello, to, label="hello")
            elif me == to:
                self._lane(frm, to).recv(hello, frm, label="hello")

    def _start(self, x: Tensor, action: Action, tag: int) -> tuple[Handle, Tensor]:
        to = self.schedule.owner[_receiver(action).stage]
        return self._lane(self.group.rank, to).send(x, to, tag=tag, label=str(action), async_op=True), x

    def _settle(self, action: Action) -> None:
        for handle, _ in self._sent.pop(action, ()):
            handle.wait()

    def _open_ahead(self) -> None:
        while self._next and len(self._open) < AHEAD and self._key(self._next[0]) in self._known:
            self._post(self._next[0])

    def _post(self, action: Action) -> None:
        """Post a receive; if the shapes are unknown, wait for the header first."""
        frm = self.schedule.owner[needs(action, self.schedule)[0].stage]
        lane, device, label = self._lane(frm, self.group.rank), self.group.device, str(action)
        values: Values = [s and torch.empty(s.dims, dtype=s.dtype, device=device, requires_grad=s.gradient)
                          for s in self._expected_shapes(action, lane, frm)]
        handles = [lane.recv(as_bytes(value), frm, tag=self._tag(action.kind[-1], action.stage, action.microbatch or 0, index),
                             label=label, async_op=True)
                   for index, value in enumerate(values) if value is not None and value.numel()]
        self._open[action] = values, handles
        self._next.remove(action)

    def _expected_shapes(self, action: Action, lane: Group, frm: int) -> list[Shape | None]:
        """The shapes in the message for this receive. Headers come in the order of sending, so others may come first."""
        way, stage, kind = key = self._key(action)
        while action not in self._told and key not in self._known:
            header = torch.empty(HEADER, dtype=torch.int64, device=self.group.device)
            lane.recv(header, frm, tag=self._tag(way, stage, kind, TENSORS), label=f"shapes of {action}")
            microbatch, *numbers = header.tolist()
            self._told[action._replace(microbatch=microbatch)] = shapes = _read_shapes(numbers)
            self._learn(way, stage, kind, shapes)
        return self._told.pop(action, None) or self._known[key]

    def _key(self, action: Action) -> tuple[str, int, int]:
        return action.kind[-1], action.stage, self._kinds[action.microbatch or 0]

    def _learn(self, way: str, stage: int, kind: int, shapes: list[Shape | None]) -> None:
        """Remember the shapes of a complete message. One in which a gradient is missing may be complete next time."""
        answered = self._known["F", stage + 1, kind] if way == "B" else shapes
        if all(shape or (asked and not asked.gradient) for shape, asked in zip(shapes, answered, strict=True)):
            self._known[way, stage, kind] = shapes

    def _tag(self, way: str, stage: int, number: int, index: int) -> int:
        return ((number * self.schedule.stages + stage) * 2 + (way == "B")) * (TENSORS + 1) + index


def _is_as(shape: Shape, announced: Shape | None) -> bool:
    """Whether a tensor is as the header announced. A gradient that is no longer needed, since parameters were frozen, does no harm."""
    return announced is not None and announced in (shape, shape._replace(gradient=True))


def proven_arrivals(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For each receive of `rank`, its own earlier sends that must have arrived: the neighbour receives them before it sends this."""
    place = {action: number for actions in schedule.ranks for number, action in enumerate(actions)}
    proven: dict[Action, list[Action]] = {}
    leaving: list[Action] = []
    for action in schedule.ranks[rank]:
        if action.kind.startswith("SEND"):
            leaving.append(action)
        elif action.kind.startswith("RECV"):
            answer = needs(action, schedule)[0]
            neighbour = schedule.owner[answer.stage]
            proven[action] = [sent for sent in leaving
                              if schedule.owner[_receiver(sent).stage] == neighbour and place[_receiver(sent)] < place[answer]]
            leaving = [sent for sent in leaving if sent not in proven[action]]
    return proven


def in_order_of_sending(receives: Sequence[Action], schedule: Schedule) -> list[Action]:
    """The receives of one rank, each right after those that the same sender sends before it."""
    place = {action: number for actions in schedule.ranks for number, action in enumerate(actions)}
    sends = {receive: needs(receive, schedule)[0] for receive in receives}
    queues: dict[int, deque[Action]] = {}
    for receive in sorted(receives, key=lambda receive: place[sends[receive]]):
        queues.setdefault(schedule.owner[sends[receive].stage], deque()).append(receive)
    order: list[Action] = []
    for receive in receives:
        queue = queues[schedule.owner[sends[receive].stage]]
        while queue and place[sends[queue[0]]] <= place[sends[receive]]:
            order.append(queue.popleft())
    return order


def _second_connection(group: Group) -> Group:
    if group.twin is None:
        raise ConfigError(f"{group.where('pipeline')}: its backend delivers messages in one order only, and stages need a second "
                          "connection, which a process group made elsewhere cannot give; take the group from rl.init")
    return group.twin()


def _receiver(sent: Action) -> Action:
    """The receive at the other end."""
    return Action(f"RECV_{sent.kind[-1]}", sent.stage + (1 if sent.kind == "SEND_F" else -1), sent.microbatch)


def _shape_of(value: Tensor | None) -> Shape | None:
    return None if value is None else Shape(value.dtype, tuple(value.shape), value.requires_grad)


def _header(shapes: list[Shape | None], action: Action) -> Tensor:
    """The micro-batch, the number of tensors, then of each: its dtype (-1 for None), whether a gradient must come back, the number of
    dims, and these."""
    numbers = [action.microbatch or 0, len(shapes)]
    for shape in shapes:
        if shape and shape.dtype not in DTYPES:
            raise ConfigError(f"{action}: a tensor of {shape.dtype} cannot go from stage to stage; convert it to one of {DTYPES}")
        numbers += [DTYPES.index(shape.dtype), int(shape.gradient), len(shape.dims), *shape.dims] if shape else [-1, 0, 0]
    if len(shapes) > TENSORS or len(numbers) > HEADER:
        raise ConfigError(f"{action}: {len(shapes)} tensors of {sum(len(s.dims) for s in shapes if s)} dims in all are more than one "
                          f"message from stage to stage holds: {TENSORS} tensors, {HEADER} numbers to describe them")
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device="cpu")


def _read_shapes(numbers: list[int]) -> list[Shape | None]:
    """What a header says behind its micro-batch: the reverse of `_header`."""
    shapes: list[Shape | None] = []
    at = 1
    for _ in range(numbers[0]):
        dtype, gradient, dims = numbers[at:at + 3]
        at += 3 + dims
        shapes.append(Shape(DTYPES[dtype], tuple(numbers[at - dims:at]), bool(gradient)) if dtype >= 0 else None)
    return shapes
