"""The gated MLP of a block."""

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """SwiGLU: a gate scales each inner value. Source: Shazeer 2020."""

    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., W] -> [..., W]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))   # type: ignore[no-any-return]
