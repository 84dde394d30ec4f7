"""A section: a module that is gathered when it is called, its units, their gradients, and how far it is in the current pass.

    pending    counts its forwards whose backward is still to come
    settled    its backward is over: its parameters may be released, its gradients reduced

Read shard/unit.py and shard/gradient.py before this file; forward_backward.py moves sections through a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from rankloom.base.errors import CollectiveTimeout, UnitError
from rankloom.parallel.replicas.known_parameters import LOAD
from rankloom.parallel.sections.wrapping import tensors_in
from rankloom.shard.frames import AlwaysOpen, Frames, Window, between_steps
from rankloom.shard.gradient import BufferPool, Gradient, elements_and_dtype
from rankloom.shard.sums import UnitSums
from rankloom.shard.unit import State, Unit
from rankloom.world.group import Group

CALL_ALIKE = ("Call each block on every rank (its result times 0 where it is not wanted, layerdrop at 0), or give `units` that have inside "
              "whatever only some ranks call, or train at stage 2")


class ParameterPlace(NamedTuple):
    """A parameter as it was when the model was sharded: `module.key is param`."""

    module: nn.Module
    key: str
    param: nn.Parameter
    unit: Unit
    name: str             # in the whole model
    version: int          # `Unit.version` then
    address: int | None   # of its memory; None where that is released


class SectionHook(partial[Any]):
    """A hook on the model: `SectionHook(function, section)`, called with the section first."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return partial, self.args   # for copies and pickles: the section says why it cannot be; pickle would say it of the function


class Section:
    """A module that is gathered when it is called, and the units of its own parameters."""

    def __init__(self, name: str, module: nn.Module, units: Sequence[Unit]):
        self.name, self.module, self.units = name, module, tuple(units)
        self.gradients: list[Gradient] = []
        self.pending = 0                     # forwards whose backward is still to come
        self.depth = 0                       # forwards that are running: a module may call itself
        self.waiting_for: set[str] = set()   # parameters whose gradient has not landed in this backward
        self.settled = False
        self.reduced_each_time = True        # in every backward, or only in the last of a step
        self.gather_for_part: Callable[[], bool] | None = None   # of the root: see `lend`; returns whether to release it afterwards
        self._borrower: nn.Module | None = None                  # the module for which it was gathered
        self._places = _places(module, {param: (unit, name) for unit in units for name, param in unit.params.items()})

    def __deepcopy__(self, memo: Any) -> "Section":   # hooks of the model refer to it, so copying the model calls this
        raise UnitError("a sharded model cannot be copied: its parameters belong to a group of ranks. Make a plain model, and load what "
                        "engine.full_state_dict()[\"model\"] gives")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnitError("a sharded model cannot be pickled, as `torch.save(model)` does: its parameters belong to a group of ranks. Save "
                        "what `engine.full_state_dict()` gives, or in a loop of your own the `state_dict()` of what fully_shard returns")

    def start_gather(self) -> None:
        """Start to gather the units that are released."""
        for unit in self.units:
            if unit.state is State.SHARDED:
                unit.start_gather()

    def make_ready(self) -> None:
        """Gather: afterwards every parameter of the section may be used."""
        try:
            self.start_gather()
            for unit in self.units:
                unit.make_ready()
        except CollectiveTimeout as error:
            if not all(unit.stays for unit in self.units):
                error.add_note(f"a rank waits here for others that do not call {self.name or 'the model'}. {CALL_ALIKE}")
            raise

    def release(self, near: Group | None = None) -> None:
        """Release the units; see `Unit.release`."""
        for unit in self.units:
            if unit.state is State.GATHERING:   # gathered ahead for a call that did not come
                unit.wait()
            if unit.state is State.GATHERED:
                unit.release(near)

    @property
    def is_away(self) -> bool:
        """Whether a unit of it has still to be gathered."""
        return any(unit.state is State.SHARDED for unit in self.units)

    def watch_parts(self) -> None:
        """From now on modules that hold its parameters raise when they are called, or asked for a state dict, while released."""
        for part in {place.module for place in self._places}:
            part.register_forward_pre_hook(SectionHook(_before_part, self))
            part.register_forward_hook(SectionHook(_after_part, self))
            part.register_state_dict_pre_hook(SectionHook(_expect_values, self))

    @property
    def may_go_early(self) -> bool:
        """Whether, once its gradients have landed, backward is done with its parameters. Through frozen ones gradients may still pass."""
        return all(unit.trainable for unit in self.units)

    def expect_own_parameters(self) -> None:
        """Raise when a sharded parameter has been replaced, moved or written to."""
        with torch._C.DisableTorchFunctionSubclass():   # reading metadata never raises; skip the per-call check for speed
            self._expect_own_parameters()

    def _expect_own_parameters(self) -> None:
        for module, key, param, unit, name, version, address in self._places:
            if (found := module._parameters.get(key)) is not param:
                if unit.stays and isinstance(found, torch.Tensor) and not isinstance(found, nn.Parameter):
                    continue   # only `functional_call` puts plain tensors there, for as long as it runs
                raise UnitError(f"{name} was replaced after the model was sharded: the new tensor is on no other rank and in no optimizer. "
                                f"{LOAD}, or replace it before sharding. If `torch.func.functional_call` replaces it for one call: give it "
                                "plain tensors (`.detach()` of a parameter), and keep parameters: a stage below 3")
            if address is not None and param.data_ptr() != address:
                raise UnitError(f"{name} was cast or moved after the model was sharded: what computes is no longer what is trained. "
                                "Do it before sharding, or give `precision`")
            if unit.version(name) != version:
                raise UnitError(f"{name} was changed in place after the model was sharded: what is written there is lost, or reaches the "
                                f"other ranks too. {LOAD}, or change the slices, which the optimizer updates")

    def lend(self, part: nn.Module) -> None:
        """Before `part`, which holds parameters of it: gather, if the part is called by itself, without gradients, as `generate` calls an
        encoder and then a decoder. Raise unless the parameters may be used then."""
        if self.gather_for_part and self.is_away and not torch.is_grad_enabled():
            self._borrower = part if self.gather_for_part() else None
        for unit in self.units:
            if unit.stays and unit.state is State.GATHERING:   # no other rank need take part: all have sent their slices already
                unit.wait()
            unit.expect_gathered()

    def take_back(self, part: nn.Module, output: Any) -> None:
        """After `part`: release what was gathered for it alone."""
        if self._borrower is part:
            self._borrower = None
            if not self.depth:
                self.expect_none_of(tensors_in(output))
                self.release()

    def expect_none_of(self, given: Iterable[Any]) -> None:
        """Raise when a tensor that the module returns is a view of its parameters, whose memory is about to be freed."""
        memory = {unit.whole.untyped_storage()._cdata: unit for unit in self.units if not unit.stays}
        for tensor in given if memory else ():
            strided = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
            if strided and (unit := memory.get(tensor.untyped_storage()._cdata)):
                names = [name for name, param in unit.params.items()
                         if param.data_ptr() <= tensor.data_ptr() < param.data_ptr() + param.nbytes] or list(unit.params)
                raise UnitError(f"rank {unit.group.world_rank}: {self.name or 'the model'} ({type(self.module).__name__}) returns its "
                                f"parameter {names[0]}, or a view of it, whose memory goes when its forward is over: return a copy "
                                "(`.clone()`), cut the model by other `units`, or keep parameters: reshard_after_forward=False, or a "
                                "stage below 3")

    def forget_pass(self) -> None:
        """A new pass begins."""
        self.pending, self.settled = 0, False

    def awaits_more(self) -> bool:
        """Whether the running backward has still to make gradients of its parameters; other modules may read these, too."""
        return any(name in self.waiting_for and _will_get_gradient(param) for unit in self.units for name, param in unit.params.items())

    def enter_backward(self) -> None:
        """A backward has begun."""
        self.settled = False
        self.waiting_for = {name for gradient in self.gradients for name in gradient.unit.params}


def _expect_values(section: Section, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if section.is_away and not keep_vars and not all(unit.stays for unit in section.units):
        raise UnitError(f"section {section.name or 'root'} is sharded, so a plain state dict of it would be empty: "
                        "engine.full_state_dict() joins the values, and so does the state_dict() of what fully_shard returns")


def _before_part(section: Section, module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        section.lend(module)


def _after_part(section: Section, module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        section.take_back(module, output)


def inside_of_transform() -> bool:
    """Whether torch.func (grad, vjp, jvp, vmap ...) is running: it wraps tensors, and keeps a graph of its own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _will_get_gradient(param: nn.Parameter) -> bool:
    if not param.requires_grad or inside_of_transform():   # frozen since; or the graph is torch.func's, which sets no `.grad`
        return False
    with torch._C.DisableTorchFunctionSubclass():   # it may be released; its values are not read
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)   # type: ignore[attr-defined]
    except RuntimeError:   # torch raises inside `torch.autograd.grad`, which sets no `.grad`
        return False


def gradients_of(sections: Iterable[Section]) -> list[Gradient]:
    """Those of all units, in the order of the sections."""
    return [gradient for section in sections for gradient in section.gradients]


def _places(module: nn.Module, units: Mapping[nn.Parameter, tuple[Unit, str]]) -> list[ParameterPlace]:
    places = []
    for part in module.modules():
        for key, param in part._parameters.items():
            if param is not None and param in units:
                unit, name = units[param]
                address = param.data_ptr() if unit.stays else None
                places.append(ParameterPlace(part, key, param, unit, name, unit.version(name), address))
    return places


def make_gradients(sections: Sequence[Section], sums_of: Callable[[Unit], UnitSums], *, keep: bool, frames: Frames,
                   scale: float) -> BufferPool:
    """Give every trainable unit its gradient; returns the pool of their buffers."""
    trainable = [unit for section in sections for unit in section.units if unit.trainable]
    pool = BufferPool([] if keep else trainable, frames)
    kept = _one_buffer_each(trainable) if keep else {}
    for section in sections:
        section.gradients = [Gradient(sums_of(unit), pool, kept=kept.get(unit), scale=scale)
                             for unit in section.units if unit.trainable]
    return pool


def _one_buffer_each(units: Sequence[Unit]) -> dict[Unit, Window]:
    """Memory for the whole gradient of each unit. Where the group lends it, units of one dtype share a buffer: it lends only a few."""
    if not any(unit.group.lends_memory for unit in units):
        return {unit: between_steps(*elements_and_dtype(unit), unit.group.device) for unit in units}
    found: dict[Unit, Window] = {}
    for dtype in dict.fromkeys(unit.formats.reduce for unit in units):
        alike = [unit for unit in units if unit.formats.reduce == dtype]
        whole = alike[0].group.buffer(sum(unit.layout.total for unit in alike), dtype)
        found |= zip(alike, map(AlwaysOpen, whole.split([unit.layout.total for unit in alike])))
    return found
