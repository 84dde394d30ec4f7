"""Expert parallel: the experts of a layer are spread over ranks, and tokens travel to them and back.

Communication plan, one layer:

    counts       every rank tells every other how many rows it has for each of its experts (all-to-all of a few numbers)
    rows         out: rows sorted by expert are sorted by rank too, so each rank's run leaves as it lies (all-to-all, uneven)
    experts      each rank sorts what came by expert, and runs its own
    rows         back the same way; backward both once more, the other way round

The ranks of the expert axis have different tokens and equal copies of everything but the experts. So after backward the gradient of
an expert is complete: its tokens came from all of them. The gradient of anything else is a part, as on any axis that splits
tokens. `gradient_axes` says so for every parameter; whoever sums gradients goes by that. Nothing is divided here: losses are sums.

Read models/moe.py (the layer on one process) and parallel/all_to_all.py before this file.

source: Lepikhin et al. 2020 (GShard); Gale et al. 2022 (no capacity, uneven shares)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.events import Load
from rankloom.base.modes import run_together
from rankloom.parallel.all_to_all import deal_rows
from rankloom.parallel.follow import Guide
from rankloom.world.group import Group

TOKEN_AXES = ("replicate", "shard", "context", "expert")   # ranks along them see different tokens


class SpreadableLayer(Protocol):
    """What a layer of experts must have to be spread: `MoE` of models/moe.py has it."""

    config: Any      # its `experts` says how many there are on all ranks
    experts: Any     # a module with `held`, `keep(first, count)` and `forward(rows sorted by expert, counts)`
    dispatch: Any    # called with the experts, rows sorted by expert, and how many each has
    routed: Tensor | None
    dropped: Tensor | None

    def rebalance(self, routed: Tensor) -> None:
        """Given how many tokens went to each expert on all ranks."""


PARTS = (*SpreadableLayer.__annotations__, "rebalance")   # isinstance, from Python 3.12 on, does not see what a module registers


def expert_parallel(model: nn.Module, group: Group) -> nn.Module:
    """Keep on this rank its share of each layer's experts only, and send tokens to those of the others. Changes `model`.

    Rank r of p keeps experts r E/p to (r+1) E/p - 1 of E, under the same parameter names.

    sent:   per layer, forward and backward each, twice every row whose expert is elsewhere; 3(p-1) messages forward, 2(p-1) backward
    raises: ConfigError when p does not divide the experts of a layer, there are none, or they are spread already
    """
    layers = expert_layers(model)
    if not layers:
        raise ConfigError(f"{group.where('expert_parallel')}: {type(model).__name__} has no layers of experts to spread: modules with "
                          f"{', '.join(PARTS)}, as MoE of models/moe.py has them. Experts of other models may be cut along the mesh axis "
                          "tensor, by a plan; those of `transformers` bring one")
    for name, layer in layers.items():
        if isinstance(layer.dispatch, SpreadDispatch):
            raise ConfigError(f"{group.where('expert_parallel')}: the experts of {name} are spread already")
        if layer.experts.held % group.size:
            raise ConfigError(f"{group.where('expert_parallel')}: {name} has {layer.experts.held} experts, which {group.size} ranks cannot "
                              f"share evenly; the expert axis must divide {layer.experts.held}")
    for layer in layers.values():
        each = layer.experts.held // group.size
        layer.experts.keep(group.rank * each, each)
        layer.dispatch = SpreadDispatch(group)
    run_together(model)
    return model


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of experts in a model, by name."""
    return {name: module for name, module in model.named_modules() if all(hasattr(module, part) for part in PARTS)}


@dataclass(frozen=True)
class SpreadDispatch:
    """How rows get to experts that are spread over the ranks of a group, and back."""

    group: Group
    guide: Guide | None = None
    number: int = 0      # of the layer, for those who follow

    def __deepcopy__(self, memo: dict[int, Any]) -> "SpreadDispatch":
        return self   # a copy of the model has the same peers

    @torch.compiler.disable   # nothing of what ranks say to each other can be in a graph
    def __call__(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, W] sorted by expert, counts [E] of each -> [n, W]."""
        if self.guide is not None:
            self.guide.tell_layer(self.number, rows)
        return self.exchange(experts, rows, counts)

    def exchange(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """The same, when nobody need be told."""
        group = self.group
        mine = counts.view(group.size, -1)                                                # of rank r's experts
        theirs = group.all_to_all(mine.contiguous(), label="rows for experts: counts")     # from rank r, for each of the experts here
        send_rows, recv_rows = torch.stack((mine.sum(1), theirs.sum(1))).tolist()
        here = deal_rows(rows, group, send_rows, recv_rows, "rows for experts")
        expert = torch.arange(theirs.shape[1], device=rows.device).repeat(group.size).repeat_interleave(
            theirs.flatten(), output_size=sum(recv_rows))   # told, it need not wait for the device again
        order = expert.argsort(stable=True)                                               # they came sorted by rank, then by expert
        out = experts(here[order], theirs.sum(0))
        return deal_rows(out[order.argsort()], group, recv_rows, send_rows, "rows from experts")


def guide_layers(model: nn.Module, guide: Guide) -> None:
    """In forward-only passes, let ranks without tokens run their experts for the others, in every layer whose experts are spread."""
    for layer in expert_layers(model).values():
        if isinstance(layer.dispatch, SpreadDispatch):
            layer.dispatch = replace(layer.dispatch, guide=guide, number=len(guide.layers))
            guide.layers.append(partial(_run_for_others, layer))


def _run_for_others(layer: Any, rows: Tensor) -> None:
    layer.dispatch.exchange(layer.experts, rows, torch.zeros(layer.config.experts, dtype=torch.long, device=rows.device))


def gradient_axes(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter the axes of the mesh over which its gradient must be summed: the ones that split tokens, less those
    from which its tokens have come already."""
    spread = {f"{name}.experts.".lstrip(".") for name, layer in expert_layers(model).items() if isinstance(layer.dispatch, SpreadDispatch)}
    fewer = tuple(axis for axis in TOKEN_AXES if axis != "expert")
    return {name: fewer if any(name.startswith(prefix) for prefix in spread) else TOKEN_AXES for name, _ in model.named_parameters()}


def rebalance(layers: Mapping[str, Any], group: Group, *, move: bool = True) -> dict[str, Load]:
    """After a step, on every rank: count the tokens of all, and move the routers' biases by that. Returns the counts by layer.

    layers: `expert_layers` of the model
    group:  all ranks that split tokens, and had a step (`TOKEN_AXES`)
    move:   or only count: the step did not change the model
    sent:   one all-reduce of E + 1 numbers for all layers together
    """
    if not layers:
        return {}
    counts = [torch.cat(_counted(layer, group)) for layer in layers.values()]
    totals = group.all_reduce(torch.cat(counts), label="tokens of experts").split([len(each) for each in counts])
    for layer, total in zip(layers.values(), totals, strict=True):
        if move:
            layer.rebalance(total[:-1])
    numbers = iter(torch.cat(totals).tolist())   # one wait for the device
    told = {name: list(islice(numbers, len(total))) for name, total in zip(layers, totals, strict=True)}
    return {name: Load(tuple(routed), dropped) for name, (*routed, dropped) in told.items()}


def _counted(layer: Any, group: Group) -> tuple[Tensor, Tensor]:
    """What a layer has counted, zeros where it had nothing to count; afterwards it begins anew."""
    zeros = torch.zeros(layer.config.experts, dtype=torch.long, device=group.device)
    routed, dropped = layer.routed, layer.dropped
    layer.routed = layer.dropped = None
    return zeros if routed is None else routed, zeros.new_zeros(1) if dropped is None else dropped.view(1)
