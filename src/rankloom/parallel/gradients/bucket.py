"""A bucket: gradients in one flat buffer, which are all-reduced together. Read shard/flat.py before this file."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankloom.base.tensors import copy_into, keep_until_read
from rankloom.comm.compress import Summing
from rankloom.shard.flat import FlatBuffer, gaps_of, move_into, views_of
from rankloom.shard.frames import between_steps, count_users, memory_lent
from rankloom.world.group import Group


class Bucket:
    """Gradients that are all-reduced together, and the names still missing from them in this backward.

    The parameters are moved into a flat buffer of the same layout. Where the ranks share a host, the group lends memory for the
    gradients, and they are summed in place. Otherwise, on a GPU, the memory is freed when a step begins. A gradient that the user
    still holds stays valid: the bucket then allocates new memory.
    """

    def __init__(self, owners: Mapping[str, Tensor], group: Group, summing: Summing):
        gradients = {name: owner.grad for name, owner in owners.items()}
        for owner in owners.values():
            owner.grad = None   # torch would check it against the parameter when that moves to other memory
        parameters = FlatBuffer(owners)
        move_into(parameters, owners)
        self.slots, self.dtype = parameters.slots, parameters.flat.dtype
        self.owners, self.unsynced = owners, set[str]()   # unsynced: whose gradients here are of this rank alone
        size = (parameters.flat.numel(), self.dtype)
        self._window = memory_lent(group.buffer(*size)) if group.lends_memory else between_steps(*size, group.device)
        self.views: dict[str, Tensor] = {}   # name -> gradient, while the bucket is open
        self._backward = -1   # number of the backward in which it was opened; -1 outside
        self.open()
        self._late = summing.new_late_sums()
        self.algorithm = summing.new_all_reduce([(slot.start, slot.shape_in_memory) for slot in self.slots], self.dtype)
        self.waiting_for = set(owners)
        self.wait: Callable[[], Any] | None = None   # waits for the all-reduce, while that is in flight
        for name, owner in owners.items():
            gradient = gradients.pop(name)
            if gradient is not None:
                self.views[name].copy_(gradient)
                keep_until_read(gradient)
                owner.grad = self.gradient(name)

    @property
    def flat(self) -> Tensor:
        """All gradients of the bucket, with zeros in the gaps between them."""
        return self._window.tensor

    def open(self) -> None:
        """Make room for gradients. They overwrite those of earlier backwards, unless the user still holds one of these."""
        if (backward := torch._C._current_graph_task_id()) != self._backward:   # a look at all parameters is dear: one in each
            self._backward = backward
            self._leave_to_guests()
        if not self.views:
            self._window.open()
            self.views, self.gaps = views_of(self.flat, self.slots), gaps_of(self.flat, self.slots)
            for gap in self.gaps:   # norms read the whole buffer
                gap.zero_()

    def close(self) -> None:
        """Called when no parameter has a gradient in this bucket: free the memory."""
        if self._has_guests() or not self._window.stays:   # otherwise closing would free nothing, and the views would be made again
            self.views, self.gaps = {}, []
            self._window.close()

    def _has_guests(self, known: int = 0) -> bool:
        """Whether more than `known` views of the memory are held outside the bucket, for example by the user."""
        return bool(self.views) and count_users(self.flat) > 1 + len(self.views) + len(self.gaps) + known

    def _leave_to_guests(self) -> None:
        """Where the user holds gradients that are no parameter's any more, let them have the memory, and take new memory."""
        if not self._has_guests():
            return
        mine = [name for name, owner in self.owners.items() if self.holds(name, owner.grad)]
        if len(mine) == len(self.owners) or not self._has_guests(len(mine)):
            return
        values = {name: self.views[name].clone() for name in mine}
        for name in mine:
            self.owners[name].grad = None
        self.close()
        self.open()
        for name, value in values.items():
            self.views[name].copy_(value)
            self.owners[name].grad = self.gradient(name)

    def gradient(self, name: str) -> Tensor:
        """The tensor for a parameter's `.grad`: an alias of the view, because casting or moving a model swaps the memory of that tensor."""
        return self.views[name].detach()

    def holds(self, name: str, gradient: Tensor | None) -> bool:
        """Whether `gradient` is the one in this bucket."""
        return gradient is not None and gradient.data_ptr() == self.views[name].data_ptr()

    def land(self, name: str, param: Tensor, owner: Tensor, scale: float) -> None:
        """Put the gradient that backward has just written to `param.grad` into the bucket; `owner.grad` becomes its alias there.

        owner: the tensor that the optimizer updates: `param` itself, or its master copy in another dtype
        """
        self.open()
        self.unsynced.add(name)
        view, gradient = self.views[name], param.grad
        assert gradient is not None, f"{name}: hook without a gradient"
        if self.holds(name, gradient):       # accumulated in place by autograd
            _multiply(view, scale)
        elif self.holds(name, owner.grad):   # accumulated here, in the master's dtype
            _multiply(view.add_(gradient), scale)
        elif scale == 1.0 or gradient.dtype is not self.dtype:   # here `mul` would round to the gradient's dtype before the copy
            _multiply(copy_into(view, gradient), scale)
        else:
            torch.mul(gradient, scale, out=view)
        if owner is not param:
            param.grad = None
        owner.grad = self.gradient(name)

    def stand_in(self, name: str, scale: float) -> None:
        """For a parameter without a gradient in this backward: put what it has accumulated before into the bucket, or zeros."""
        self.open()
        view, gradient = self.views[name], self.owners[name].grad
        if gradient is None:
            view.zero_()
            return
        if not self.holds(name, gradient):
            view.copy_(gradient)
        _multiply(view, scale)

    def clear_strays(self) -> None:
        """Take away what compression wrote where there is no gradient: between tensors, and in unused parameters (comm/late.py)."""
        if self.gaps:
            torch._foreach_zero_(self.gaps)
        for name, view in self.views.items():
            self._late.settle(name, view, used=self.owners[name].grad is not None)


def _multiply(x: Tensor, factor: float) -> None:
    if factor != 1.0:   # else it would be a pass over memory for nothing
        x.mul_(factor)
