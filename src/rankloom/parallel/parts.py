"""What a rank holds of a model that is split over the axes `tensor` and `expert`, before the data axes cut or repeat it.

    split over tensor    parallel/tensor/holding.py: spans of one dim; a few parameters are whole, or shared by some ranks
    split over expert    a run of the experts of each layer, along dim 0 (parallel/expert.py); everything else is whole

From that follow the three things that whoever sums, measures and saves has to know of each parameter: over which ranks its gradient
is a sum, on how many ranks the same elements lie (a norm counts them once), and how its whole is put together and cut again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankloom.parallel.expert import gradient_axes
from rankloom.parallel.tensor.holding import Holding, holdings
from rankloom.world.group import Group


@dataclass(frozen=True)
class Parts:
    """The parts that this rank holds.

    tensor, expert, context: the groups of these axes; of one rank where the mesh has none
    held:    how each parameter lies over the tensor axis
    experts: names of parameters of which every rank of the expert axis has other experts
    """

    tensor: Group
    expert: Group
    context: Group
    held: Mapping[str, Holding]
    experts: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, tensor: Group, expert: Group, context: Group) -> "Parts":
        """Those of a model that `tensor_parallel` and `expert_parallel` have split."""
        spread = frozenset(name for name, axes in gradient_axes(model).items() if "expert" not in axes) if expert.size > 1 else frozenset()
        return cls(tensor, expert, context, holdings(model), spread)

    def copies(self, name: str) -> int:
        """On how many ranks of the two axes the elements lie that this rank holds."""
        alike = len(self.held[name].same(self.tensor.rank, self.tensor.size)) if self.tensor.size > 1 else 1
        return alike * (1 if name in self.experts else self.expert.size)

    @torch.no_grad()
    def join(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor that lies like parameter `name`, on every rank. A collective.

        raises: ShapeMismatch when it does not
        """
        holding = self.held.get(name)
        if holding is not None and holding.dim is not None and self.tensor.size > 1:
            rows = self.tensor.all_gather(part.contiguous().unsqueeze(0), label=f"whole {name}")
            part = holding.join(rows.unbind(0))
        if name in self.experts:
            part = self.expert.all_gather(part.contiguous(), label=f"whole {name}")
        return part

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that lies like parameter `name`."""
        whole, holding = self._own_experts(name, whole), self.held.get(name)
        return holding.cut(whole, self.tensor.rank) if holding is not None and self.tensor.size > 1 else whole

    def cut_into(self, part: Tensor, name: str, whole: Tensor) -> None:
        """The same, in memory that is there."""
        whole, holding = self._own_experts(name, whole), self.held.get(name)
        if holding is not None and self.tensor.size > 1:
            holding.cut_into(part, whole, self.tensor.rank)
        else:
            part.copy_(whole)

    def _own_experts(self, name: str, whole: Tensor) -> Tensor:
        each = whole.shape[0] // self.expert.size if name in self.experts else 0
        return whole[self.expert.rank * each : (self.expert.rank + 1) * each] if each else whole

    def whole_shape(self, name: str, part: torch.Size) -> torch.Size:
        """The shape that `join` gives to a part of this shape."""
        holding = self.held.get(name)
        shape = torch.Size(holding.shape) if holding is not None else part
        return torch.Size((part[0] * self.expert.size, *part[1:])) if name in self.experts else shape
