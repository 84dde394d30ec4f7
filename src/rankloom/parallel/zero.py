"""The stages of sharding: what a rank keeps whole, and what it keeps 1/p of. One table, one way to build them all.

    stage   optimizer   gradients   parameters   also known as                sent per rank and step, elements
    1       1/p         whole       whole        ZeRO-1                       2n(p-1)/p   reduce-scatter, all-gather
    2       1/p         1/p         whole        ZeRO-2, SHARD_GRAD_OP        2n(p-1)/p
    3       1/p         1/p         1/p          ZeRO-3, FSDP, FULL_SHARD     3n(p-1)/p   gathered again for backward

Stage 0 is parallel/data.py; on a mesh that splits the model too, it is stage 1 over one rank. With a second axis, `replicas`, slices are
summed over it too (2(n/p)(r-1)/r more), and every stage becomes its hybrid. Where the ranks share a host, parameters exist once, at every
stage: then nothing is sent for them, and stages 2 and 3 are one.

source: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP); read parallel/sharding.py for how a step goes
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from rankloom.base.cost import Bill, all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type
from rankloom.comm.subgroup import Subgroup
from rankloom.parallel.guards import guard_parameters
from rankloom.parallel.sections import Section, make_units
from rankloom.parallel.sharding import ExpertReplicas, Gathering, Sharding
from rankloom.parallel.wrapping import AUTO, Policy, parameters_of_sections, section_names
from rankloom.shard.float8_unit import Float8Consumers
from rankloom.shard.frames import Frames
from rankloom.shard.layout import lay_out_evenly
from rankloom.shard.offload import Host
from rankloom.shard.unit import Fill, Formats, LayOut
from rankloom.world.group import Group

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class ShardingStrategy:
    """How a model is sharded.

    units:            which modules are sections (parallel/wrapping.py)
    formats:          number formats of a parameter
    reshard_after_forward: stage 3: False: parameters stay from forward to backward: ZeRO-2's traffic for more memory; a number n: they
                      are cut over n neighbours only until then: less traffic between nodes of n ranks, 1/n of the memory
    offload:          slices, gradients and optimizer state lie in host memory
    ahead:            how many sections are gathered ahead of use
    gradient_memory:  bytes of whole gradients that may be kept while micro-batches accumulate, so that these are reduced once
    scale:            what summed gradients are multiplied by
    hooked:           see `Gathering`
    reduces_once:     gradients are forgotten before every step, and each is whole until its last backward
    experts:          parameters that are summed over other replicas than the rest
    float8:           weights that travel in eight bits, and the layers that multiply by each (shard/float8_unit.py)
    """

    stage: int
    formats: Callable[[str, nn.Parameter], Formats]
    units: Policy = AUTO
    reshard_after_forward: bool | int = True
    offload: bool = False
    ahead: int = 1
    gradient_memory: int = 0
    scale: float = 1.0
    hooked: bool = True
    reduces_once: bool = True
    experts: ExpertReplicas | None = None
    float8: Float8Consumers = field(default_factory=dict)


def expect_counts(*, ahead: int, gradient_memory: float = 0) -> None:
    """Raise ConfigError for what is no number, or one below 0."""
    expect_type("ahead", ahead, int, "a whole number of units")
    expect_type("gradient_memory", gradient_memory, (int, float), "a number of bytes")
    for name, number in (("ahead", ahead), ("gradient_memory", gradient_memory)):
        if not number >= 0:
            raise ConfigError(f"{name}={number!r}, expected 0 or more")


def shard(model: nn.Module, group: Group, replicas: Group, strategy: ShardingStrategy, *, whole: frozenset[str] = frozenset(),
          lay_out_whole: LayOut = lay_out_evenly, canonical: bool = False, fill: Fill | None = None) -> Sharding:
    """Cut the parameters of `model` over `group`, and watch its forward and backward. A collective.

    whole:     names of parameters that must not be cut, and the layout for these
    canonical: gradients stay whole on every rank, for somebody else to sum; parameters from the first forward of a step to its end
    fill:      gives stand-ins without memory their values, on all ranks the same (parallel/build.py)
    raises: ConfigError for units that cannot be
    """
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    host, frames = Host(group.device) if strategy.offload else None, Frames(group.device)
    sections = []
    members_of = parameters_of_sections(model, section_names(model, strategy.units))
    for name, members in {"": [], **members_of}.items():   # a pass begins with the root, parameters or not
        units = make_units(name, {member: params[member] for member in members}, group, strategy.formats, keep=strategy.stage < 3,
                           whole=whole, lay_out_whole=lay_out_whole, host=host, fill=fill, frames=frames, float8=strategy.float8,
                           experts=strategy.experts.names if strategy.experts else frozenset())
        sections.append(Section(name, modules[name], units))
    guard_parameters(params)
    keep_gradients = _keeps_whole_gradients(strategy, group, canonical)
    _choose_what_accumulates_whole(sections, strategy, all_do=keep_gradients)
    let_go = strategy.stage == 3 and not canonical and strategy.reshard_after_forward is not False and strategy.hooked
    gathering = Gathering(let_go, _neighbours(group, strategy.reshard_after_forward), strategy.ahead, strategy.hooked)
    return Sharding(sections, group, replicas, keep_gradients=keep_gradients, scale=strategy.scale, experts=strategy.experts, frames=frames,
                    gathering=gathering)


def _keeps_whole_gradients(strategy: ShardingStrategy, group: Group, canonical: bool) -> bool:
    """Whether a whole gradient is kept, and the slice is a view of it: by the stage, or because there is one rank to own it all here."""
    return strategy.stage <= 1 or canonical or (strategy.reduces_once and group.size == 1 and not strategy.offload)


def _neighbours(group: Group, n: bool | int) -> Group | None:
    """The n ranks in a row that keep parameters among them from forward to backward."""
    if isinstance(n, bool):
        return None
    if not isinstance(n, int) or n < 1 or group.size % n:
        raise ConfigError(f"reshard_after_forward={n!r} is no number of neighbours that divides the {group.size} ranks of the shard axis")
    first = group.rank // n * n
    return Subgroup(group, range(first, first + n))


def _choose_what_accumulates_whole(sections: list[Section], strategy: ShardingStrategy, all_do: bool) -> None:
    """Sections whose whole gradients fit the budget are reduced once a step, the others after every backward."""
    left = strategy.gradient_memory
    for section in sections:
        size = sum(unit.layout.total * unit.formats.reduce.itemsize for unit in section.units if unit.trainable)
        section.reduced_each_time = size > left and not all_do
        left -= 0 if section.reduced_each_time else size


def step_bill(sharding: Sharding, backwards: int = 1) -> Bill:
    """What this rank sends in a step of `backwards` micro-batches, for parameters and gradients, padding included."""
    total, replicas = Bill(), {gradient.unit: gradient.replicas for gradient in sharding.gradients()}
    for section in sharding.sections:
        reductions = backwards if section.reduced_each_time else 1
        for unit in section.units:
            p = unit.group.size
            n = unit.layout.total * unit.formats.compute.itemsize
            again = backwards if sharding.gathering.let_go and section.name and not unit.stays else 0
            gathers = 0 if unit.common else 1 if unit.stays else backwards
            near = sharding.gathering.near.size if sharding.gathering.near else p
            total += unit.publish_bill() + _times(gathers, all_gather_bill(n // p, p)) + _times(again, all_gather_bill(n // near, near))
            if unit.trainable:
                total += _times(reductions, scatter_bill(unit.layout.total * unit.formats.reduce.itemsize, p))
                slice_bytes = unit.layout.total * unit.formats.reduce.itemsize // p
                total += _times(reductions, all_reduce_bill(slice_bytes, replicas[unit].size))
    return total


def _times(n: int, one: Bill) -> Bill:
    return sum((one for _ in range(n)), Bill())
