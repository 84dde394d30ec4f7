"""A model of awkward shapes, optimizers of all kinds, gradients that all ranks know, and the same training whole and in slices."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rankloom.shard.layout import lay_out_evenly
from rankloom.shard.matrices import lay_out_matrices
from rankloom.shard.optimizer import ParameterSlice, give_owners, make_optimizer, needs_whole_matrices, stand_in

optim = torch.optim
SHAPES = {"wide": (9, 23), "bias": (17,), "pair": (2,), "scale": (), "tall": (40, 3), "unused": (5, 5), "cube": (3, 4, 5)}
STEPS = 5


def by_dims(params):
    """Weight decay for matrices only, as people write it."""
    return torch.optim.AdamW([{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
                              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}], lr=0.1)


def muon_and_adamw(params):
    """Two optimizers: one for the matrices, one for all else."""
    matrices = [p for p in params if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.1)]


class RowNorm(torch.optim.Optimizer):
    """One of the user's own that looks at rows, and does not say that it does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True), alpha=0.1)


class Sign(torch.optim.Optimizer):
    """One of the user's own, elementwise, that says so."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad.sign(), alpha=0.1)


ELEMENTWISE = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "adam amsgrad fused": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, fused=True),
    "by dims": by_dims,
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd nesterov fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "sgd and adamw": lambda p: (optim.SGD([q for q in p if q.ndim < 2], lr=0.1), optim.AdamW([q for q in p if q.ndim >= 2], lr=0.1)),
    "own": Sign,
}
WHOLE = {
    "muon": muon_and_adamw,
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "own rows": lambda p: RowNorm([q for q in p if q.ndim]),
}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Values for all parameters, the same for whoever asks."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Of all parameters but one, of very different sizes."""
    return {name: grad * 10.0 ** (step - 2) for name, grad in draw(100 + step, dtype).items() if name != "unused"}


def train_whole(build: Callable, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> tuple[dict[str, nn.Parameter], Any]:
    """One process: the truth."""
    params = {name: nn.Parameter(value) for name, value in draw(0, dtype).items()}
    optimizer = make_optimizer(build, params)
    run(optimizer, params, {name: ParameterSlice(name, p.shape, 0, p.numel()) for name, p in params.items()}, range(steps), dtype)
    return params, optimizer


class Slices:
    """What one rank of `ranks` has: owners, slices, and an optimizer over them."""

    def __init__(self, build: Callable, rank: int, ranks: int, dtype: torch.dtype = torch.float32):
        plain = draw(0, dtype)
        stand_ins = {name: stand_in(nn.Parameter(value)) for name, value in plain.items()}
        self.rank, self.ranks, self.dtype = rank, ranks, dtype
        self.optimizer = make_optimizer(build, stand_ins)
        self.whole = needs_whole_matrices(self.optimizer, stand_ins)
        lay_out = lay_out_matrices if self.whole else lay_out_evenly
        layout = lay_out({name: value.shape for name, value in plain.items()}, dtype.itemsize, ranks)
        self.slices = {name: ParameterSlice(name, value.shape, *layout.slice_of(name, rank)) for name, value in plain.items()}
        own = {name: self.slices[name].cut(value).clone() for name, value in plain.items()}
        if self.whole:
            own = {name: own[name].view(plain[name].shape) if self.slices[name].is_whole else own[name] for name in own}
        give_owners(self.optimizer, stand_ins, {name: nn.Parameter(value) for name, value in own.items()}, self.slices)
        self.owners = stand_ins

    def train(self, steps: range = range(STEPS)) -> "Slices":
        """Update by this rank's slices of the gradients."""
        run(self.optimizer, self.owners, self.slices, steps, self.dtype)
        return self


def run(optimizer: Any, owners: dict[str, nn.Parameter], slices: dict[str, ParameterSlice], steps: range, dtype: torch.dtype) -> None:
    """Steps with given gradients; an owner of nothing has none."""
    for step in steps:
        for name, grad in gradients(step, dtype).items():
            if not slices[name].is_empty:
                owners[name].grad = slices[name].cut(grad).clone().view(owners[name].shape)
        optimizer.step()


def plain_state(params: dict[str, nn.Parameter], optimizer: Any) -> dict[str, dict[str, Any]]:
    """The state of one process by name."""
    return {name: optimizer.state[p] for name, p in params.items() if p in optimizer.state}
