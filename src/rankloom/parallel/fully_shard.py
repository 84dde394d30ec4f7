"""Fully sharded data parallel for a loop of your own: parameters, gradients and optimizer state, 1/p of each on a rank.

    sharded = rl.fully_shard(model, group)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-4)       # after sharding: it gets the slices
    sharded(batch).mean().backward()                                   # gradients are means over the ranks
    sharded.clip_grad_norm_(1.0)
    optimizer.step()

parallel/sections/forward_backward.py says how a step goes. The engine (train/engine.py) uses the same sharding, but sums gradients,
and divides once by the global count.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.compression import BACKEND, EXACT, why_not_for_slices
from rankloom.base.errors import ConfigError, UnitError
from rankloom.base.expect import expect_callable, expect_type
from rankloom.base.names import full_name
from rankloom.base.nested import cast_floats_in
from rankloom.base.tensors import expect_number_format
from rankloom.comm.compress import Summing
from rankloom.parallel.axes import expect_same_part
from rankloom.parallel.initial_values import InitialParts, InitialValues, give_memory, put_stand_ins
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas.buffers import BufferKeeper
from rankloom.parallel.replicas.equal_start import expect_same_values, expect_same_values_in, make_replicas_equal
from rankloom.parallel.replicas.guards import call_hooks, guard_owners
from rankloom.parallel.replicas.known_parameters import KnownParameters, expect_none_beside
from rankloom.parallel.replicas.refused import expect_model_and_group, expect_no_sync_batch_norm
from rankloom.parallel.sections.forward_backward import Moment
from rankloom.parallel.sections.reduction_order import Reducing
from rankloom.parallel.sections.sharding import Sharding
from rankloom.parallel.sections.state_dict import expect_own_parameters, full_values, load_values, owned_slices
from rankloom.parallel.sections.wrapping import AUTO, Policy, comparable, has_parameters
from rankloom.parallel.zero import ShardingStrategy, expect_counts, shard
from rankloom.shard.norm import clip_to_norm
from rankloom.shard.unit import Fill, Formats
from rankloom.world.connect import expect_cpu_backend
from rankloom.world.group import Group


class FullySharded(nn.Module):
    """A model whose parameters are slices; after `backward()` their gradients are the mean over all ranks.

    `parameters()` are this rank's slices, under the names of the plain model; `state_dict()` is whole, and a collective.
    """

    has_names_of_module = True   # in its state dict

    def __init__(self, module: nn.Module, sharding: Sharding, summing: Summing, compute: torch.dtype | None = None):
        super().__init__()
        self.module = module
        self._sharding, self._summing = sharding, summing
        self._known = KnownParameters(module)
        self._keepers = [BufferKeeper(module, ranks) for ranks in (sharding.group, sharding.replicas) if ranks.size > 1]
        self._params = {name: param for unit in sharding.units for name, param in unit.params.items()}
        owners = sharding.owners()
        self._owners = {name: owners[name] for name, _ in module.named_parameters() if name in owners}   # in the model's own order
        self._untrained = {name: param for name, param in self._params.items() if name not in self._owners}
        self._frozen: set[str] = set()   # slices that have been frozen since
        self._compute, self._split = compute, ModelSplit.found_in(module, sharding.group.alone())
        self._missing = 0   # how many keys torch had missed when it began to load this as part of another module
        self.register_load_state_dict_post_hook(_forget_missing)
        sharding.forward_backward.on_moment = self._on_moment
        guard_owners(self._owners.values(), sharding)
        module.zero_grad = self.zero_grad   # type: ignore[method-assign]   # its own would find no gradients, and these would add up

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward.

        raises: UnitError when a parameter was added since the model was wrapped, when slices were changed without `after_update`, or have a
                hook that would never run; ConfigError when a parameter that was frozen then is to be trained now
        """
        if not torch.compiler.is_compiling():
            self._expect_as_wrapped()
        return self.module(*cast_floats_in(args, self._compute), **cast_floats_in(kwargs, self._compute))

    def _expect_as_wrapped(self) -> None:
        expect_none_beside(self)
        self._known.expect_no_more()
        self._sharding.expect_published("by no torch optimizer", "call `after_update()` of the sharded model after the change")
        for name, owner in self._owners.items():
            if owner._backward_hooks:
                raise UnitError(f"rank {self._sharding.group.world_rank}: the slice of {name} has a hook (`register_hook`), which no "
                                "backward would call: take `register_post_accumulate_grad_hook`, which sees the mean, or change "
                                "gradients before the optimizer's step")
        self._follow_freezing()

    def _follow_freezing(self) -> None:
        """Freeze or thaw the model's parameter when its slice is; a parameter frozen before sharding stays so."""
        frozen = {name for name, owner in self._owners.items() if not owner.requires_grad}
        for name in frozen ^ self._frozen:
            self._params[name].requires_grad_(name not in frozen)
        self._frozen = frozen
        with torch._C.DisableTorchFunctionSubclass():   # reading metadata never raises; skip the per-call check for speed
            thawed = next((name for name, param in self._untrained.items() if param.requires_grad), None)
        if thawed:
            raise ConfigError(f"{thawed} was frozen when the model was sharded, and is to be trained now: no optimizer has a slice of it. "
                              "Shard the model with all that will be trained, and freeze parts of it afterwards")

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's slices, one-dimensional, maybe empty, under the plain model's names. What was frozen before sharding has none."""
        for name, owner in self._owners.items():
            yield full_name(prefix, name), owner

    def requires_grad_(self, requires_grad: bool = True) -> "FullySharded":
        """Freeze or thaw all slices. What was frozen before sharding has none: the next forward raises when that is thawed."""
        for param in self._untrained.values():
            param.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, unreduced ones of `no_sync` included: an optimizer's own `zero_grad` does not see these."""
        for gradient in self._sharding.gradients():
            gradient.landed.clear()
        super().zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate, in whole gradients; the first one outside reduces the sum."""
        return self._sharding.sync(False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before. A collective.

        torch's own function of this name would see this rank's slices only. Where `tensor_parallel` or `expert_parallel` has cut
        the model before, too, the norm is that of the whole.
        norm_type: 2, another power above 0, or infinity ("inf" too): the largest magnitude
        """
        slices = owned_slices(self._sharding, self._sharding.group.rank)
        grads = [counted for name, owner in self._owners.items() if owner.grad is not None
                 for counted in self._split.counted(name, owner.grad, slices[name])]
        return clip_to_norm(grads, [self._sharding.group, *self._split.parts], max_norm, norm_type)

    def after_update(self) -> None:
        """Call this after slices were changed by anything but a torch optimizer. A collective.

        Where ranks share memory, they read each other's slices in place. So after a forward without a backward, call `group.barrier()`
        before you change slices.
        """
        self._sharding.publish()

    def state_dict(self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The whole model in CPU memory, on every rank, under the plain names. A collective.

        Of a model that `tensor_parallel` has cut before: this rank's part; `full_state_dict(sharded, tensor_group)` joins these.

        destination, prefix: as torch gives them for a module inside another; keep_vars is ignored: values are copies
        raises: UnitError, on all ranks, when a parameter was changed in place
        """
        expect_own_parameters(self._sharding)
        state = {} if destination is None else destination
        state |= {f"{prefix}{name}": value for name, value in full_values(self.module, self._sharding).items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's slices from a whole state dict. raises: ModelMismatch, with nothing changed, when it is another model's

        The error that compression has kept of earlier gradients is dropped.
        strict: False loads what has a name of the model, and says in its result what it passed over; shapes must match
        assign: as torch's, ignored: values are always copied
        """
        groups = (self._sharding.group, self._sharding.replicas)
        lacking, unknown = load_values(self.module, self._sharding, state_dict, groups, strict=strict)
        self._summing.begin_anew()
        for keeper in self._keepers:
            keeper.forget_changes()   # loading is no change by a forward
        return nn.modules.module._IncompatibleKeys(lacking, unknown)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *lists: list[str]) -> None:
        """torch calls this from `load_state_dict` of a module that contains this one, which heeds its own `strict` when all is loaded."""
        mine = {key.removeprefix(prefix): state_dict.pop(key) for key in [*state_dict] if key.startswith(prefix)}
        passed_over = self.load_state_dict(mine, strict=False)
        missing, unknown, _ = lists
        missing += [f"{prefix}{key}" for key in passed_over.missing_keys]
        unknown += [f"{prefix}{key}" for key in passed_over.unexpected_keys]
        self._missing = len(missing)

    def _apply(self, fn: Any, recurse: bool = True) -> "FullySharded":   # what `.to()`, `.half()`, `.cuda()` do to each tensor
        for owner in self._owners.values():
            like = torch.empty(0, dtype=owner.dtype, device=owner.device)
            if (fn(like).dtype, fn(like).device) != (like.dtype, like.device):
                raise UnitError("a sharded model cannot be cast or moved: its parameters are views of memory that ranks share. "
                                "Do it before sharding, or give `compute`")
        return self

    def __deepcopy__(self, memo: Any) -> "FullySharded":
        raise UnitError("a sharded model cannot be copied: its slices belong to a group of ranks. Copy `state_dict()`, or its parameters()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnitError("a sharded model cannot be pickled, as `torch.save(model)` does: its slices belong to a group of ranks. Save "
                        "`state_dict()`, which all ranks call")

    def _on_moment(self, moment: Moment) -> None:
        if moment is Moment.BACKWARD:
            self._follow_freezing()
        elif self._sharding.forward_backward.reducing is Reducing.ALL:
            _, alike = self._sharding.finish(mark=max((keeper.mark() for keeper in self._keepers), default=0))
            self._summing.end_step()
            for keeper in self._keepers:
                keeper.heed(alike)
                keeper.average_changed()
            for keeper in self._keepers:
                keeper.forget_changes()   # what the other keeper has averaged is no change by a forward
            call_hooks(self._owners.values())   # only now is it certain which gradients stay


def _forget_missing(sharded: FullySharded, keys: Any) -> None:
    del keys.missing_keys[sharded._missing :]   # torch has also looked for the keys of the inner module


def fully_shard(model: nn.Module, group: Group, *, replicas: Group | None = None, units: Policy = AUTO,
                compute: torch.dtype | None = None, reduce: torch.dtype | None = None, compress: str = EXACT, compress_after: int = 0,
                reshard_after_forward: bool | int = True, ahead: int = 1, fill: Fill | None = None) -> FullySharded:
    """Shard `model` over `group` for a loop of your own; see the head of this file. The model's own parameters are cut.

    A mean over ranks is right only if every rank's loss is a mean over equally many items; `rl.prepare` has no such trap.
    replicas:       ranks of other groups that hold the same slices (hybrid sharding)
    units:          which modules are gathered at once (parallel/sections/wrapping.py)
    compute:        dtype of forward, backward and gathers, to which the model's inputs are cast too; left out, that of the model
    reduce:         dtype in which gradients are summed; left out, that of the model. For fp16, ranks divide before they sum
    compress:       a name of comm/compress.py: gradients are sent in fewer bytes, and sums are approximate. With `replicas` between those
                    only, else between the ranks of `group`
    compress_after: how many first backward passes that reduce send exact gradients
    reshard_after_forward: True releases parameters after forward; False keeps them until backward: fewer gathers, more memory; a number n
                    keeps 1/n of them on each of n neighbours
    ahead:          how many modules are gathered ahead of use
    fill:           gives parameters on the meta device their values: fill(name, tensor), in place
    sent:           3n(p-1)/p elements per rank and step, 2n(p-1)/p with reshard_after_forward=False; where ranks share memory (backend
                    "rankloom", CPU, one host), n(p-1)/p, for gradients only
    raises:         ModelMismatch when names, shapes or dtypes differ between ranks; ConfigError, on all ranks when their options differ, or
                    when replicas do not hold the same slice
    """
    expect_model_and_group(model, group)
    expect_type("replicas", replicas, (Group, NoneType), "a Group, such as world.group('replicate') beside world.group('shard')")
    expect_no_sync_batch_norm(model, group.size * (replicas.size if replicas else 1))
    for name, dtype in (("compute", compute), ("reduce", reduce)):
        expect_number_format(name, dtype)
    if not has_parameters(model):
        raise ConfigError(f"a {type(model).__name__} without parameters has nothing to shard")
    replicas, summing = replicas or group.alone(), Summing(BACKEND, compress, compress_after)
    expect_same_part(model, replicas)
    for ranks in (group, replicas):
        expect_cpu_backend(ranks)
    _expect_same_slice(group, replicas)
    if group.size > 1 and (refusal := why_not_for_slices(compress, replicas=replicas.size > 1)):
        raise ConfigError(f"fully_shard: compress={compress!r} {refusal}")
    expect_counts(ahead=ahead)
    _expect_source_of_values(model, fill)
    options = {"units": comparable(units), "compute": compute, "reduce": reduce, "compress": compress, "compress_after": compress_after,
               "reshard_after_forward": reshard_after_forward, "ahead": ahead}
    expect_same_values_in(group, replicas, "way to shard", options)
    expect_same_values(replicas, "way to shard", options)
    for ranks in (group, replicas) if fill is None else ():
        make_replicas_equal(model, ranks)
    parts = None if fill is None else _begin_to_fill(model, fill, group, replicas)

    def formats(param: nn.Parameter) -> Formats:
        own = param.dtype   # which integers keep
        return Formats(compute or own, own, reduce or own) if param.is_floating_point() else Formats(own, own, own)

    # math.inf: `no_sync` is for accumulating without communication.
    strategy = ShardingStrategy(3, formats, units=units, reshard_after_forward=reshard_after_forward, ahead=ahead, summing=summing,
                                gradient_memory=math.inf, scale=1.0 / (group.size * replicas.size), reduces_once=False)
    sharding = shard(model, group, replicas, strategy, fill=parts)
    if parts is not None:
        problems = group.all_gather_object(parts.make.problem, label="initial values")
        replicas.agree("\n".join(filter(None, problems)) or None, label="initial values")
    return FullySharded(model, sharding, summing, compute)


def _begin_to_fill(model: nn.Module, fill: Fill, group: Group, replicas: Group) -> InitialParts:
    """Fill the buffers of a model on the meta device, and take its parameters' memory away. Returns what fills these, slice by slice."""
    split = ModelSplit.found_in(model, group.alone())
    parts = InitialParts(InitialValues(model, fill, 0, option="fill"), group, replicas, *split.parts, split=split)
    put_stand_ins(model, group.device)
    give_memory(model, parts, group.device, lambda param: False)
    return parts


def _expect_source_of_values(model: nn.Module, fill: Fill | None) -> None:
    """Raise ConfigError when parameters on the meta device have no `fill`, or when there are none to fill."""
    on_meta = next((name for name, param in model.named_parameters() if param.is_meta), None)
    if fill is None and on_meta is not None:
        raise ConfigError(f"{on_meta} is on the meta device and has no values: give `fill`, a function of (name, tensor) that fills the "
                          "tensor in place")
    if fill is not None:
        expect_callable("fill", fill, "a function of (name, tensor) that fills the tensor in place")
    if fill is not None and on_meta is None:
        raise ConfigError("`fill` gives values to a model on the meta device, and to no other")


def _expect_same_slice(group: Group, replicas: Group) -> None:
    """Raise ConfigError, on all ranks of `group`, unless its replicas are at the same place in groups of their own. A collective."""
    places = replicas.all_gather_object([group.rank, group.size], label="replicas")
    other = next((rank for rank, place in zip(replicas.ranks, places) if place != [group.rank, group.size]), None)
    group.agree(None if other is None else (
        f"{group.where('fully_shard')}: rank {other} of `replicas` does not hold the slice of this rank, {group.rank} of {group.size}: "
        "give ranks of other groups that have the same place there, such as world.group('replicate') beside world.group('shard')"),
        label="replicas")
