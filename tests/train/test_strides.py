"""Parameters may lie in memory in any order of dims. Fused kernels pair a parameter with its gradient and its state by places in memory."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.parallel.replicas.equal_start import make_replicas_equal

RTOL = 1e-12   # fp64: the same terms in another order
FUSED = {
    "adamw": partial(torch.optim.AdamW, lr=0.05, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, fused=True),   # has state from the start
}
MESHES = [(rl.Mesh(), 0), (rl.Mesh(replicate=2), 0), (rl.Mesh(replicate=3), 0), (rl.Mesh(shard=2), 1), (rl.Mesh(shard=2), 3)]


class Strided(nn.Module):
    """A convolution in channels_last, a transposed matrix, and an embedding that lies column by column."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
        self.table = nn.Embedding(16, 12, dtype=torch.float64)
        self.table.weight = nn.Parameter(draw(12, 16).t())
        self.convolution = nn.Conv2d(3, 4, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.convolution.weight.copy_(draw(4, 3, 2, 2))
            self.convolution.bias.copy_(draw(4))
        self.matrix = nn.Parameter(draw(5, 4).t())

    def forward(self, numbers):
        x = self.table(numbers).view(len(numbers), 3, 2, 2)
        return self.convolution(x).flatten(1).tanh() @ self.matrix


def loss(model, numbers):
    return model(numbers).square().sum(), len(numbers)


def rows(seed):
    return torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(seed))


def plain_steps(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        total, count = loss(model, rows(seed))
        (total / count).backward()
        optimizer.step()


def trained_plain(name):
    """A model of one process after 4 steps, its optimizer, and copies of the model and the optimizer's state after 2."""
    plain = Strided()
    optimizer = FUSED[name](plain.parameters())
    plain_steps(plain, optimizer, range(2))
    middle, state = copy.deepcopy(plain), copy.deepcopy(optimizer.state_dict())
    plain_steps(plain, optimizer, range(2, 4))
    return plain, optimizer, middle, state


def steps(engine, seeds):
    for seed in seeds:
        engine.step(rows(seed).tensor_split(engine.group.size)[engine.group.rank])


def expect_equal(found, plain):
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("way", ["straight", "full_state_dict", "disk", "a plain optimizer's state"])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("mesh", "stage"), MESHES, ids=str)
def test_training_goes_on_as_in_one_process(mesh, stage, name, way, tmp_path):
    plain, optimizer, middle, state = trained_plain(name)

    def body(world):
        prepared = lambda model: rl.prepare(model, loss=loss, optimizer=FUSED[name], world=world, stage=stage)
        if way == "a plain optimizer's state":
            other = prepared(copy.deepcopy(middle))
            other.optimizer.load_state_dict(copy.deepcopy(state))
        else:
            other = engine = prepared(Strided())
            steps(engine, range(2))
        if way == "full_state_dict":
            other = prepared(Strided())
            other.load_full_state_dict(engine.full_state_dict())
        elif way == "disk":
            engine.save(tmp_path)
            other = prepared(Strided())
            other.load(tmp_path)
        steps(other, range(2, 4))
        return other.full_state_dict()

    for found in rl.simulate(mesh, body):
        expect_equal(found["model"], plain)
        remembered = found["optimizer"]["state"]
        for key, param in plain.named_parameters():
            for what, value in optimizer.state[param].items():
                torch.testing.assert_close(remembered[key][what].to(value), value, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("name", FUSED)
def test_a_loop_of_one_s_own_takes_a_plain_optimizer_s_state_too(name):
    plain, _, middle, state = trained_plain(name)

    def body(world):
        replica = rl.data_parallel(copy.deepcopy(middle), world)
        mine = FUSED[name](replica.parameters())
        mine.load_state_dict(copy.deepcopy(state))
        for seed in range(2, 4):
            mine.zero_grad()
            total, _ = loss(replica, share := rows(seed).tensor_split(world.size)[world.rank])
            (total / len(share)).backward()
            mine.step()
        return replica.module.state_dict()

    for found in rl.simulate(3, body):
        expect_equal(found, plain)


def test_replicas_lie_in_memory_as_that_of_rank_0_does():
    def body(world, strided):
        model = Strided()
        if world.rank not in strided:
            for param in model.parameters():
                param.data = param.data.contiguous()
        make_replicas_equal(model, world)
        return {key: param.stride() for key, param in model.named_parameters()}, model.state_dict()

    lying = {key: param.stride() for key, param in Strided().named_parameters()}
    for strided in ({0}, {1, 2}):
        for found, state in rl.simulate(3, partial(body, strided=strided)):
            assert (found == lying) == (0 in strided)
            assert all(torch.equal(state[key], value) for key, value in Strided().state_dict().items())


@pytest.mark.parametrize("compress", ["powersgd:2", "int8"])
def test_strided_gradients_are_compressed_as_they_lie(compress):
    """A sum of two matrices of rank 1 has rank 2, and a rank of 2 holds all of it: the matrix must not be read in another order."""
    def body(world):
        model = nn.Linear(20, 12, bias=False)
        model.weight = nn.Parameter(torch.zeros(20, 12).t())
        x = torch.randn(1, 20, generator=torch.Generator().manual_seed(world.rank))
        y = torch.randn(1, 12, generator=torch.Generator().manual_seed(9 + world.rank))
        replica, sums = rl.data_parallel(model, world, compress=compress), []
        for _ in range(6):
            replica.zero_grad()
            (replica(x) * y).sum().backward()
            sums.append(model.weight.grad.clone())
        return sums[-1], torch.stack(sums[1:]).mean(0), y.t() @ x

    (last, mean, one), (*_, other) = rl.simulate(2, body)
    exact = (one + other) / 2
    assert last.stride() == (1, 12)
    assert ((last if compress != "int8" else mean) - exact).norm() < (1e-4 if compress != "int8" else 1e-2) * exact.norm()


def test_a_convolution_of_one_channel_has_the_same_bits_on_any_ranks_in_whatever_format_it_was_made():
    """Both formats lie alike in memory where there is one channel, and torch takes the kernel that the strides name."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
    start = nn.Sequential(nn.Linear(8, 8), first, nn.PReLU(3), nn.Conv2d(3, 1, 1)).double()
    rows = torch.randn(24, 1, 5, 8, dtype=torch.float64)

    def losses(world, stage):
        engine = rl.prepare(copy.deepcopy(start), loss=lambda model, x: ((model(x) - x.flip(2)).square().sum(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), stage=stage, deterministic=4)
        return [engine.step(rows.tensor_split(world.size)[world.rank]).loss for _ in range(5)]

    found = [rl.simulate(p, lambda world, stage=stage: losses(world, stage))[0] for p, stage in ((1, 0), (2, 0), (1, 2), (4, 3))]
    assert found[1:] == found[:1] * 3
