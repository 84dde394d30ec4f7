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
    """

    def __init__(self, model: nn.Module, tokens: Group):
        self.model, self.tokens = model, tokens
        self.layers = expert_layers(model)
        for layer in self.layers.values():
            layer.adds_up = True   # a loss may call the model several times, or in evaluation mode too

    def __bool__(self) -> bool:
        return bool(self.layers)

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
        taken = self._taken(totals)
        return torch.stack((totals[0] - taken, totals[1], taken))

    def _taken(self, totals: Tensor) -> Tensor:
        """The auxiliary losses since the last call, which are part of the sum in `totals`."""
        taken = take_reported_auxiliary_loss(self.layers.values())
        return torch.zeros_like(totals[0]) if taken is None else taken

    def count_tokens(self, *, move: bool) -> dict[str, Load]:
        """After a step: layer -> tokens per expert. move: also adjust the routers' biases. A collective of `tokens`."""
        return rebalance(self.layers, self.tokens, move=move)


class StagedExpertBooks(ExpertBooks):
    """The MoE layers of a pipeline: sums and counts are over all stages.

    pipe:  the ranks of the stages
    names: of the MoE layers of all stages, in the order of the model
    """

    def __init__(self, model: nn.Module, tokens: Group, pipe: Group, names: Sequence[str]):
        super().__init__(model, tokens)
        self.pipe, self.names = pipe, names

    def __bool__(self) -> bool:
        return bool(self.names)

    def _taken(self, totals: Tensor) -> Tensor:
        return self.pipe.all_reduce(super()._taken(totals), label="auxiliary losses")

    def count_tokens(self, *, move: bool) -> dict[str, Load]:
        """As `ExpertBooks.count_tokens`, for the layers of all stages. A collective of `pipe` too."""
        mine = super().count_tokens(move=move)
        if not self:
            return mine
        numbers = {name: [*load.routed, load.dropped] for name, load in mine.items()}
        told = self.pipe.all_gather_object(numbers, label="tokens of experts")
        loads = {name: Load(tuple(routed), dropped) for stage in told for name, (*routed, dropped) in stage.items()}
        return {name: loads[name] for name in self.names}
