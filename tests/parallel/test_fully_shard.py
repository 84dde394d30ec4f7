"""`rl.fully_shard` in loops of one's own: whatever is awkward to do with it equals the same done with plain torch.

The bound is that of test_equivalence.py, fp64 to 1e-12: the same terms, added in another order.
"""

import contextlib
import copy
import io
import math
import time
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import rankloom as rl
from awkward import Dies, drawn
from rankloom.base.errors import ConfigError, ModelMismatch, UnitError
from rankloom.parallel.sections.wrapping import tensors_in

pytestmark = pytest.mark.gloo

WIDTH, ROWS = 6, 24
RANKS = [(1, "gloo"), (3, "gloo"), (2, "rankloom"), (4, "rankloom")]


class Block(nn.Module):
    """Two matrices and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks between two matrices of the root's."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """As a subclass likes to call one."""
        return block(x)


def made(build=Net) -> nn.Module:
    """Equal weights at every call, whatever thread asks."""
    return drawn(build(), seed=4)


def inputs(seed: int = 1) -> torch.Tensor:
    """Rows for all ranks."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw(params) -> torch.optim.Optimizer:
    """Small steps; the decay moves what a careless zero gradient would."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def expect_as_plain(loop, build=Net, ranks=RANKS, mesh=None, **options) -> None:
    """`loop(model, optimizer, x)`, where x is this rank's rows, leaves the same parameters and buffers on any number of ranks."""
    plain = made(build)
    loop(plain, adamw([p for p in plain.parameters() if p.requires_grad]), inputs())
    expected = plain.state_dict()

    def body(world):
        groups = {"group": world.group("shard"), "replicas": world.group("replicate")} if mesh else {"group": world}
        model = rl.fully_shard(made(build), **groups, **options)
        loop(model, adamw(model.parameters()), inputs().chunk(world.size)[world.rank])
        return model.state_dict()

    for size, backend in ranks:
        for state in rl.simulate(mesh or size, body, backend=backend):
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=f"{name} on {size} ranks over {backend}")


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that is a mean over rows, so that means over ranks are right."""
    return model(x).square().mean()


def synced(model: nn.Module, on: bool = False):
    """No communication inside, where there could be any."""
    return model.no_sync() if hasattr(model, "no_sync") and not on else contextlib.nullcontext()


def plainly(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()


def several_backwards(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        for factor in (1, 2, 3):
            mean_square(model, x * factor).backward()
        optimizer.step()


def two_forwards_one_backward(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        (mean_square(model, x) + mean_square(model, x * 2)).backward()
        optimizer.step()


def two_forwards_two_backwards(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        losses = [mean_square(model, x), mean_square(model, x * 2)]
        losses[0].backward()
        losses[1].backward()
        optimizer.step()


def retained_graph(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward(retain_graph=True)
        y.mean().backward()
        optimizer.step()


def retained_graph_of_two_forwards(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        loss = mean_square(model, x) + mean_square(model, x * 2)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def forwards_ahead_of_backwards(model, optimizer, x):
    """As the steady state of a pipeline."""
    for _ in range(2):
        optimizer.zero_grad()
        losses = [mean_square(model, x), mean_square(model, x * 2)]
        for factor in (3, 4):
            losses[-2].backward()
            losses.append(mean_square(model, x * factor))
        losses[-2].backward()
        losses[-1].backward()
        optimizer.step()


def accumulating(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        for factor in (1, 2, 3):
            with synced(model, on=factor == 3):
                mean_square(model, x * factor).backward()
        optimizer.step()


def forgotten_accumulation(model, optimizer, x):
    for _ in range(2):
        with synced(model):
            mean_square(model, x * 5).backward()
        model.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()
        model.zero_grad()


def cleared_by_the_inner_module(model, optimizer, x):
    """By the name that the model had before it was wrapped."""
    inner = getattr(model, "module", model)
    for set_to_none in (True, False, True):
        mean_square(model, x).backward()
        optimizer.step()
        with synced(model):
            mean_square(model, x * 5).backward()
        inner.zero_grad(set_to_none=set_to_none)


def looking_between(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        loss = mean_square(model, x)
        with torch.no_grad():
            model(x * 2)
        loss.backward()
        model.eval()
        with torch.no_grad():
            model(x * 3)
        model.train()
        optimizer.step()


def a_forward_that_nobody_backs(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        model(x * 2)
        mean_square(model, x).backward()
        optimizer.step()


def a_forward_before_the_update(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        model(x * 2)
        optimizer.step()


def keeping_zeros(model, optimizer, x):
    for factor in (1, 2, 3):
        optimizer.zero_grad(set_to_none=False)
        mean_square(model, x * factor).backward()
        optimizer.step()


def with_a_closure(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def recomputing_all(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
        optimizer.step()


def gradients_of_inputs(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        rows = x.clone().requires_grad_()
        y = model(rows)
        torch.autograd.grad(y.sum(), rows, retain_graph=True)
        y.square().mean().backward()
        optimizer.step()


def two_optimizers(model, optimizer, x):
    params = [p for p in model.parameters() if p.requires_grad]
    updates = [torch.optim.SGD(params[:5], lr=0.1), adamw(params[5:])]
    for _ in range(3):
        model.zero_grad()
        mean_square(model, x).backward()
        for update in updates:
            update.step()


def weights_in_the_loss(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        (mean_square(model, x) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()


def weights_in_the_loss_before_the_forward(model, optimizer, x):
    """Their gradients come last, while sums are under way."""
    for _ in range(3):
        optimizer.zero_grad()
        penalty = 0.1 * sum(p.square().sum() for p in model.parameters())
        (penalty + mean_square(model, x)).backward()
        optimizer.step()


def weights_in_a_loss_apart(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        sum(p.square().sum() for p in model.parameters()).mul(0.1).backward()
        mean_square(model, x).backward()
        optimizer.step()


def weights_times_nothing(model, optimizer, x):
    """A gradient of zeros is one: AdamW still decays the weight."""
    for _ in range(3):
        optimizer.zero_grad()
        nothing = 0.0 * sum(p.sum() for p in model.parameters())
        (nothing + mean_square(model, x)).backward()
        optimizer.step()


def other_gradients_in_their_place(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
        with synced(model):
            mean_square(model, x * 3).backward()
        mean_square(model, x * 2).backward()
        optimizer.step()


def frozen_for_a_while(model, optimizer, x):
    for at in range(4):
        for name, param in model.named_parameters():
            if "blocks.0" in name or name == "last.bias":
                param.requires_grad_(at not in (1, 2))
        optimizer.zero_grad()
        mean_square(model, x).backward()
        optimizer.step()


LOOPS = [plainly, several_backwards, two_forwards_one_backward, two_forwards_two_backwards, retained_graph,
         retained_graph_of_two_forwards, forwards_ahead_of_backwards, accumulating, forgotten_accumulation, cleared_by_the_inner_module,
         looking_between, a_forward_that_nobody_backs, a_forward_before_the_update, keeping_zeros, with_a_closure, recomputing_all,
         gradients_of_inputs, two_optimizers, weights_in_the_loss, weights_in_the_loss_before_the_forward, weights_in_a_loss_apart,
         other_gradients_in_their_place, frozen_for_a_while]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_way_to_write_a_loop_equals_plain_torch(loop):
    expect_as_plain(loop)


class Spare(Net):
    """Blocks have a matrix that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.spare = nn.Linear(WIDTH, WIDTH)


ONLY_IN_THE_LOSS = [weights_in_the_loss, weights_in_the_loss_before_the_forward, weights_in_a_loss_apart, weights_times_nothing]


@pytest.mark.parametrize("loop", ONLY_IN_THE_LOSS)
def test_weights_that_only_the_loss_uses_are_used(loop):
    expect_as_plain(loop, Spare, ranks=[(1, "gloo"), (3, "gloo"), (2, "rankloom")])


@pytest.mark.parametrize("loop", ONLY_IN_THE_LOSS)
def test_weights_that_only_the_loss_uses_are_used_where_sums_are_compressed(loop):
    def body(world):
        model = rl.fully_shard(made(Spare), world, compress="int8")
        loop(model, adamw(model.parameters()), inputs().chunk(world.size)[world.rank])
        return model.state_dict()

    plain = made(Spare)
    loop(plain, adamw(plain.parameters()), inputs())
    for state in rl.simulate(2, body):
        for name, value in plain.state_dict().items():
            if "spare" in name:
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_two_forwards_in_one_autocast_equal_plain_torch():
    """Autocast keeps what it has cast: the second forward would use casts of the first, whose memory has been released since.

    Plain torch adds the gradients of both forwards in bf16: one rounding more than here, where each is
    cast anew, of up to 2**-8 of the sum.
    """
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(inputs().float())
            loss = mean_square(model, inputs().float()) + mean_square(model, inputs().float() * 2)
        loss.backward()
        optimizer.step()
        return model.state_dict()

    expected = train(made().float())
    start = made().float().state_dict()
    for state in rl.simulate(2, lambda world: train(rl.fully_shard(made().float(), world))):   # equal rows: means over ranks are exact
        for name, value in expected.items():
            moved, plainly_moved = state[name] - start[name], value - start[name]
            torch.testing.assert_close(moved, plainly_moved, rtol=2 ** -8, atol=2 ** -20)   # the start is near 1: fp32 has 2**-24 there


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"ahead": 0}, {"ahead": 3}, {"units": Block}, {"units": 100},
                                     {"units": (Block, nn.Linear)}, {"units": Net}], ids=str)
@pytest.mark.parametrize("loop", [several_backwards, retained_graph_of_two_forwards, accumulating])
def test_every_option_equals_plain_torch(loop, options):
    expect_as_plain(loop, ranks=[(3, "gloo"), (2, "rankloom")], **options)


@pytest.mark.parametrize("loop", [several_backwards, accumulating, a_forward_before_the_update])
def test_parameters_cut_over_neighbours_after_forward_train_alike(loop):
    expect_as_plain(loop, ranks=[(4, "gloo"), (4, "rankloom")], reshard_after_forward=2)
    with pytest.raises(rl.ConfigError, match="reshard_after_forward=3 is no number of neighbours that divides the 4 ranks"):
        rl.simulate(4, lambda world: rl.fully_shard(made(), world, reshard_after_forward=3))


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("mesh", [rl.Mesh(replicate=2, shard=2), rl.Mesh(replicate=3, shard=1), rl.Mesh(replicate=1, shard=3)], ids=str)
def test_hybrid_replicas_equal_plain_torch(mesh, backend):
    for loop in (accumulating, looking_between):
        expect_as_plain(loop, ranks=[(mesh.size, backend)], mesh=mesh)


# ---------------------------------------------------------------------- models

class Recomputed(Net):
    """Blocks under torch's checkpoint."""

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class RecomputedOldWay(Net):
    """Its older form runs the forward without a graph, and a backward inside the backward."""

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class RecomputedInside(Block):
    """A checkpoint that is no section."""

    def forward(self, x):
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=False)


class RecomputedInsideOldWay(Block):
    """The older form."""

    def forward(self, x):
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=True)


@dataclass
class Pair:
    """An output that is no tensor."""

    value: torch.Tensor
    extra: torch.Tensor


class GivesDataclass(Block):
    """In a dataclass in a dict."""

    def forward(self, x):
        return {"pair": Pair(super().forward(x), torch.tanh(self.up(x)))}


class TakesDataclass(Net):
    """Both halves are used."""

    def __init__(self):
        super().__init__(GivesDataclass)

    def call(self, block, x):
        pair = block(x)["pair"]
        return pair.value + pair.extra[:, :WIDTH]


class GivesTuple(Block):
    """Two outputs and a None."""

    def forward(self, x):
        return super().forward(x), [torch.tanh(self.up(x)), None]


class TakesTuple(Net):
    """The second output is not used."""

    def __init__(self):
        super().__init__(GivesTuple)

    def call(self, block, x):
        return block(x)[0]


class Held:
    """An object of the user's."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class GivesObjects(Block):
    """An object in a namespace in a deque."""

    def forward(self, x):
        return deque([SimpleNamespace(held=Held(super().forward(x)), name="y")])


class TakesObjects(Net):
    """Only what is deepest inside is used."""

    def __init__(self):
        super().__init__(GivesObjects)

    def call(self, block, x):
        return block(x)[0].held.value


class GivesDistribution(Block):
    """A normal distribution around its result."""

    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0)


class TakesDistribution(Net):
    """Its mean is used."""

    def __init__(self):
        super().__init__(GivesDistribution)

    def call(self, block, x):
        return block(x).mean


class OneNotUsed(Net):
    """The middle block runs for nothing."""

    def call(self, block, x):
        y = block(x)
        return x if block is self.blocks[1] else y


class Skips(Net):
    """The middle block does not run."""

    def call(self, block, x):
        return x if block is self.blocks[1] else block(x)


class Sometimes(Net):
    """The middle block runs in every other forward: between, its parameters have no gradient, and do not decay."""

    turn = 0

    def forward(self, x):
        self.turn += 1
        return super().forward(x)

    def call(self, block, x):
        return x if block is self.blocks[1] and self.turn % 2 == 0 else block(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_forward_and_backward_may_call_other_blocks(mode):
    """What an evaluation in inference mode had released last was no part of any graph, and the backward that asked for it died."""
    def evaluating(model, optimizer, x):
        for _ in range(2):
            optimizer.zero_grad()
            with mode():
                model(x)
            loss = mean_square(model, x)
            with mode():
                model(x)
            loss.backward()
            optimizer.step()

    expect_as_plain(evaluating, build=Sometimes)


class Chain(nn.Sequential):
    """A root without parameters, whose output is that of its last block."""

    def __init__(self):
        super().__init__(Block(), Block(), Block())


class Alike(nn.Sequential):
    """Blocks of two kinds of one padded size, whose gradients take turns with the same buffers."""

    def __init__(self):
        super().__init__(Block(), nn.Sequential(nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)), Block())


class FrozenFirst(Net):
    """What comes before the first trainable parameter needs no backward."""

    def __init__(self):
        super().__init__()
        for part in (self.first, self.blocks[0]):
            part.requires_grad_(False)


class FrozenWithin(Net):
    """Backward goes through a frozen block, and through blocks that are frozen in part."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)
        self.blocks[2].down.requires_grad_(False)


class StopsGradient(Block):
    """A use of a matrix that has no gradient, whose backward comes after all gradients of the block have landed."""

    def forward(self, x):
        return nn.functional.linear(x, self.up.weight.detach())[:, :WIDTH] + super().forward(x)


class Normed(Block):
    """Running statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean(0)
        return super().forward(x)


MODELS = {
    "checkpoint": Recomputed, "reentrant checkpoint": RecomputedOldWay, "checkpoint inside": lambda: Net(RecomputedInside),
    "reentrant checkpoint inside": lambda: Net(RecomputedInsideOldWay), "dataclass": TakesDataclass, "tuple": TakesTuple,
    "objects": TakesObjects, "distribution": TakesDistribution,
    "unused block": OneNotUsed, "skipped block": Skips, "block at times": Sometimes,
    "root without parameters": Chain, "alike in size": Alike,
    "frozen first": FrozenFirst, "frozen within": FrozenWithin, "buffers": lambda: Net(Normed),
    "stopped gradient": lambda: Net(StopsGradient),
}


@pytest.mark.parametrize("model", MODELS)
def test_every_awkward_model_equals_plain_torch(model):
    expect_as_plain(plainly, MODELS[model])
    expect_as_plain(several_backwards, MODELS[model], ranks=[(2, "gloo")])


class Compiled(Net):
    """Blocks that torch compiles with all their hooks."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


def test_gradients_may_be_forgotten_one_by_one():
    def loop(model, optimizer, x):
        for _ in range(3):
            for name, param in model.named_parameters():
                param.grad = None if "blocks.1" in name else param.grad
            mean_square(model, x).backward()
            optimizer.step()

    expect_as_plain(loop, Sometimes, ranks=[(1, "gloo"), (4, "gloo")], units=Net)


def test_blocks_that_the_user_has_compiled_equal_plain_torch():
    expect_as_plain(plainly, Compiled, ranks=[(2, "gloo")])


class Heads(Net):
    """Two, of which each call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](super().forward(x))


def recomputed_side_by_side(model, x):
    return checkpoint(model, x, 0, use_reentrant=False) + checkpoint(model, x * 2, 1, use_reentrant=False)


def recomputed_in_a_chain(model, x):
    return checkpoint(model, checkpoint(model, x, 0, use_reentrant=False), 1, use_reentrant=False)


@pytest.mark.parametrize("calls", [recomputed_side_by_side, recomputed_in_a_chain])
def test_a_model_that_is_recomputed_twice_in_one_backward_equals_plain_torch(calls):
    def loop(model, optimizer, x):
        for _ in range(3):
            optimizer.zero_grad()
            calls(model, x).square().mean().backward()
            optimizer.step()

    expect_as_plain(loop, Heads)


class CallsItself(nn.Module):
    """Twice, between its two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=2):
        x = self.into(x)
        return self.out(torch.tanh(self(x, depth - 1)) if depth else x)


@pytest.mark.parametrize("build", [CallsItself, lambda: Net(CallsItself)], ids=["root", "blocks"])
def test_a_module_that_calls_itself_stays_until_its_outermost_call_has_ended(build):
    expect_as_plain(looking_between, build)


def test_blocks_called_without_the_root_leave_nothing_behind():
    def body(world):
        model = rl.fully_shard(made(), world)
        optimizer, lengths = adamw(model.parameters()), []
        for _ in range(3):
            optimizer.zero_grad()
            model.module.blocks[1](model.module.blocks[0](inputs())).square().mean().backward()
            optimizer.step()
            lengths.append(len(model._sharding.forward_backward.calls.order))
        return lengths

    assert rl.simulate(2, body) == [[2, 2, 2]] * 2


def test_each_forward_without_gradients_is_a_pass_of_its_own():
    def body(world):
        model, lengths = rl.fully_shard(made(), world), []
        for _ in range(3):
            with torch.no_grad():
                model(inputs())
            lengths.append(len(model._sharding.forward_backward.calls.order))
        return lengths

    assert rl.simulate(2, body) == [[4, 4, 4]] * 2   # the root and its blocks


def test_buffers_are_the_mean_over_replicas_too():
    expect_as_plain(plainly, lambda: Net(Normed), ranks=[(4, "gloo")], mesh=rl.Mesh(replicate=2, shard=2))


@pytest.mark.parametrize("axes", [("shard",), ("replicate", "shard")], ids="+".join)
def test_replicas_that_hold_other_slices_are_refused(axes):
    def body(world):
        with pytest.raises(ConfigError, match=r"rank \d of `replicas` does not hold the slice of this rank, [01] of 2"):
            rl.fully_shard(made(), world.group("shard"), replicas=world.group(*axes))

    rl.simulate(rl.Mesh(replicate=2, shard=2), body)


def test_replicas_that_are_no_group_are_refused():
    with pytest.raises(ConfigError, match=r"replicas=2 is of type int, expected a Group"):
        rl.simulate(2, lambda world: rl.fully_shard(made(), world, replicas=2))


def test_replicas_are_told_from_ranks_of_the_group_though_groups_do_not_know_their_numbers_in_the_world():
    def body(world):
        shard, replicate = (rl.Group(world.group(axis)._process_group) for axis in ("shard", "replicate"))
        assert shard.ranks == replicate.ranks == (0, 1)
        return len(list(rl.fully_shard(made(), shard, replicas=replicate).parameters()))

    assert rl.simulate(rl.Mesh(replicate=2, shard=2), body) == [len(list(made().parameters()))] * 4


def test_buffers_that_change_no_more_are_left_alone():
    def body(world):
        model = rl.fully_shard(made(lambda: Net(Normed)), world.group("shard"), replicas=world.group("replicate"))
        versions = []
        for training in (True, False):
            mean_square(model.train(training), inputs()).backward()
            versions.append([buffer._version for buffer in model.buffers()])
        return versions

    for trained, left in rl.simulate(rl.Mesh(replicate=2, shard=2), body):
        assert trained == left and any(trained)


def test_two_sharded_models_in_one_backward_equal_plain_torch():
    def train(maker, judge, rows):
        updates = adamw(maker.parameters()), adamw(judge.parameters())
        for _ in range(2):
            fake = maker(rows)
            updates[1].zero_grad()
            (judge(fake.detach()).square().mean() - judge(rows).mean()).backward()
            updates[1].step()
            updates[0].zero_grad()
            judge(fake).mean().backward()
            updates[0].step()
        return {**maker.state_dict(prefix="maker."), **judge.state_dict(prefix="judge.")}

    expected = train(made(), made(lambda: Net(Block)), inputs())
    body = lambda world: train(rl.fully_shard(made(), world), rl.fully_shard(made(), world), inputs().chunk(world.size)[world.rank])
    for size, backend in RANKS:
        for state in rl.simulate(size, body, backend=backend):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [2.0, 1, 3.5, math.inf, "inf"])
def test_the_gradient_norm_and_clipping_are_those_of_plain_torch(order):
    plain = made()
    mean_square(plain, inputs()).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, order)

    def body(world):
        model = rl.fully_shard(made(), world)
        mean_square(model, inputs().chunk(world.size)[world.rank]).backward()
        found = model.clip_grad_norm_(0.1, norm_type=order)
        with pytest.raises(ConfigError, match=r"norm_type=0\): expected a number above 0"):
            model.clip_grad_norm_(0.1, norm_type=0)
        with pytest.raises(ConfigError, match=r"clip_grad_norm_\(-1.0\): expected a norm of 0 or more"):
            model.clip_grad_norm_(-1.0)
        after = model.clip_grad_norm_(1.0, order)
        next(p.grad for p in model.parameters() if p.grad is not None).mul_(math.nan if world.rank == world.size - 1 else 1.0)
        return found, after, model.clip_grad_norm_(1.0, order)

    for size, backend in RANKS:
        for before, after, spoiled in rl.simulate(size, body, backend=backend):
            torch.testing.assert_close(before, norm, rtol=1e-12, atol=0)
            assert 0.1 - 1e-6 < after <= 0.1 * (1 + 1e-12)   # the epsilon in the factor
            assert spoiled.isnan()


@pytest.mark.parametrize("size, backend", RANKS)
def test_a_rank_that_still_reads_does_not_see_the_update_of_one_that_is_ahead(size, backend):
    plain = made()
    optimizer = adamw(plain.parameters())
    mean_square(plain, inputs()).backward()
    expected = plain(inputs()).detach()
    optimizer.step()

    def body(world):
        model = rl.fully_shard(made(), world)
        update = adamw(model.parameters())
        mean_square(model, inputs().chunk(world.size)[world.rank]).backward()
        late = model.module.blocks[1].register_forward_pre_hook(lambda module, args: time.sleep(0.2 * (world.rank == size - 1)))
        with torch.no_grad():
            seen = model(inputs())
        late.remove()
        update.step()
        return seen, model.state_dict()

    for seen, state in rl.simulate(size, body, backend=backend):
        torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def sharpness_aware(model, optimizer, x, after_update):
    """SAM with the sign of the gradient: two passes, the second at other weights."""
    for _ in range(3):
        optimizer.zero_grad()
        mean_square(model, x).backward()
        params = [param for param in model.parameters() if param.grad is not None]
        moves = [param.grad.sign() * 0.05 for param in params]
        with torch.no_grad():
            torch._foreach_add_(params, moves)
        after_update()
        optimizer.zero_grad()
        mean_square(model, x).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, moves)
        after_update()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_slices_may_be_changed_by_what_is_no_optimizer(options):
    plain = made()
    expected = sharpness_aware(plain, adamw(plain.parameters()), inputs(), lambda: None)

    def body(world):
        model = rl.fully_shard(made(), world, **options)
        return sharpness_aware(model, adamw(model.parameters()), inputs().chunk(world.size)[world.rank], model.after_update)

    for size, backend in RANKS:
        for state in rl.simulate(size, body, backend=backend):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend, options", [("gloo", {"reshard_after_forward": False}), ("rankloom", {})])
def test_slices_that_were_changed_without_a_word_are_an_error_and_so_is_one_that_was_replaced(backend, options):
    """Some ranks would compute with old values, others with new ones."""
    def body(world):
        model = rl.fully_shard(made(), world, **options)
        model(inputs())
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)
        with pytest.raises(UnitError, match=rf"rank {world.rank}: slices of unit .* were changed, and by no torch optimizer"):
            model(inputs())
        model.after_update()
        model(inputs())
        for param in model.parameters():
            param.data = param.data.clone()
        with pytest.raises(UnitError, match=r"the slice of .* was replaced"):
            model(inputs())

    rl.simulate(2, body, backend=backend)


# ---------------------------------------------------------------------- state

def test_a_state_dict_goes_from_any_number_of_ranks_to_any_other_and_to_a_plain_model():
    plain = made()
    plainly(plain, adamw(plain.parameters()), inputs())
    saved = plain.state_dict()
    for size, backend in RANKS:
        def body(world, saved=saved):
            model = rl.fully_shard(made(lambda: Net(Block)), world)
            with torch.no_grad():
                for owner in model.parameters():
                    owner.add_(1.0)
            model.after_update()
            model.load_state_dict(saved)
            y = model(inputs())
            return model.state_dict(), y.detach()

        for state, y in rl.simulate(size, body, backend=backend):
            assert all(torch.equal(state[name], value) for name, value in saved.items())
            torch.testing.assert_close(y, plain(inputs()).detach(), rtol=0, atol=0)
            fresh = Net().double()
            fresh.load_state_dict(state)
        saved = state


class OnGraph(nn.Module):
    """Has a sparse buffer."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("edges", (scale * torch.eye(3)).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.lin(x))


def test_a_sparse_buffer_is_loaded_from_a_sparse_tensor_and_from_no_other():
    def body(world):
        sharded, state = rl.fully_shard(OnGraph(), world), rl.fully_shard(OnGraph(2.0), world).state_dict()
        sharded.load_state_dict(state)
        assert torch.equal(sharded.module.edges.to_dense(), 2 * torch.eye(3))
        with pytest.raises(rl.ModelMismatch, match="edges in the state dict is on cpu, of layout torch.strided, expected a tensor with "
                                                   "values, of layout torch.sparse_coo"):
            sharded.load_state_dict(state | {"edges": torch.eye(3)})

    rl.simulate(2, body)


def test_a_sharded_part_of_a_larger_model_is_in_its_state_dict():
    def body(world):
        return list(nn.Sequential(rl.fully_shard(made(), world)).state_dict())

    assert rl.simulate(2, body)[1] == [f"0.{name}" for name in made().state_dict()]


@pytest.mark.parametrize("wrong", [torch.zeros(3), None, torch.zeros(12, 6).numpy(), torch.zeros(12, 6, device="meta")],
                         ids=["other shape", "none", "numpy", "meta"])
@pytest.mark.parametrize("wrong_rank", [0, 3])
@pytest.mark.parametrize("mesh", [4, rl.Mesh(replicate=2, shard=2)], ids=str)
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all_with_nothing_changed(mesh, wrong_rank, wrong):
    def body(world):
        groups = (world.group("shard"), world.group("replicate")) if world.axes_named else (world, world.alone())
        model = rl.fully_shard(made(), groups[0], replicas=groups[1])
        before = model.state_dict()
        other = {name: value + 1 for name, value in before.items()}
        if world.rank == wrong_rank:
            other["blocks.1.up.weight"] = wrong
        with pytest.raises(ModelMismatch, match=f"rank {wrong_rank}.*blocks.1.up.weight"):
            model.load_state_dict(other)
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    assert all(rl.simulate(mesh, body))


# ---------------------------------------------------------------------- bad input

@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_in_place_change_of_a_gathered_parameter_is_an_error(size, backend):
    def body(world):
        model = rl.fully_shard(made(), world)
        plainly(model, adamw(model.parameters()), inputs())
        with pytest.raises(UnitError, match=r"blocks.1.up.weight was (changed in place|used \(mul_\) while it is released)"):
            with torch.no_grad():
                model.module.blocks[1].up.weight.mul_(2.0)
            model(inputs())

    rl.simulate(size, body, backend=backend)


def test_a_parameter_replaced_after_sharding_is_an_error():
    def body(world):
        model = rl.fully_shard(made(), world)
        model.module.blocks[1].up.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH, dtype=torch.float64))
        with pytest.raises(UnitError, match=r"blocks.1.up.weight was replaced"):
            model(inputs())

    rl.simulate(2, body)


def test_parameters_outside_their_unit_are_an_error_and_no_crash():
    def body(world):
        model = rl.fully_shard(made(), world)
        inner = model.module
        for part in (inner.blocks[0].up, inner.first):
            with pytest.raises(UnitError, match=f"rank {world.rank}: unit .* is sharded, expected gathered"):
                part(inputs())
        with pytest.raises(UnitError, match=rf"rank {world.rank}: blocks.0.up.weight was used \(linear\) while it is released"):
            nn.functional.linear(inputs(), inner.blocks[0].up.weight)
        return mean_square(model, inputs()).item()

    assert rl.simulate(2, body) == [mean_square(made(), inputs()).item()] * 2


def test_a_part_that_dies_when_it_is_called_by_itself_is_not_let_go_when_the_model_calls_it():
    def body(world):
        model = rl.fully_shard(made(), world)
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model.module.first(inputs().T)
            return model(inputs())

    for found in rl.simulate(2, body, backend="gloo"):
        torch.testing.assert_close(found, made()(inputs()).detach(), rtol=1e-12, atol=1e-12)


def test_parts_may_be_called_by_themselves_after_a_forward_that_died_and_an_update():
    def body(world):
        model = rl.fully_shard(made(), world)
        with torch.no_grad():
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                model(inputs().T)
            model.after_update()
            return model.module.first(inputs())

    for found in rl.simulate(2, body, backend="gloo"):
        torch.testing.assert_close(found, made().first(inputs()).detach(), rtol=1e-12, atol=1e-12)


class PutsAside(nn.Module):
    """What it makes is not returned. Its matrix is larger than a frame."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(400, 400)

    def forward(self, x: torch.Tensor) -> None:
        self.aside = self.lift(x)


class TakesAside(nn.Module):
    """Blocks whose backward nobody sees begin."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, 400), nn.ModuleList(PutsAside() for _ in range(3))
        self.blocks.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            block(x)
            x = torch.tanh(block.aside)
        return x


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_that_comes_to_parameters_while_they_are_away_is_an_error_and_no_wrong_gradient(frozen):
    def body(world):
        model = rl.fully_shard(made(lambda: TakesAside(frozen)), world, units=PutsAside)
        loss = mean_square(model, inputs())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    rl.simulate(2, body, backend="gloo")


class HeadLast(nn.Module):
    """What belongs to no block comes after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


def test_slices_come_in_the_order_of_the_plain_models_parameters():
    names = [name for name, _ in HeadLast().named_parameters()]
    found = rl.simulate(2, lambda world: [name for name, _ in rl.fully_shard(made(HeadLast), world).named_parameters()])
    assert found == [names] * 2


class About:
    """What comes along with a block's output: things with names of their own, and no result."""

    def __init__(self, block: nn.Module):
        class AnyKey(dict):
            __getattr__ = dict.__getitem__

        self.weight, self.config, self.me = block.up.weight, AnyKey(width=WIDTH), self
        self.words = {f"word {at}": at for at in range(3)}


class GivesMore(Block):
    """A dataclass of its result and an object."""

    def forward(self, x):
        return Pair(super().forward(x), About(self))


class TakesMore(Net):
    """The result is used."""

    def __init__(self):
        super().__init__(GivesMore)

    def call(self, block, x):
        return block(x).value


def test_objects_that_come_with_an_output_are_none_of_it():
    expect_as_plain(plainly, TakesMore)


class Private:
    """One slot, with a name of its own."""

    __slots__ = "__value"

    def __init__(self, value):
        self.__value = value


class WithSparse(Block):
    """A tensor without a storage beside what it returns."""

    def forward(self, x):
        return super().forward(x), torch.eye(2).to_sparse()


class BesideSparse(Net):
    """Takes what is dense."""

    def __init__(self) -> None:
        super().__init__(WithSparse)

    def call(self, block, x):
        return block(x)[0]


def test_so_are_tensors_without_a_storage():
    expect_as_plain(plainly, BesideSparse, ranks=[(2, "gloo")])


def test_results_are_found_in_slots_whatever_their_names():
    x = torch.ones(2, requires_grad=True) * 2
    assert list(tensors_in([Private(x), Held([x, 3])])) == [x, x]


@pytest.mark.parametrize("options", [{"reduce": torch.int32}, {"compute": torch.int8}, {"compute": torch.float8_e4m3fn}], ids=str)
def test_a_dtype_to_compute_or_sum_in_is_one_of_floating_numbers(options):
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}=torch.* expected a dtype of floating numbers in 16 bits or more"):
        rl.simulate(1, lambda world: rl.fully_shard(made(), world, **options))


def test_slices_keep_the_attributes_of_their_parameters():
    """Who groups by them would put all parameters in one group."""
    def body(world):
        model = made()
        model.last.bias.no_decay = True
        return [name for name, owner in rl.fully_shard(model, world).named_parameters() if getattr(owner, "no_decay", False)]

    assert rl.simulate(2, body) == [["last.bias"]] * 2


def test_an_optimizer_made_before_sharding_is_an_error():
    def body(world):
        model = made()
        early = adamw(model.parameters())
        sharded = rl.fully_shard(model, world)
        mean_square(sharded, inputs()).backward()
        with pytest.raises(UnitError, match="made before the model was sharded"):
            early.step()

    rl.simulate(2, body)


def test_an_optimizer_that_looks_at_whole_tensors_is_an_error_unless_it_says_that_it_does_not():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            """Nobody can see that it is elementwise."""
            super().step()

    class OwnElementwise(Own):
        elementwise = True

    def body(world):
        model = rl.fully_shard(made(), world)
        mean_square(model, inputs()).backward()
        for kind in (torch.optim.Adafactor, Own):
            with pytest.raises(UnitError, match=f"{kind.__name__} may look at whole tensors"):
                kind(model.parameters(), lr=0.1).step()
        OwnElementwise(model.parameters(), lr=0.1).step()

    rl.simulate(2, body)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.half, lambda model: model.to("meta")], ids=["float", "half", "to"])
def test_a_sharded_model_cannot_be_cast_or_moved(cast, size):
    def body(world):
        model = rl.fully_shard(made(), world)
        with pytest.raises(UnitError, match="cannot be cast or moved"):
            cast(model)
        assert model.double() is model.to("cpu") is model   # nothing to do
        plainly(model, adamw(model.parameters()), inputs())
        return model.state_dict()

    plain = made()
    plainly(plain, adamw(plain.parameters()), inputs())
    for state in rl.simulate(size, body):
        torch.testing.assert_close(state["first.weight"], plain.state_dict()["first.weight"], rtol=1e-12, atol=1e-12)


def test_a_sharded_model_cannot_be_pickled():
    with pytest.raises(UnitError, match=r"cannot be pickled.*Save `state_dict\(\)`"):
        rl.simulate(1, lambda world: torch.save(rl.fully_shard(made(), world), io.BytesIO()))


def test_a_sharded_model_cannot_be_copied():
    with pytest.raises(UnitError, match="cannot be copied"):
        rl.simulate(2, lambda world: copy.deepcopy(rl.fully_shard(made(), world)))


class FixedPoint(Net):
    """z = f(z) + x, where f is the net. A hook on what it returns solves the linear equation of its gradient, by other backward passes."""

    def forward(self, x):
        f = lambda z: 0.1 * super(FixedPoint, self).forward(z) + x
        with torch.no_grad():
            z = f(f(x))
        z = f(z)
        before = z.detach().requires_grad_()
        after = f(before)
        z.register_hook(lambda gradient: gradient + torch.autograd.grad(after, before, gradient, retain_graph=True)[0])
        return z


def test_a_hook_that_takes_gradients_inside_of_a_backward_begins_none_of_its_own():
    expect_as_plain(accumulating, build=FixedPoint)

    def body(world):
        model, told = rl.fully_shard(made(FixedPoint), world), []
        for slice_ in model.parameters():
            slice_.register_post_accumulate_grad_hook(lambda slice_: told.append(id(slice_)))
        with model.no_sync():
            mean_square(model, inputs()).backward()
        mean_square(model, inputs()).backward()
        return sorted(told) == sorted(id(slice_) for slice_ in model.parameters() if slice_.grad is not None)

    assert rl.simulate(2, body) == [True, True]   # each is told of one mean


def test_a_backward_of_a_backward_wants_parameters_that_stay():
    def penalised(model, optimizer, x):
        for _ in range(2):
            optimizer.zero_grad()
            rows = x.clone().requires_grad_()
            y = model(rows)
            slope, = torch.autograd.grad(y.square().sum(), rows, create_graph=True)
            (y.square().mean() + slope.square().mean()).backward()
            optimizer.step()

    expect_as_plain(penalised, ranks=[(1, "gloo"), (3, "rankloom")])
    expect_as_plain(penalised, ranks=[(3, "gloo")], reshard_after_forward=False)
    with pytest.raises(UnitError, match="create_graph=True .* reshard_after_forward=False"):
        rl.simulate(2, lambda world: penalised(model := rl.fully_shard(made(), world), adamw(model.parameters()), inputs()))
    with pytest.raises(UnitError, match="rank 0: .* create_graph=True"):   # alone, too, where a slice is in another format
        rl.simulate(1, lambda world: penalised(model := rl.fully_shard(made(), world, compute=torch.float32), adamw(model.parameters()),
                                               inputs().float()))


class Mortal(Net):
    """Dies in its middle block."""

    def __init__(self):
        super().__init__()
        self.dies = Dies()

    def call(self, block, x):
        return self.dies(block(x)) if block is self.blocks[1] else block(x)


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("accumulated", [False, True])
def test_after_an_exception_another_step_goes_as_if_nothing_had_happened(when, accumulated):
    def interrupted(model, optimizer, x):
        dies = getattr(model, "module", model).dies
        for at in range(3):
            optimizer.zero_grad()
            if isinstance(model, rl.parallel.fully_shard.FullySharded) and at == 1:
                if accumulated:
                    with model.no_sync():
                        mean_square(model, x * 7).backward()
                dies.when = when
                with pytest.raises(ArithmeticError):
                    mean_square(model, x * 3).backward()
                dies.when = ""
                model.zero_grad()
            mean_square(model, x).backward()
            optimizer.step()

    expect_as_plain(interrupted, Mortal)


@pytest.mark.parametrize("p", [1, 2])
def test_a_step_while_gradients_wait_for_their_reduction_is_an_error(p):
    def body(world):
        model = rl.fully_shard(made(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with model.no_sync():
                mean_square(model, inputs()).backward()
            with pytest.raises(UnitError, match=rf"rank {world.rank}: an optimizer steps before gradients are reduced"):
                optimizer.step()
            mean_square(model, inputs()).backward()
            optimizer.step()
        with model.no_sync():
            mean_square(model, inputs()).backward()
        model.zero_grad()
        optimizer.step()

    rl.simulate(p, body)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_step_inside_of_no_sync_is_an_error(backend):
    def body(world):
        model = rl.fully_shard(made(), world)
        optimizer = adamw(model.parameters())
        with model.no_sync():
            mean_square(model, inputs()).backward()
            with pytest.raises(UnitError, match=rf"rank {world.rank}: an optimizer steps before gradients are reduced"):
                optimizer.step()

    rl.simulate(2, body, backend=backend)


class OwnWay(Block):
    """A branch that only some ranks take, inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.alt = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, take):
        y = super().forward(x)
        return y + self.alt(x) if take else y


class OwnWays(Net):
    """Blocks that are told whether to take it; so is the root, whose matrix comes last in forward."""

    def __init__(self) -> None:
        super().__init__(OwnWay)
        self.first.requires_grad_(False)   # so the root's gradients are the first to come

    def forward(self, x, take):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, take)
        return self.last(x) if take else x @ self.last.weight.T


def the_second_of_two_forwards(loss):
    loss(2)
    loss(1).backward()


def each_of_two_forwards(loss):
    for one in [loss(1), loss(2)]:
        one.backward()


WAYS = {"one forward": (lambda loss: loss(1).backward(), [1]), "two forwards": (lambda loss: (loss(1) + loss(2)).backward(), [1, 2]),
        "a forward nobody backs": (the_second_of_two_forwards, [1]), "two backwards": (each_of_two_forwards, [1, 2])}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_use_other_parameters_inside_of_a_block_gather_and_reduce_in_one_order(way):
    backwards, factors = WAYS[way]
    plain, halves = made(OwnWays), inputs().chunk(2)
    update = adamw([p for p in plain.parameters() if p.requires_grad])
    for _ in range(3):
        update.zero_grad()
        sum(plain(half * factor, rank == 0).square().mean() / 2 for rank, half in enumerate(halves) for factor in factors).backward()
        update.step()

    def body(world):
        model = rl.fully_shard(made(OwnWays), world)
        update = adamw(model.parameters())
        for _ in range(3):
            update.zero_grad()
            backwards(lambda factor: model(halves[world.rank] * factor, world.rank == 0).square().mean())
            update.step()
        return model.state_dict()

    for state in rl.simulate(2, body, backend="gloo"):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


class GivesParameter(Block):
    """Returns a view of what goes when it has returned."""

    def forward(self, x):
        return self.up.bias[:WIDTH].expand(x.shape[0], -1)


@pytest.mark.parametrize("graph", [True, False])
def test_a_block_that_returns_its_own_parameter_is_an_error(graph):
    def body(world):
        model = rl.fully_shard(made(lambda: Net(GivesParameter)), world)
        says = rf"rank {world.rank}: blocks.0 \(GivesParameter\) returns its parameter blocks.0.up.bias"
        with pytest.raises(UnitError, match=says), torch.set_grad_enabled(graph):
            model(inputs())

    rl.simulate(2, body, backend="gloo")


class GivesItsOwn(Net):
    """The root's."""

    def forward(self, x):
        return super().forward(x), self.first.bias


def test_so_is_a_model_that_does_where_no_backward_keeps_that_gathered():
    def body(world):
        model = rl.fully_shard(made(GivesItsOwn), world)
        with pytest.raises(UnitError, match=r"the model \(GivesItsOwn\) returns its parameter first.bias"), torch.no_grad():
            model(inputs())

    rl.simulate(2, body, backend="gloo")


@pytest.mark.parametrize("thaw", [lambda model: model.requires_grad_(), lambda model: model.module.blocks[0].requires_grad_()])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_what_was_frozen_when_it_was_sharded_cannot_be_thawed(backend, thaw):
    def half_frozen():
        model = Net()
        model.blocks[0].requires_grad_(False)
        return model

    def body(world):
        model = rl.fully_shard(made(half_frozen), world)
        mean_square(model, inputs()).backward()
        assert model.requires_grad_(False) is model
        thaw(model)
        with pytest.raises(ConfigError, match="blocks.0.up.weight was frozen when the model was sharded"):
            model(inputs())

    rl.simulate(2, body, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_gradients_from_before_sharding_are_forgotten(backend):
    plain = made()
    plainly(plain, adamw(plain.parameters()), inputs())

    def body(world):
        model = made()
        mean_square(model, inputs(3)).backward()
        model = rl.fully_shard(model, world)
        plainly(model, adamw(model.parameters()), inputs().chunk(2)[world.rank])
        return model.state_dict()

    for state in rl.simulate(2, body, backend=backend):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_backward_through_a_forward_from_before_the_update_is_an_error(backend, options):
    def body(world):
        model = rl.fully_shard(made(), world, **options)
        optimizer, y = adamw(model.parameters()), model(inputs())
        y.square().mean().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.mean().backward()

    rl.simulate(2, body, backend=backend)


def test_hooks_of_slices_see_the_mean_and_those_that_nobody_would_call_are_an_error():
    plain = made()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)   # half of 0.1, as the hook says
    plainly(plain, optimizer, inputs())

    def body(world):
        model = rl.fully_shard(made(), world)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.5))
        plainly(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs().chunk(2)[world.rank])
        state = model.state_dict()
        next(model.parameters()).register_hook(lambda grad: grad)
        with pytest.raises(UnitError, match=rf"rank {world.rank}: the slice of first.weight has a hook"):
            model(inputs())
        return state

    for state in rl.simulate(2, body):
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("reshards", [True, False])
def test_hooks_of_slices_may_step_on_some_ranks_only(reshards, backend):
    """Where parameters stayed after a backward, ranks without a piece went on with the old ones, and waited for a gather no more."""
    def body(world):
        layer = nn.Linear(4, 4, bias=False)   # 64 bytes: rank 0 has it all
        nn.init.constant_(layer.weight, 1.0)
        model = rl.fully_shard(layer, world, reshard_after_forward=reshards)
        (weight,) = model.parameters()
        optimizer, called = torch.optim.SGD([weight], lr=0.25), []

        def step(param):
            called.append(param)
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            losses.append(loss.item())
        return len(called), losses

    losses = [16.0, 12.0, 8.0]
    assert rl.simulate(2, body, backend=backend) == [(3, losses), (0, losses)]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_hooks_of_slices_may_step_and_each_rank_has_as_many_as_it_has_pieces(backend):
    plain = made()
    plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), inputs())

    def body(world):
        model = rl.fully_shard(made(), world)
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        called = []

        def step(param):
            called.append(param)
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        plainly(model, torch.optim.SGD(model.parameters(), lr=0.0), inputs().chunk(3)[world.rank])
        return len(called), model.state_dict()

    calls, states = zip(*rl.simulate(3, body, backend=backend))
    assert len({*calls}) > 1
    for state in states:
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_sharded_part_of_a_larger_model_is_loaded_with_it(backend):
    def body(world):
        part = rl.fully_shard(made(), world)
        outer = nn.ModuleDict({"part": part, "rest": nn.Linear(2, 2)})
        state = {name: value.clone() for name, value in outer.state_dict().items()}
        part.load_state_dict({name: value * 0 for name, value in part.state_dict().items()})
        assert not outer.load_state_dict(state).missing_keys
        torch.testing.assert_close(dict(outer.state_dict()), state, rtol=0, atol=0)
        del state["rest.bias"]
        with pytest.raises(RuntimeError, match='Missing key.*"rest.bias"'):
            outer.load_state_dict(state)
        del state["part.first.bias"]
        with pytest.raises(RuntimeError, match='Missing key.*"part.first.bias"'):
            outer.load_state_dict(state)

    rl.simulate(2, body, backend=backend)


def test_strict_false_loads_what_has_a_name_of_the_model_and_says_what_it_passed_over():
    def body(world):
        part = rl.fully_shard(made(), world)
        outer = nn.ModuleDict({"part": part, "rest": nn.Linear(2, 2)})
        before, state = part.state_dict(), {name: value + 1 for name, value in part.state_dict().items()}
        del state["first.bias"]
        passed_over = part.load_state_dict(state | {"head.weight": torch.ones(3)}, strict=False)
        assert passed_over == (["first.bias"], ["head.weight"])
        torch.testing.assert_close(part.state_dict(), {**before, **state}, rtol=0, atol=0)
        passed_over = outer.load_state_dict({"part.first.bias": before["first.bias"] + 2, "part.tail": torch.ones(1)}, strict=False)
        assert sorted(passed_over.missing_keys) == sorted(outer.state_dict().keys() - {"part.first.bias"})
        assert passed_over.unexpected_keys == ["part.tail"]
        torch.testing.assert_close(part.state_dict()["first.bias"], before["first.bias"] + 2, rtol=0, atol=0)
        with pytest.raises(ModelMismatch, match="first.bias"):   # a wrong shape is no missing name
            part.load_state_dict({"first.bias": torch.ones(1)}, strict=False)
        with pytest.raises(ModelMismatch, match="rank 0 and rank 1 would load other names"):
            part.load_state_dict({} if world.rank else state, strict=False)

    rl.simulate(2, body)


def test_hooks_from_before_sharding_find_parameters_gathered():
    def hooked():
        model = Net()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, args: (args[0] * block.up.weight.sum(),))
        return model

    expect_as_plain(plainly, hooked, ranks=[(2, "gloo")])


def test_a_model_is_sharded_once_and_as_a_whole():
    def blocks_first(world):
        model = made()
        for block in model.blocks:
            rl.fully_shard(block, world)
        return model

    def blocks_in_place(world):
        model = made()
        model.blocks[0] = rl.fully_shard(model.blocks[0], world)
        return model

    def body(world):
        for start in (blocks_first, blocks_in_place, lambda world: rl.fully_shard(made(), world)):
            for wrap in (rl.fully_shard, rl.data_parallel):
                with pytest.raises(ConfigError, match="has been sharded before.*: shard a model once, as a whole"):
                    wrap(start(world), world)
            with pytest.raises(ConfigError, match="has been sharded before"):
                rl.prepare(start(world), loss=lambda model, batch: (model(batch).sum(), 1), optimizer=torch.optim.SGD, world=world)

    rl.simulate(2, body)


@pytest.mark.parametrize("options", [{"compute": torch.float16, "reduce": torch.float16}, {"compress": "fp16"}], ids=["reduce", "compress"])
@pytest.mark.parametrize("mesh", [rl.Mesh(shard=3), rl.Mesh(shard=2, replicate=2)], ids=str)
def test_a_mean_that_fp16_has_comes_out_where_the_sum_over_ranks_is_infinite(mesh, options):
    def body(world):
        wrapped = rl.fully_shard(made().float().last, world.group("shard"), replicas=world.group("replicate"), **options)
        for gradient, sync in ((20_000, True), (10_000, False), (10_000, True)):
            with contextlib.nullcontext() if sync else wrapped.no_sync():
                (wrapped(torch.full((1, WIDTH), 100.0)).float() * (gradient / 100)).sum().backward()
        return next(wrapped.parameters()).grad

    for grad in rl.simulate(mesh, body):
        if grad is not None:   # its slice is not empty
            torch.testing.assert_close(grad, torch.full_like(grad, 40_000.0), rtol=4 * 2**-11, atol=0)   # at most 4 roundings to fp16


def test_what_a_model_is_called_with_comes_in_the_format_it_computes_in():
    @dataclass
    class Beside:
        bias: torch.Tensor

    class Named(Net):
        def forward(self, x, also, beside):
            return super().forward(x[0]) + also["bias"] + beside.bias

    def body(world):
        model = rl.fully_shard(made(Named).float(), world, compute=torch.bfloat16)
        y = model([inputs().float()], also={"bias": torch.ones(WIDTH)}, beside=Beside(torch.ones(WIDTH)))
        y.square().mean().backward()
        return y.dtype, {p.grad.dtype for p in model.parameters() if p.grad is not None}

    assert rl.simulate(2, body) == [(torch.bfloat16, {torch.float32})] * 2


@pytest.mark.parametrize("units", [True, "all", None, [Block], ("Block",), (Block, None), 3.5], ids=str)
def test_units_that_are_no_policy_are_an_error(units):
    with pytest.raises(ConfigError, match=r"is no way to cut a model"):
        rl.simulate(2, lambda world: rl.fully_shard(made(), world, units=units))


def test_a_function_that_chooses_units_may_take_the_module_alone():
    def sections(world, units):
        return [section.name for section in rl.fully_shard(made(), world, units=units)._sharding.sections]

    def body(world):
        by_name = sections(world, lambda name, module: isinstance(module, Block))
        alone = sections(world, lambda module: isinstance(module, Block))
        return by_name, alone, sections(world, lambda *both: isinstance(both[1], Block)), sections(world, Block)

    for found in rl.simulate(2, body):
        assert len(found[0]) > 1 and found.count(found[0]) == 4


class Keeps(nn.Module):
    """What is read, and never called: a list of parameters, and the output layer of torch's attention."""

    def __init__(self):
        super().__init__()
        self.attention, self.scales = nn.MultiheadAttention(WIDTH, 1), nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))

    def forward(self, x):
        return self.attention(x, x, x)[0] * self.scales[0] + self.scales[1]


@pytest.mark.parametrize("units", [nn.Linear, WIDTH, lambda name, module: True], ids=["class", "size", "function"])
def test_what_is_never_called_is_no_unit(units):
    def loop(model, optimizer, x):
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(model, x[None]).backward()
            optimizer.step()

    expect_as_plain(loop, lambda: nn.Sequential(Keeps(), nn.Linear(WIDTH, WIDTH)), units=units)


@pytest.mark.parametrize("units", [nn.Conv2d, lambda name, module: False], ids=["class", "function"])
def test_units_that_find_nothing_are_an_error_that_names_what_there_is(units):
    with pytest.raises(ConfigError, match=r"finds no module in this model, which has Block, Linear, ModuleList, Net"):
        rl.simulate(2, lambda world: rl.fully_shard(made(), world, units=units))


def test_a_model_smaller_than_a_unit_is_one():
    def loop(model, optimizer, x):
        mean_square(model, x).backward()
        optimizer.step()

    expect_as_plain(loop, Net, units=10**9)


@pytest.mark.parametrize("units", [0, -3])
def test_units_of_no_parameters_are_an_error(units):
    with pytest.raises(ConfigError, match=rf"units={units}, expected a number of parameters, 1 or more"):
        rl.simulate(2, lambda world: rl.fully_shard(made(), world, units=units))


def test_ranks_with_different_models_all_raise():
    def body(world):
        with pytest.raises(ModelMismatch, match=r"rank 1 holds another model"):
            rl.fully_shard(made(Chain if world.rank else lambda: nn.Sequential(Block(), Block())), world)

    rl.simulate(2, body)


def test_a_model_that_is_not_trained_at_all_can_be_sharded_for_its_forward():
    def body(world):
        model = rl.fully_shard(made().requires_grad_(False), world)
        y = model(inputs())
        held = sum(sum(unit.held()) for section in model._sharding.sections for unit in section.units)
        return y, held

    for size, backend in [(3, "gloo"), (2, "rankloom")]:
        for y, held in rl.simulate(size, body, backend=backend):
            assert torch.equal(y, made()(inputs()))
            assert held < sum(param.nbytes for param in made().parameters()) / size + 64 * 20 * size


# ---------------------------------------------------------------------- models without memory

def filled(name: str, tensor: torch.Tensor) -> None:
    """Values that depend on the name alone."""
    draw = torch.Generator().manual_seed(len(name) * 31 + ord(name[-1]))
    tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * 0.3)


@pytest.mark.parametrize("size, backend", RANKS)
def test_a_model_on_the_meta_device_is_filled_unit_by_unit(size, backend):
    plain = Net(Normed).double()
    with torch.no_grad():
        for name, tensor in plain.state_dict(keep_vars=True).items():
            filled(name, tensor)
    expected = plain(inputs())

    def body(world):
        with torch.device("meta"):
            model = Net(Normed).double()
        sharded = rl.fully_shard(model, world, fill=filled)
        return sharded(inputs())

    for y in rl.simulate(size, body, backend=backend):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_fill_is_for_models_on_the_meta_device():
    with pytest.raises(ConfigError, match="meta device, and to no other"):
        rl.simulate(2, lambda world: rl.fully_shard(made(), world, fill=filled))


@pytest.mark.parametrize(("fill", "told"), [
    (3, "fill=3 cannot be called, expected a function of"), (lambda name, x: None, "`fill` gave 16 tensors no values"),
    (lambda name, x: x.resize_(3), "`fill` made first.weight another tensor")])
def test_what_is_wrong_with_fill_is_told_of_fill(fill, told):
    def body(world):
        with torch.device("meta"):
            model = Net()
        rl.fully_shard(model, world, fill=fill)

    with pytest.raises(ConfigError, match=told):
        rl.simulate(2, body)


def test_a_model_without_values_and_without_fill_is_an_error_that_says_what_to_give():
    with pytest.raises(ConfigError, match="first.weight is on the meta device and has no values: give `fill`"):
        rl.simulate(2, lambda world: rl.fully_shard(Net().to("meta"), world))


@pytest.mark.parametrize("size, backend", [(1, "gloo"), (2, "rankloom")])
def test_derivatives_by_torch_func_between_steps_change_no_step_where_parameters_stay(size, backend):
    def train(model, rows):
        optimizer = adamw(model.parameters())
        for _ in range(3):
            by_input = torch.func.grad(lambda x: torch.sin(model(x)).sum())(rows)
            optimizer.zero_grad()
            model(rows + by_input).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    def body(world):
        sharded = rl.fully_shard(made(), world)
        return train(sharded, inputs().chunk(world.size)[world.rank])

    expected = train(made(), inputs())
    for found in rl.simulate(size, body, backend=backend):
        torch.testing.assert_close(found, dict(expected), rtol=1e-12, atol=1e-12)




def test_fewer_than_no_units_ahead_are_refused():
    with pytest.raises(rl.ConfigError, match="ahead=-1, expected 0 or more"):
        rl.simulate(2, lambda world: rl.fully_shard(torch.nn.Linear(2, 2), world, ahead=-1))


@pytest.mark.parametrize("wrong, says", [
    ({"model": nn.ReLU()}, "a ReLU without parameters has nothing to shard"),
    ({"model": {}}, "model is of type dict, expected a torch module"),
    ({"group": None}, r"group=None is of type NoneType, expected a Group: .* or rl.Group\(process_group\)"),
    ({"compute": "bf16"}, "compute='bf16' is of type str, expected a torch dtype, such as torch.bfloat16"),
])
def test_an_argument_of_another_kind_is_told_what_it_should_be(wrong, says):
    def body(world):
        with pytest.raises(ConfigError, match=says):
            rl.fully_shard(**({"model": nn.Linear(2, 2), "group": world} | wrong))

    rl.simulate(2, body)


def test_a_reentrant_checkpoint_around_several_units_is_told_what_to_do():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))

    def body(world, reentrant):
        sharded = rl.fully_shard(copy.deepcopy(model), world, units=nn.Sequential)
        blocks = list(sharded.module)[1:5]
        sharded.module.forward = lambda x: sharded.module[5](checkpoint_sequential(
            nn.Sequential(*blocks), 2, sharded.module[0](x), use_reentrant=reentrant))
        sharded(torch.ones(2, 4)).sum().backward()

    rl.simulate(2, lambda world: body(world, False))
    with pytest.raises(rl.UnitError, match="came after section .* was reduced; a reentrant checkpoint .* give it use_reentrant=False"):
        rl.simulate(2, lambda world: body(world, True))
