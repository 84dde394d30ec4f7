"""What the MoE layers of a step report beside the loss: their auxiliary losses, and how many tokens each expert got.

Auxiliary losses are trained on, but are not part of the reported loss: the totals of a step list them apart from the loss sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankloom.base.events import Load
from rankloom.base.loss import take_auxiliary_loss
from rankloom.models.moe import take_reported_auxiliary_loss
from rankloom.parallel.expert import expert_layers, rebalance
from rankloom.world.group import Group


class ExpertBooks:
    """The MoE layers of one model. False if it has none, on this rank or others: then nothing is done.

    tokens: the ranks over which a step's tokens are distributed
    pipe:   the ranks of a pipeline's stages: sums and counts are over all stages
    names:  of the MoE layers of all stages, in the order of the model; left out, those of this rank
    """

    def __init__(self, model: nn.Module, tokens: Group, pipe: Group, names: Sequence[str] | None = None):
        self.model, self.tokens, self.pipe = model, tokens, pipe
        self.layers = expert_layers(model)
        self.names = tuple(self.layers) if names is None else names
        for layer in self.layers.values():
            layer.adds_up = True   # a loss may call the model several times, or in evaluation mode too

    def __bool__(self) -> bool:
        return bool(self.names)

    def begin_step(self) -> None:
        """Clear what a failed step, or a forward of the user's, left behind."""
        self.forget_auxiliary()
        for layer in self.layers.values():
            layer.routed = layer.dropped = None

    def forget_auxiliary(self) -> None:
        """Clear the auxiliary losses that nobody took."""
        take_auxiliary_loss(self.model)
        take_reported_auxiliary_loss(self.layers.values())

    def with_auxiliary(self, loss: Tensor) -> Tensor:
        """The loss sum to train on: adds the auxiliary losses of the forward, unless the model's own loss has added them."""
        extra = take_auxiliary_loss(self.model) if self else None
        return loss if extra is None else loss + extra

    def split(self, totals: Tensor) -> Tensor:
        """fp64 [sum, count] of `with_auxiliary` -> [sum without auxiliary losses, count, auxiliary losses]."""
        if not self:
            return totals
        here = take_reported_auxiliary_loss(self.layers.values())   # since the last call
        taken = self.pipe.all_reduce(torch.zeros_like(totals[0]) if here is None else here, label="auxiliary losses")
        return torch.stack((totals[0] - taken, totals[1], taken))

    def count_tokens(self, *, move: bool) -> dict[str, Load]:
        """After a step: layer -> tokens per expert. move: also adjust the routers' biases. A collective of `tokens` and `pipe`."""
        mine = rebalance(self.layers, self.tokens, move=move)
        if self.pipe.size == 1 or not self:
            return mine
        told = self.pipe.all_gather_object({name: [*load.routed, load.dropped] for name, load in mine.items()}, label="tokens of experts")
        loads = {name: Load(tuple(routed), dropped) for stage in told for name, (*routed, dropped) in stage.items()}
        return {name: loads[name] for name in self.names}
