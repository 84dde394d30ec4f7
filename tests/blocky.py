"""The model that breaks careless sharding: blocks that are tied, nested, called twice, in changing order, or not at all."""

import torch
from torch import nn

from awkward import VOCAB, WIDTH, drawn, loss_sum


class Inner(nn.Module):
    """A block inside a block, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Parameter(torch.zeros(2))   # fewer elements than ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lift(x)) * self.odd.sum()


class Block(nn.Module):
    """A norm, two matrices of which one is frozen, an inner block, and a matrix that only some batches use."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(2, 3)
        self.inner = Inner()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(self.frozen(x)))))
        if rows.any():
            y = y + rows[:, None, None] * self.sometimes(x)
        return x + self.drop(y) + self.inner(x)


class Blocky(nn.Module):
    """Five blocks: 0 and 2 share a matrix, 1 runs twice, 3 and 2 change places every other step, 4 never runs."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(5))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("swap", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        rows = (tokens == 0).any(dim=1)
        order = (0, 1, 2, 1, 3) if tokens.shape[1] % 2 == 0 else (0, 1, 3, 1, 2)
        for at in order:
            x = self.blocks[at](x, rows)
        return self.head(self.norm(x))


def make_blocky(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Blocky:
    """The same at every call."""
    return drawn(Blocky(dropout), dtype, seed=11)


def make_turns(steps: int = 5, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of alternating length, which changes the order of the blocks; token 0 appears in a few rows only."""
    draw = torch.Generator().manual_seed(5)
    batches = []
    for step in range(steps):
        length = 6 - step % 2
        tokens = torch.randint(1, VOCAB, (rows, length), generator=draw)
        tokens[4, 2] = 0
        targets = torch.randint(0, VOCAB, (rows, length), generator=draw)
        lengths = torch.randint(1, length + 1, (rows,), generator=draw)
        targets[torch.arange(length) >= lengths[:, None]] = -100
        batches.append((tokens, targets))
    return batches


def loss_with_penalty(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], *, first: bool) -> tuple[torch.Tensor, int]:
    """And the squares of all parameters, which the loss reads itself: before the model is called, or after."""
    before = _squares(model) if first else None
    total, count = loss_sum(model, batch)
    return total + 0.01 * count * (_squares(model) if before is None else before), count


def _squares(model: nn.Module) -> torch.Tensor:
    return torch.stack([param.square().sum() for param in model.parameters() if param.requires_grad]).sum()
