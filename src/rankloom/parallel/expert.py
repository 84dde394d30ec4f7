"""Expert parallel: the experts of a layer are spread over ranks, and tokens travel to them and back.

Communication plan of one layer; a row is a token's hidden state:

    counts       every rank sends every other how many rows it has for each of its experts (all-to-all of a few numbers)
    dispatch     rows sorted by expert are sorted by rank too, so each rank's run is sent as it lies (all-to-all, uneven)
    experts      each rank sorts the rows it got by expert, and runs its experts
    combine      the results go back the same way; backward repeats both all-to-alls in reverse

The ranks of the expert axis have different tokens, and equal copies of everything but the experts. So after backward the gradient of an
expert is complete: it got tokens from all ranks. Any other gradient is a partial sum, as on any axis that splits tokens.
`gradient_axes` says over which axes to sum each. Nothing is divided here: losses are sums.

Read models/moe.py (the layer on one process) and parallel/all_to_all.py before this file.

source: Lepikhin et al. 2020 (GShard); Gale et al. 2022 (no capacity, uneven shares)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.events import Load
from rankloom.base.expect import expect_type
from rankloom.base.mesh import TOKEN_AXES
from rankloom.base.modes import run_together
from rankloom.base.names import full_name
from rankloom.parallel.all_to_all import deal_rows
from rankloom.parallel.axes import note_axis
from rankloom.parallel.sections.follow import Guide
from rankloom.world.group import Group


@dataclass(frozen=True, slots=True)
class ExpertReplicas:
    """Parameters of experts, whose gradients are summed over replicas of their own, beside the shard axis.

    together: the ranks of the shard axis, and those to which a forward sends tokens
    """

    names: frozenset[str]
    replicas: Group
    together: Group


class SpreadableLayer(Protocol):
    """What a layer of experts must have to be spread, as `MoE` of models/moe.py has it."""

    config: Any      # config.experts: how many there are on all ranks
    experts: Any     # a module with `held`, `keep(first, count)` and `forward(rows sorted by expert, counts)`
    dispatch: Any    # called with the experts, rows sorted by expert, and how many each has
    routed: Tensor | None
    dropped: Tensor | None

    def rebalance(self, routed: Tensor) -> None:
        """Given how many tokens went to each expert on all ranks."""


ATTRIBUTES = (*SpreadableLayer.__annotations__, "rebalance")   # for hasattr: from Python 3.12 on, isinstance does not see submodules


def expert_parallel(model: nn.Module, group: Group) -> nn.Module:
    """Keep only this rank's share of each layer's experts, and send tokens to those of other ranks. Changes `model`.

    Rank r of p keeps experts r E/p to (r+1) E/p - 1 of E, under the same parameter names.

    sent:   per layer, forward and backward each, every row whose expert is elsewhere twice; 3(p-1) messages forward, 2(p-1) backward
    raises: ConfigError when p does not divide the experts of a layer, there are none, they are spread already, or they cannot be shared or
            are tied to other modules
    """
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("group", group, Group, "a Group: the world that rl.init gives, or world.group(axis)")
    layers = expert_layers(model)
    if not layers:
        raise ConfigError(f"{group.where('expert_parallel')}: {type(model).__name__} has no layers of experts to spread: modules with "
                          f"{', '.join(ATTRIBUTES)}, as MoE of models/moe.py has them. Experts of other models may be cut along the mesh "
                          "axis tensor, by a plan; those of `transformers` bring one")
    for name, layer in layers.items():
        if isinstance(layer.dispatch, SpreadDispatch):
            raise ConfigError(f"{group.where('expert_parallel')}: the experts of {name} are spread already")
        if not (hasattr(layer.experts, "held") and hasattr(layer.experts, "keep")):
            raise ConfigError(f"{group.where('expert_parallel')}: the experts of {name}, {type(layer.experts).__name__}, cannot be shared; "
                              "they need `held`, how many experts are here, and `keep(first, count)`, which drops the others, as Experts "
                              "of models/moe.py has them")
        if layer.experts.held % group.size:
            raise ConfigError(f"{group.where('expert_parallel')}: {name} has {layer.experts.held} experts, which {group.size} ranks cannot "
                              f"share evenly; the expert axis must divide {layer.experts.held}")
    _keep_own(model, [*dict.fromkeys(layer.experts for layer in layers.values())], group)   # layers may have the same experts
    for layer in layers.values():
        layer.dispatch = SpreadDispatch(group)
    run_together(model)
    note_axis(model, "expert", group)
    return model


def _keep_own(model: nn.Module, every: Sequence[Any], group: Group) -> None:
    """Keep this rank's share of each module of experts. A parameter that several of them have stays one."""
    inside = {module for experts in every for module in experts.modules()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}   # where a parameter is; all are alive until `keep`
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            same = places.setdefault(id(param), [])
            same.append((module, key))
            if (module in inside) != (same[0][0] in inside):
                raise ConfigError(f"{group.where('expert_parallel')}: {full_name(name, key)} is a parameter of experts and of another "
                                  "module, which needs it whole: do not tie the two")
    for experts in every:
        each = experts.held // group.size
        experts.keep(group.rank * each, each)
    for (first, key), *others in places.values():
        for module, other in others if first in inside else ():
            setattr(module, other, getattr(first, key))


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of experts in a model, by name."""
    return {name: module for name, module in model.named_modules() if all(hasattr(module, attribute) for attribute in ATTRIBUTES)}


@dataclass(frozen=True)
class SpreadDispatch:
    """Sends rows to experts that are spread over the ranks of a group, and their results back."""

    group: Group
    guide: Guide | None = None   # directs idle ranks (parallel/sections/follow.py)
    number: int = 0              # of the layer, for the guide

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpreadDispatch":
        return self   # a copy of the model has the same peers

    @torch.compiler.disable   # communication cannot be compiled
    def __call__(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, W] sorted by expert, counts [E] of each -> [n, W]."""
        if self.guide is not None:
            self.guide.tell_layer(self.number, rows)
        return self.exchange(experts, rows, counts)

    def exchange(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """`__call__` without announcing it to idle ranks."""
        group = self.group
        mine = counts.view(group.size, -1)                                                # of rank r's experts
        theirs = group.all_to_all(mine.contiguous(), label="rows for experts: counts")     # from rank r, for each of the experts here
        send_rows, recv_rows = torch.stack((mine.sum(1), theirs.sum(1))).tolist()
        here = deal_rows(rows, group, send_rows, recv_rows, "rows for experts")
        expert = torch.arange(theirs.shape[1], device=rows.device).repeat(group.size).repeat_interleave(
            theirs.flatten(), output_size=sum(recv_rows))   # output_size avoids a synchronisation
        order = expert.argsort(stable=True)                                               # they arrive sorted by rank, then by expert
        out = experts(here[order], theirs.sum(0))
        return deal_rows(out[order.argsort()], group, recv_rows, send_rows, "rows from experts")


def guide_layers(model: nn.Module, guide: Guide) -> None:
    """Let idle ranks run their experts for the others in forward-only passes, in every layer whose experts are spread."""
    for layer in expert_layers(model).values():
        if isinstance(layer.dispatch, SpreadDispatch):
            layer.dispatch = replace(layer.dispatch, guide=guide, number=len(guide.layers))
            guide.layers.append(partial(_run_for_others, layer))


def _run_for_others(layer: Any, rows: Tensor) -> None:
    layer.dispatch.exchange(layer.experts, rows, torch.zeros(layer.config.experts, dtype=torch.long, device=rows.device))


def gradient_axes(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter, the mesh axes over which its gradient is summed: those that split tokens; for experts, without "expert"."""
    spread, fewer = spread_parameters(model), tuple(axis for axis in TOKEN_AXES if axis != "expert")
    return {name: fewer if name in spread else TOKEN_AXES for name, _ in model.named_parameters()}


def spread_parameters(model: nn.Module) -> frozenset[str]:
    """The parameters of experts that are spread over ranks, each under all of its names."""
    every = model.named_modules(remove_duplicate=False)
    spread = [f"{name}.experts.".lstrip(".") for name, layer in every if isinstance(getattr(layer, "dispatch", None), SpreadDispatch)]
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(tuple(spread)))


def rebalance(layers: Mapping[str, Any], group: Group, *, move: bool = True) -> dict[str, Load]:
    """After a step, on every rank: count the tokens of each expert, and adjust the routers' biases. Returns the counts by layer.

    layers: `expert_layers` of the model
    group:  all ranks that split tokens (`TOKEN_AXES`)
    move:   False: only count, where the step did not change the model
    sent:   one all-reduce of E + 1 numbers a layer, for all layers together
    """
    if not layers:
        return {}
    counts = [torch.cat(_counted(layer, group)) for layer in layers.values()]
    totals = group.all_reduce(torch.cat(counts), label="tokens of experts").split([len(each) for each in counts])
    for layer, total in zip(layers.values(), totals, strict=True):
        if move:
            layer.rebalance(total[:-1])
    numbers = iter(torch.cat(totals).tolist())   # one wait for the device
    by_layer = {name: list(islice(numbers, len(total))) for name, total in zip(layers, totals, strict=True)}
    return {name: Load(tuple(routed), dropped) for name, (*routed, dropped) in by_layer.items()}


def _counted(layer: Any, group: Group) -> tuple[Tensor, Tensor]:
    """What a layer has counted since the last call, zeros where it did not run."""
    zeros = torch.zeros(layer.config.experts, dtype=torch.long, device=group.device)
    routed, dropped = layer.routed, layer.dropped
    layer.routed = layer.dropped = None
    return zeros if routed is None else routed, zeros.new_zeros(1) if dropped is None else dropped.view(1)
