"""The stages of sharding: what a rank keeps whole, and what it keeps 1/p of. One table, and `shard`, which builds them all.

    stage   optimizer   gradients   parameters   also known as                sent per rank and step, elements
    1       1/p         whole       whole        ZeRO-1                       2n(p-1)/p
    2       1/p         1/p         whole        ZeRO-2, SHARD_GRAD_OP        2n(p-1)/p
    3       1/p         1/p         1/p          ZeRO-3, FSDP, FULL_SHARD     3n(p-1)/p   gathered again for backward

A step of each:

    1   forward and backward of whole gradients; reduce-scatter them in the last backward; step on the slice; all-gather parameters
    2   the same, but each block's gradients are reduce-scattered in every backward, and the whole ones freed
    3   forward: all-gather a block, compute, release it. backward: all-gather it, compute, reduce-scatter, release. step on the slice

`Unit.start_gather` (shard/unit.py) all-gathers, and `Gradient.start` (shard/gradient.py) reduce-scatters, at every stage.

Stage 0 is parallel/data.py; on a mesh that splits the model too, it is stage 1 over one rank. A second axis, `replicas`, makes every
stage its hybrid: slices are all-reduced over it (2(n/p)(r-1)/r more). Where ranks share memory (backend "rankloom", CPU, one host),
parameters exist once at every stage: only gradients are sent, n(p-1)/p, and stages 2 and 3 are the same.

source: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP). Read parallel/sections/forward_backward.py for how a step goes
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import nn

from rankloom.base.cost import Bill, all_gather_bill
from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type
from rankloom.comm.compress import Summing
from rankloom.comm.subgroup import Subgroup
from rankloom.parallel.expert import ExpertReplicas
from rankloom.parallel.replicas.guards import guard_parameters
from rankloom.parallel.sections.forward_backward import Gathering
from rankloom.parallel.sections.section import Section
from rankloom.parallel.sections.sharding import Sharding
from rankloom.parallel.sections.wrapping import AUTO, Policy, parameters_of_sections, section_names
from rankloom.shard.float8_unit import Float8Readers, Float8Unit
from rankloom.shard.frames import Frames
from rankloom.shard.layout import lay_out_evenly
from rankloom.shard.offload import Host
from rankloom.shard.sums import UnitSums
from rankloom.shard.unit import Fill, Formats, LayOut, Unit
from rankloom.world.group import Group

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class ShardingStrategy:
    """How a model is sharded.

    units:            which modules are sections (parallel/sections/wrapping.py)
    formats:          dtypes of a parameter
    reshard_after_forward: of stage 3. True releases parameters after forward. False keeps them until backward: the traffic of ZeRO-2, for
                      more memory. A number n keeps 1/n of them on each of n neighbours: less traffic between nodes of n ranks
    offload:          slices, gradients and optimizer state lie in host memory
    ahead:            how many sections are gathered ahead of use
    gradient_memory:  bytes of whole gradients that may be kept while micro-batches accumulate, so that these are reduced once a step
    scale:            factor of summed gradients
    hooked:           see `Gathering`
    reduces_once:     gradients are dropped before every step, and reduced in its last backward only
    experts:          parameters that are summed over other replicas than the rest
    float8:           weights gathered in eight bits, and the layers that multiply by each (shard/float8_unit.py)
    summing:          whether and how gradients are compressed (shard/sums.py); these are reduced once a step at every stage
    copied:           in a compressed run: parameters of which ranks outside of group and replicas hold copies, too. Their gradients are
                      summed exactly, as compression would round copies in different units differently
    """

    stage: int
    formats: Callable[[nn.Parameter], Formats]
    units: Policy = AUTO
    reshard_after_forward: bool | int = True
    offload: bool = False
    ahead: int = 1
    gradient_memory: float = 0
    scale: float = 1.0
    hooked: bool = True
    reduces_once: bool = True
    experts: ExpertReplicas | None = None
    float8: Float8Readers = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    summing: Summing = field(default_factory=Summing)


def expect_counts(*, ahead: int, gradient_memory: float = 0) -> None:
    """Raise ConfigError unless both are numbers of 0 or more."""
    expect_type("ahead", ahead, int, "a whole number of units")
    expect_type("gradient_memory", gradient_memory, (int, float), "a number of bytes")
    for name, number in (("ahead", ahead), ("gradient_memory", gradient_memory)):
        if not number >= 0:
            raise ConfigError(f"{name}={number!r}, expected 0 or more")


def shard(model: nn.Module, group: Group, replicas: Group, strategy: ShardingStrategy, *, whole: frozenset[str] = frozenset(),
          lay_out_whole: LayOut = lay_out_evenly, canonical: bool = False, fill: Fill | None = None) -> Sharding:
    """Cut the parameters of `model` over `group`, and hook its forward and backward. A collective.

    whole:     names of parameters that must not be cut, laid out by `lay_out_whole`
    canonical: gradients stay whole on every rank, and the caller sums them; parameters stay gathered from a step's first forward to its end
    fill:      gives stand-ins without memory their values, on all ranks the same (parallel/initial_values.py)
    raises:    ConfigError for impossible `units`, and for an embedding that changes its weight in forward
    """
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    _expect_no_max_norm(modules)
    host, frames = Host(group.device) if strategy.offload else None, Frames(group.device)
    sections = []
    members_of = parameters_of_sections(model, section_names(model, strategy.units))
    for name, members in {"": [], **members_of}.items():   # the root begins a pass, even without parameters
        units = make_units(name, {member: params[member] for member in members}, group, strategy, whole=whole,
                           lay_out_whole=lay_out_whole, host=host, fill=fill, frames=frames)
        sections.append(Section(name, modules[name], units))
    guard_parameters(params)
    keep_gradients = _keeps_whole_gradients(strategy, group, canonical)
    _choose_what_accumulates_whole(sections, strategy, keep_all=keep_gradients)
    reshards = strategy.stage == 3 and not canonical and strategy.reshard_after_forward is not False and strategy.hooked
    gathering = Gathering(reshards, near=_neighbours(group, strategy.reshard_after_forward), ahead=strategy.ahead, hooked=strategy.hooked)

    def sums_of(unit: Unit) -> UnitSums:
        names, experts = unit.params.keys(), strategy.experts
        holders = experts.replicas if experts and experts.names & names else replicas
        return UnitSums(unit, holders, strategy.summing, exact=bool(strategy.copied & names))

    return Sharding(sections, group, replicas, keep_gradients=keep_gradients, scale=strategy.scale, experts=strategy.experts, frames=frames,
                    gathering=gathering, sums_of=sums_of)


class UnitKind(NamedTuple):
    """What the parameters of one unit have in common."""

    formats: Formats
    trainable: bool
    is_whole: bool    # must not be cut
    is_expert: bool   # summed over other replicas
    is_copied: bool   # see `ShardingStrategy.copied`
    is_float8: bool


def make_units(section: str, params: Mapping[str, nn.Parameter], group: Group, strategy: ShardingStrategy, *, whole: frozenset[str],
               lay_out_whole: LayOut, host: Host | None, fill: Fill | None, frames: Frames) -> list[Unit]:
    """One unit for each kind of parameter in the section.

    Frozen parameters are in units only where the whole is not kept.
    """
    kinds: dict[UnitKind, dict[str, nn.Parameter]] = {}
    keep = strategy.stage < 3
    for name, param in params.items():
        if param.requires_grad or not keep:
            kinds.setdefault(_kind_of(name, param, strategy, whole), {})[name] = param
    label, units = section or "root", []
    for at, (kind, members) in enumerate(kinds.items()):
        make = partial(Float8Unit, readers=strategy.float8) if kind.is_float8 else Unit
        lay_out = lay_out_whole if kind.is_whole else lay_out_evenly
        units.append(make(label if len(kinds) == 1 else f"{label}, part {at}", members, group, kind.formats, keep=keep, lay_out=lay_out,
                          host=host, fill=fill, frames=frames))
    return units


def _kind_of(name: str, param: nn.Parameter, strategy: ShardingStrategy, whole: frozenset[str]) -> UnitKind:
    """What decides in which unit of its section a parameter is. whole: names of those that must not be cut"""
    formats = strategy.formats(param)
    if not param.requires_grad:   # it is never updated
        formats = Formats(formats.compute, formats.compute, formats.compute)
    is_expert = strategy.experts is not None and name in strategy.experts.names
    return UnitKind(formats, param.requires_grad, name in whole, is_expert, name in strategy.copied, name in strategy.float8)


def _expect_no_max_norm(modules: Mapping[str, nn.Module]) -> None:
    embeddings = {name: module for name, module in modules.items() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    name = next((name for name, module in embeddings.items() if module.max_norm is not None), None)
    if name is not None:
        raise ConfigError(f"{name or 'the model'} is an embedding with max_norm, which changes its weight in each forward, and the "
                          "optimizer has slices of it: leave it out, or train at stage 0 on one rank")


def _keeps_whole_gradients(strategy: ShardingStrategy, group: Group, canonical: bool) -> bool:
    """Whether whole gradients are kept, with the slice a view of them: at stage 1, for a canonical sum, or where one rank owns it all."""
    return strategy.stage <= 1 or canonical or (strategy.reduces_once and group.size == 1 and not strategy.offload)


def _neighbours(group: Group, n: bool | int) -> Group | None:
    """The run of n ranks, this one among them, that keep parameters from forward to backward; None unless asked for."""
    if isinstance(n, bool):
        return None
    if not isinstance(n, int) or n < 1 or group.size % n:
        raise ConfigError(f"reshard_after_forward={n!r} is no number of neighbours that divides the {group.size} ranks of the shard axis")
    first = group.rank // n * n
    return Subgroup(group, range(first, first + n))


def _choose_what_accumulates_whole(sections: list[Section], strategy: ShardingStrategy, keep_all: bool) -> None:
    """Sections whose whole gradients fit `gradient_memory` are reduced once a step, the others in every backward."""
    left, compresses = strategy.gradient_memory, strategy.summing.is_compressed
    for section in sections:
        size = sum(unit.layout.total * unit.formats.reduce.itemsize for unit in section.units if unit.trainable)
        section.reduced_each_time = size > left and not keep_all and not compresses
        left -= 0 if section.reduced_each_time else size


def step_bill(sharding: Sharding, backwards: int = 1) -> Bill:
    """What this rank sends in a step of `backwards` micro-batches, for parameters and gradients, padding included."""
    total = Bill()
    for section in sharding.sections:
        reshards = sharding.gathering.reshards and bool(section.name)   # the root is gathered once in a pass
        for unit in section.units:
            total += unit.publish_bill() + _gather_bill(unit, backwards, reshards, sharding.gathering.near)
        for gradient in section.gradients:
            total += gradient.sums.bill() * (backwards if section.reduced_each_time else 1)
    return total


def _gather_bill(unit: Unit, backwards: int, reshards: bool, near: Group | None) -> Bill:
    """What this rank sends to gather a unit: once a step, if it stays; else in each forward, and where it `reshards` in each backward."""
    if unit.common:
        return Bill()
    p, nbytes = unit.group.size, unit.layout.total * unit.formats.compute.itemsize
    gather = all_gather_bill(nbytes // p, p)
    if unit.stays:
        return gather
    neighbours = near.size if near else p
    again = all_gather_bill(nbytes // neighbours, neighbours) if reshards else Bill()
    return (gather + again) * backwards
