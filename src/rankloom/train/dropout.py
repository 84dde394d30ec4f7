"""Dropout that does not depend on the layout: its mask is keyed by (seed, step, module name, global micro-batch).

torch's own draws from one generator per process, so the masks change with the number of ranks, and a resumed run must
restore that generator. Here there is nothing to restore. `nn.Dropout` modules of a prepared model are replaced; a
functional `F.dropout` inside a model is out of reach and stays as it is.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rankloom.base.rng import stream


@dataclass(slots=True)
class DropoutKey:
    """Which micro-batch of which step is running: half of every mask's key."""

    seed: int
    step: int = 0
    microbatch: int = 0
    calls: dict[str, int] = field(default_factory=dict)   # a module used twice must not repeat its mask

    def move_to(self, step: int, microbatch: int) -> None:
        """Before each micro-batch. `microbatch` counts over all ranks."""
        self.step, self.microbatch = step, microbatch
        self.calls.clear()

    def generator(self, name: str, device: torch.device) -> torch.Generator:
        """The stream for the next call of module `name`."""
        call = self.calls[name] = self.calls.get(name, -1) + 1
        return stream(self.seed, "dropout", self.step, self.microbatch, name, call, device=device)


class KeyedDropout(nn.Module):
    """Zero each element with probability `p` in training, and scale the others by 1/(1-p)."""

    def __init__(self, p: float, name: str, key: DropoutKey):
        super().__init__()
        self.p, self.name, self.key = p, name, key

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"p={self.p}, keyed"

    def forward(self, x: Tensor) -> Tensor:
        """x: any shape"""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        kept = torch.empty_like(x).bernoulli_(1.0 - self.p, generator=self.key.generator(self.name, x.device))
        return x * kept.mul_(1.0 / (1.0 - self.p))


def key_dropout(model: nn.Module, key: DropoutKey) -> int:
    """Replace every `nn.Dropout` inside `model` by a keyed one; returns how many there were."""
    # One module may hang in several places; each place has its own name, so its own masks.
    found = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Dropout]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, KeyedDropout(module.p, name, key).train(module.training))
    return len(found)
