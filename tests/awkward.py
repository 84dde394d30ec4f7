"""The model and data that break careless data parallelism, and the plain torch loop that everything is compared with."""

import hashlib
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from closeness import tensors_of

VOCAB, WIDTH = 17, 12
Model = TypeVar("Model", bound=nn.Module)


class Awkward(nn.Module):
    """Tied embedding and head, a frozen layer, one nobody uses, one used only for some batches, and dropout on request."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rows = nn.Embedding(64, WIDTH)          # untied: its gradient is mostly rows of zeros
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dims at all
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.rows(tokens)
        x = x + self.drop(self.out(torch.tanh(self.hidden(self.frozen(x)))))
        rows = (tokens == 0).any(dim=1)
        if rows.any():                                # some micro-batches use this layer, others do not
            x = x + rows[:, None, None] * self.sometimes(x)
        return self.head(x * self.scale)


class Dies(nn.Module):
    """The identity, until it is told to die in forward or in backward."""

    when = ""

    def forward(self, x):
        if self.when == "forward":
            raise ArithmeticError("died in forward")
        if self.when == "backward" and x.requires_grad:
            x.register_hook(self.die)
        return x * 1.0

    def die(self, grad):
        """In the middle of a backward."""
        raise ArithmeticError("died in backward")


def drawn(model: Model, dtype: torch.dtype = torch.float64, *, seed: int = 2, scale: float = 0.3) -> Model:
    """With equal weights at every call, whatever thread asks."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draw) * scale)
    return model.to(dtype)


def make_model(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Awkward:
    """The same at every call."""
    return drawn(Awkward(dropout), dtype, seed=7)


def loss_sum(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross-entropy over the targets that are not padding: (sum, count)."""
    tokens, targets = batch
    logits = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def make_batches(steps: int = 5, rows: int = 25) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches whose rows hold very different numbers of tokens; token 0 appears in a few rows only."""
    draw = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(1, VOCAB, (rows, 6), generator=draw)
        tokens[4, 2] = 0
        targets = torch.randint(0, VOCAB, (rows, 6), generator=draw)
        lengths = torch.randint(1, 7, (rows,), generator=draw)
        targets[torch.arange(6) >= lengths[:, None]] = -100
        batches.append((tokens, targets))
    return batches


def share(batch: tuple[torch.Tensor, ...], rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """This rank's contiguous rows; uneven where ranks do not divide."""
    return tuple(t.tensor_split(ranks)[rank] for t in batch)


def adamw(params):
    """The optimizer of all these tests; weight decay moves what a careless zero gradient would."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train_plainly(clip: float | None = None, optimizer=adamw, *, model: nn.Module | None = None, batches: list | None = None,
                  loss=loss_sum) -> dict:
    """Plain torch on one process with whole batches: the truth. Five steps of the model above, unless told otherwise.

    optimizer: makes one of the trained parameters, or a list of several
    """
    model = make_model() if model is None else model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = optimizer(list(trained.values()))
    updates = made if isinstance(made, list) else [made]
    losses, norms = [], []
    for batch in batches or make_batches():
        model.zero_grad(set_to_none=True)
        total, count = loss(model, batch)
        (total / count).backward()
        norms.append(nn.utils.clip_grad_norm_(trained.values(), clip or float("inf")).item())
        for update in updates:
            update.step()
        losses.append((total / count).item())
    held = {p: state for update in updates for p, state in update.state.items()}
    return {"params": dict(model.state_dict()), "grads": {n: p.grad for n, p in trained.items()}, "losses": losses, "norms": norms,
            "optimizer": {n: held[p] for n, p in trained.items() if p in held}}


def fingerprint(state: dict, losses: list[float]) -> str:
    """SHA-256 over every bit of parameters, optimizer state and reported losses."""
    digest = hashlib.sha256(repr([value.hex() for value in losses]).encode())
    tensors = tensors_of(state)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
