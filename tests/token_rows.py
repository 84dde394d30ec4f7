"""Global batches of tokens and targets, whose rows hold different numbers of targets."""

import torch


def token_batches(rows: int, tokens: int, vocab: int, beyond: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches. Rows `beyond` + 2, + 3 ... counted from 0, lack their last 1, 2 ... targets."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        drawn = torch.randint(0, vocab, (rows, tokens + 1), generator=draw)
        targets = drawn[:, 1:].clone()
        targets[torch.arange(rows)[:, None] + torch.arange(tokens) > tokens + beyond] = -100
        found.append((drawn[:, :-1].contiguous(), targets))
    return found
