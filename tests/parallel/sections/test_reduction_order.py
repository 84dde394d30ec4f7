"""The order in which sections are reduced: one for all ranks, learned from the first backward, and under way while it goes on."""

import torch
from torch import nn

import rankloom as rl
from rankloom.parallel.sections.reduction_order import Reducing, ReductionQueue
from rankloom.parallel.sections.section import Section

WIDTH = 4


class Back(nn.Module):
    """Calls its blocks from the last to the first, so that backward comes to them in the model's own order."""

    def __init__(self, watch) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.watch = watch

    def forward(self, x):
        for at in (2, 1, 0):
            x = self.blocks[at](x)
            if x.requires_grad:
                x.register_hook(lambda grad, at=at: self.watch(f"backward of {at}"))
        return x


def run(world: rl.World) -> tuple[list[str], list[str]]:
    """What is reduced and what is computed in the second backward, in order; and the order that was learned."""
    seen: list[str] = []
    plain = world.reduce_scatter

    def reduce_scatter(x, *, label, **more):
        seen.append(label)
        return plain(x, label=label, **more)

    world.reduce_scatter = reduce_scatter
    model = rl.fully_shard(Back(seen.append), world)
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
    return list(seen), [section.name for section in model._sharding.forward_backward._queue.order]


def test_the_order_is_that_in_which_backward_ended_with_the_sections():
    for _, order in rl.simulate(2, run):
        assert [name for name in order if name] == ["blocks.0", "blocks.1", "blocks.2"]


def test_gradients_leave_while_backward_goes_on():
    for seen, _ in rl.simulate(2, run):
        assert seen == ["backward of 0", "gradients of blocks.0", "backward of 1", "gradients of blocks.1",
                        "backward of 2", "gradients of blocks.2"]


def test_slices_are_summed_over_replicas_while_the_next_gradients_arrive():
    def body(world):
        groups, seen = (world.group("shard"), world.group("replicate")), []

        def noted(plain):
            return lambda x, *more, label, **rest: (seen.append(label), plain(x, *more, label=label, **rest))[1]

        for group, name in zip(groups, ("reduce_scatter", "all_reduce")):
            setattr(group, name, noted(getattr(group, name)))
        model = rl.fully_shard(Back(lambda moment: None), groups[0], replicas=groups[1])
        seen.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        return [label for label in seen if label.startswith("gradients")]

    name = "gradients of blocks.{}".format
    for seen in rl.simulate(rl.Mesh(replicate=2, shard=2), body):
        assert seen.index(name(1)) < seen.index(f"{name(2)}, replicas") < seen.index(name(0))   # before it is learned, the order is that of


def test_replicas_learn_the_order_of_the_first_rank_too_and_once():
    def body(world):
        sections, groups = [Section(name, nn.Module(), []) for name in "abc"], (world.group("shard"), world.group("replicate"))
        queue = ReductionQueue(sections, *groups)
        queue.begin()
        for section in sections if world.rank == 0 else sections[::-1]:
            section.settled = True
            queue.settle(section, reducing=Reducing.ALL)
        queue.learn()
        calls = [group.ledger.calls for group in groups]
        queue.learn()
        assert [group.ledger.calls for group in groups] == calls
        return "".join(section.name for section in queue.order)

    assert rl.simulate(rl.Mesh(replicate=2, shard=2), body) == ["abc"] * 4
