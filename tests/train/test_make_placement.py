"""Optimizers that look at whole tensors, and ranks that hold parts of them: right, or refused; never something in between."""

import pytest
import torch

import rankloom as rl
from rankloom import GPT, GPTConfig
from rankloom.base.errors import ConfigError
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss


def adafactor(params):
    return torch.optim.Adafactor(params)


def muon(params):
    return [torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.02),
            torch.optim.AdamW([param for param in params if param.ndim != 2], lr=1e-2)]


def hooked(params, *, says=False):
    """Clips each tensor by itself."""
    optimizer = torch.optim.SGD(params, lr=0.5)

    def clip(*_):
        for param in params:
            torch.nn.utils.clip_grad_norm_([param], 0.1)

    optimizer.register_step_pre_hook(clip)
    if says:
        optimizer.elementwise = True
    return optimizer


class Listing(torch.optim.Optimizer):
    """Steps over a list of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})
        self.mine = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.mine:
            if param.grad is not None:
                param.sub_(0.5 * param.grad)


class Wrapping(torch.optim.Optimizer):
    """Has groups of its own, and leaves the step to another optimizer."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, {"lr": 0.5})
        self.inner = torch.optim.Adagrad(params, lr=0.1)

    def step(self, closure=None):
        self.inner.step()


def losses(world, optimizer, stage=0, experts=0):
    moe = MoEConfig(experts=experts, top_k=1, ffn=16) if experts else None
    config = GPTConfig(vocab_size=32, width=16, layers=2, heads=4, kv_heads=2, ffn=24, seq_len=8, tie=True, moe=moe)
    engine = rl.prepare(GPT(config, dtype=torch.float64), loss=language_model_loss, optimizer=optimizer, world=world, stage=stage)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (3, 4, 9), generator=draw).tensor_split(engine.group.size, 1)[engine.group.rank]
    return [engine.step((batch[:, :-1].contiguous(), batch[:, 1:].contiguous())).loss for batch in tokens]


@pytest.mark.filterwarnings("ignore:Wrapping has another optimizer in it .`inner`")
@pytest.mark.parametrize("optimizer", [adafactor, muon, hooked, Listing, Wrapping], ids=lambda make: make.__name__)
@pytest.mark.parametrize("mesh, stage", [(rl.Mesh(shard=2), 3), (rl.Mesh(pipe=2), 0), (rl.Mesh(context=2, shard=2), 1)], ids=str)
def test_where_ranks_are_dealt_whole_tensors_the_update_is_that_of_one_process(optimizer, mesh, stage):
    expected = rl.simulate(1, lambda world: losses(world, optimizer))[0]
    for found in rl.simulate(mesh, lambda world: losses(world, optimizer, stage)):
        assert found == pytest.approx(expected, rel=1e-12)


def freezing(params):
    params[0].requires_grad_(False)
    return torch.optim.SGD(params, lr=0.1)


def hooking(params):
    params[0].register_hook(lambda grad: grad * 0)
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize("optimizer", [freezing, hooking], ids=lambda make: make.__name__)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_would_do_nothing_to_pieces_of_parameters_is_refused(optimizer, stage):
    with pytest.raises(ConfigError, match=r"the optimizer's function has (frozen|hooked) embedding.weight: it would do nothing"):
        rl.simulate(rl.Mesh(shard=2), lambda world: losses(world, optimizer, stage))


def test_an_optimizer_inside_another_is_said_to_be_missing_in_checkpoints():
    with pytest.warns(UserWarning, match=r"Wrapping has another optimizer in it \(`inner`\): it trains, but checkpoints"):
        rl.simulate(1, lambda world: losses(world, Wrapping))


@pytest.mark.parametrize("optimizer, mesh, experts", [
    (adafactor, rl.Mesh(tensor=2), 0), (muon, rl.Mesh(tensor=2), 0), (hooked, rl.Mesh(tensor=2), 0), (adafactor, rl.Mesh(expert=2), 2),
    (hooked, rl.Mesh(expert=2), 2),   # Muon has matrices only; experts are three-dimensional
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_where_ranks_hold_parts_of_a_tensor_it_is_refused_on_all_of_them(optimizer, mesh, experts):
    def body(world):
        with pytest.raises(ConfigError, match=r"may look at whole tensors.*Ranks along tensor and expert hold parts"):
            losses(world, optimizer, experts=experts)

    rl.simulate(mesh, body)


def test_an_optimizer_that_says_it_is_elementwise_is_believed():
    assert len(rl.simulate(rl.Mesh(tensor=2), lambda world: losses(world, lambda params: hooked(params, says=True)))) == 2
