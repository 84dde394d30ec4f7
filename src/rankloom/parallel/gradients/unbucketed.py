"""Gradients that are in no bucket: in the first backward all of them, later those of embeddings that are sent by rows."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rankloom.base.tensors import copy_into
from rankloom.parallel.gradients.forward_writes import ForwardWrites
from rankloom.world.group import Group


class UnbucketedGradients:
    """They stay where autograd made them. The order in which they arrive in the first backward is that of the buckets.

    arrived: names, in order of arrival: their gradients are of this rank alone
    """

    def __init__(self, params: Mapping[str, nn.Parameter]):
        self.arrived: dict[str, None] = {}
        self._writes: ForwardWrites | None = ForwardWrites(params)   # None after the first step

    @property
    def is_first_step(self) -> bool:
        """Whether no step has ended yet."""
        return self._writes is not None

    def begin_forward(self) -> None:
        """Before a forward: note what it may write."""
        if self._writes is not None:
            self._writes.begin(may_have_stepped=bool(self.arrived))   # an optimizer steps on a gradient

    def land(self, name: str, param: Tensor, owner: Tensor, gradient: Tensor) -> None:
        """Add `gradient`, which backward has just written to `param.grad`, to `owner.grad`.

        owner:  the tensor that the optimizer updates: `param` itself, or its master copy in another dtype
        raises: UnitError when the first forward has written to `param`, and not to its master
        """
        self.arrived.setdefault(name)
        if self._writes is not None:
            self._writes.expect_kept(name, param, owner)
        if owner is not param:
            owner.grad = _converted(gradient, owner.dtype) if owner.grad is None else owner.grad.add_(gradient)
            param.grad = None

    def digest_of_writes(self) -> int:
        """A checksum of the parameters that the first forward has written; 0 for none."""
        return 0 if self._writes is None else self._writes.digest()

    def expect_same_writes(self, first: int, group: Group) -> None:
        """After the first backward: see `ForwardWrites.expect_alike`. Ends the check."""
        if self._writes is not None:
            self._writes.expect_alike(first, group)
        self.end_first_step()

    def end_first_step(self) -> None:
        """From now on optimizers write, too, and a look at each parameter would take time."""
        self._writes = None


def _converted(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.layout is not torch.strided or gradient.dtype is dtype:
        return gradient.to(dtype)
    return copy_into(torch.empty_like(gradient, dtype=dtype), gradient)
