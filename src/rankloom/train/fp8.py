"""FP8 training: matrix products of linear layers in 8 bits, everything else in the usual dtypes.

    forward    y  = x @ w.T       x and w in E4M3
    backward   dx = g @ w         g in E5M2
               dw = g.T @ x

A layer stays an `nn.Linear` with the same parameter under the same name; only its class changes, so optimizers, wrappers and
checkpoints need not know. Weights are always scaled by their current largest magnitude, that of the whole matrix. They are cast once per
step (`begin_step`), gathered in 8 bits (shard/float8_unit.py), or cast in each pass. `timing="delayed"` is for inputs and gradients
(amax.py).

Over tensor ranks, too, a scale is that of the whole matrix: ranks that hold parts of it agree on its largest magnitude. So they cast to
exactly the bits that one process casts to.

    column     x whole        w cut by rows      g cut by columns    y, dw: those of one process; dx: a partial sum
    row        x cut by columns    w cut by columns    g whole       dx, dw: those of one process; y: a partial sum

Each rank rounds its partial sum to bf16: the error is at most (p + 1) 2**-8 of the sum of the terms' magnitudes.

Read base/float8.py first.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.float8 import E4M3, E5M2, GRAIN, BothWays, Float8, cast, cast_each, cast_twice, magnitude, magnitudes, scaled_product
from rankloom.base.names import full_name
from rankloom.parallel.tensor.holding import holdings
from rankloom.parallel.tensor.layers import ColumnLinear, RowLinear
from rankloom.train.amax import AmaxHistory, Meter
from rankloom.world.group import Group

MOST_MARGIN = 6   # powers of two; with more, the largest fp32 as amax would overflow
SHOWN = 3         # layers that an error names


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors are cast to 8 bits.

    scaling: "tensor": one scale per matrix; "row": one per row (or per column, where a product sums over rows)
    timing:  "current": scale by a tensor's own largest magnitude; "delayed": by that of the last `history` steps, so a cast need not wait
    history: number of steps remembered
    margin:  powers of two left free above the remembered magnitude, as headroom for growth
    keep:    patterns of layers that are not converted (`blocks.0.*`), beside those that never are: see `plan_float8`
    """

    scaling: str = "tensor"
    timing: str = "current"
    history: int = 16
    margin: int = 0
    keep: tuple[str, ...] = ()
    forward: torch.dtype = E4M3
    backward: torch.dtype = E5M2

    def __post_init__(self) -> None:
        if self.scaling not in ("tensor", "row"):
            raise ConfigError(f"fp8 scaling={self.scaling!r} is unknown. {did_you_mean(self.scaling, ('tensor', 'row'))}")
        if self.timing not in ("current", "delayed"):
            raise ConfigError(f"fp8 timing={self.timing!r} is unknown. {did_you_mean(self.timing, ('current', 'delayed'))}")
        if self.timing == "delayed" and self.scaling == "row":
            raise ConfigError("fp8 timing='delayed' needs scaling='tensor': a row is a token, and tells nothing of the next one")
        if self.history < 1 or not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(f"fp8 history={self.history}, margin={self.margin}: expected 1 step or more, a margin of 0 to {MOST_MARGIN}")
        if (self.forward, self.backward) not in ((E4M3, E5M2), (E4M3, E4M3)):
            raise ConfigError(f"fp8 formats {self.forward}, {self.backward}: expected E4M3 forward, and E5M2 or E4M3 for gradients")


class SplitOver(NamedTuple):
    """The ranks that hold the parts of a matrix, and the dim along which it is split."""

    group: Group
    dim: int


class FlowMeters(NamedTuple):
    """The amax meters of what flows through a layer."""

    input: Meter
    gradient: Meter


class InFloat8(nn.Module):
    """A linear layer that multiplies in 8 bits. Never constructed: `to_float8` changes the class of a plain layer in place.

    cut:    the dim of its weight [out, in] that is split over tensor ranks
    held:   this step's weight in 8 bits; None: cast in each pass
    meters: for delayed scaling
    """

    cut: int | None = None
    weight: Any
    recipe: Recipe
    held: BothWays | None
    meters: FlowMeters | None

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in] -> [..., out]; a vector is one row"""
        if not x.numel():   # nothing to scale by
            return F.linear(x, self.weight, bias)
        rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        product: Tensor = Float8Product.apply(rows, self.weight, self)   # type: ignore[no-untyped-call]
        y = product.view(*x.shape[:-1], product.shape[-1])
        return y if bias is None else y + bias

    @property
    def peers(self) -> Group | None:
        """The ranks that hold the other parts of the weight."""
        return None

    def split_along(self, dim: int | None) -> SplitOver | None:
        """Over which ranks a matrix is split along `dim`; None: it is not."""
        return None if self.peers is None or dim is None else SplitOver(self.peers, dim)

    def cast_weight(self, weight: Tensor) -> BothWays:
        """The weight [out, in]: its rows are summed over `in`, its columns over `out`."""
        return cast_both_ways(weight, self.recipe.forward, self.recipe, self.split_along(self.cut))

    def cast_input(self, x: Tensor) -> BothWays:
        """The input [m, in]. It is split where the weight is cut along `in`."""
        return self._cast_flow(x, self.recipe.forward, self.meters and self.meters.input, is_split=self.cut == 1)

    def cast_gradient(self, grad: Tensor) -> BothWays:
        """The gradient of the output [m, out]. It is split where the weight is cut along `out`."""
        return self._cast_flow(grad, self.recipe.backward, self.meters and self.meters.gradient, is_split=self.cut == 0)

    def _cast_flow(self, x: Tensor, dtype: torch.dtype, meter: Meter | None, *, is_split: bool) -> BothWays:
        """x: [m, n], split along n or not. With a meter, records the amax."""
        split = self.split_along(1 if is_split else None)
        if meter is None or not self.training:   # evaluation leaves no trace in the scales
            return cast_both_ways(x, dtype, self.recipe, split)
        largest = magnitude(x)
        reference = meter.read(largest)
        if reference is None:
            largest = _over_all_ranks(largest, split, 1)
        return cast_twice(x, dtype, largest, reference=reference, margin=self.recipe.margin)


class Float8Linear(InFloat8, nn.Linear):
    """A layer that is not split."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        return self.product(x, self.bias)


class _Split(InFloat8):
    group: Group

    @property
    def peers(self) -> Group:
        """The tensor ranks."""
        return self.group

    @torch.compiler.disable   # collectives cannot be in a graph
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in] -> [..., out]; in or out are this rank's features only"""
        return super().product(x, bias)


class Float8Column(_Split, ColumnLinear):
    """A layer that is split by output features."""

    cut = 0


class Float8Row(_Split, RowLinear):
    """A layer that is split by input features."""

    cut = 1


KINDS: dict[type[nn.Module], type[InFloat8]] = {nn.Linear: Float8Linear, ColumnLinear: Float8Column, RowLinear: Float8Row}


class Float8Product(torch.autograd.Function):
    """x [m, in] and a layer's weight [out, in] -> x @ weight.T [m, out], and its two products backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: InFloat8) -> Tensor:
        """Saves the input in 8 bits, and the weight: in 8 bits if the layer holds that, else as it is: it may be gathered again."""
        eight_x, eight_w = layer.cast_input(x), layer.held or layer.cast_weight(weight)
        ctx.layer, ctx.held, ctx.dtypes = layer, layer.held is not None, (x.dtype, weight.dtype)
        ctx.save_for_backward(*eight_x.by_columns, *(eight_w.by_columns if ctx.held else (weight,)))
        return scaled_product(eight_x.by_rows, eight_w.by_rows.transposed(), x.dtype, fast_accum=True)

    @staticmethod
    @torch.autograd.function.once_differentiable   # a cast to 8 bits has no derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradient is cast once for both products. These accumulate in fp32 on every device: they sum many small terms."""
        layer = ctx.layer
        data, scale, *weight = ctx.saved_tensors
        w = Float8(*weight) if ctx.held else layer.cast_weight(weight[0]).by_columns
        g = layer.cast_gradient(grad)
        dx = scaled_product(g.by_rows, w, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = scaled_product(g.by_columns.transposed(), Float8(data, scale), ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def cast_both_ways(x: Tensor, dtype: torch.dtype, recipe: Recipe, split: SplitOver | None = None) -> BothWays:
    """x [m, n] in 8 bits, both ways; the same values, unless each way has scales of its own (scaled by rows).

    split: over the ranks that hold the parts of x
    sent:  with `split`, an all-reduce of one number; scaled by rows, of one number per row or column that is split
    """
    if recipe.scaling == "tensor":
        return cast_twice(x, dtype, _over_all_ranks(magnitude(x), split, 0, 1))
    by_rows, by_columns = _over_all_ranks(magnitude(x, 1), split, 1), _over_all_ranks(magnitude(x, 0), split, 0)
    return BothWays(cast(x, dtype, by_rows), cast(x, dtype, by_columns))


def cast_weights(layers: Sequence[InFloat8]) -> list[BothWays]:
    """What `cast_weight` gives for each of some layers with one recipe. For all scales together a few kernels, and one message."""
    if not layers or layers[0].recipe.scaling == "row":
        return [layer.cast_weight(layer.weight) for layer in layers]
    dtype, split = layers[0].recipe.forward, next((SplitOver(layer.peers, 0) for layer in layers if layer.peers), None)
    weights = [layer.weight for layer in layers]
    largest = _over_all_ranks(magnitudes(weights), split, 0)   # of a weight that all of them hold whole it stays the same
    return cast_each(weights, dtype, largest)


def _over_all_ranks(largest: Tensor, split: SplitOver | None, *dims: int) -> Tensor:
    """Magnitudes that were taken over `dims` of a part, over the whole matrix. A NaN becomes infinity, so that `max` keeps it."""
    if split is None or split.dim not in dims:
        return largest
    whole: Tensor = split.group.all_reduce(largest.nan_to_num(nan=torch.inf, posinf=torch.inf), "max", label="amax of a whole matrix")
    return whole


class Float8Layers:
    """The layers that `to_float8` has converted, and their work in a training step. There may be none."""

    def __init__(self, layers: dict[str, InFloat8], history: AmaxHistory | None):
        self.layers, self.history = layers, history
        self._cast: list[InFloat8] = []   # layers whose weights are cast for this step

    def readers(self, model: nn.Module) -> dict[str, list[InFloat8]]:
        """Weights of `model` that can be gathered in 8 bits (shard/float8_unit.py): name -> the layers that multiply by it.

        Empty when scaled by rows: backward needs a second cast, scaled by columns, and only one is gathered.
        """
        found: dict[str, list[InFloat8]] = {}
        names = {id(param): name for name, param in model.named_parameters()}
        for layer in self.layers.values():
            if layer.recipe.scaling == "tensor":
                found.setdefault(names[id(layer.weight)], []).append(layer)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The amax history of delayed scaling, in CPU memory; without delayed scaling, empty."""
        return self.history.state_dict() if self.history else {}

    def misfit(self, saved: Mapping[str, Tensor]) -> str | None:
        """Why `saved` cannot be loaded, in words, or None."""
        return self.history.misfit(saved) if self.history and saved else None

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Load an amax history; an empty one means a new run. Without delayed scaling this does nothing."""
        if self.history:
            self.history.load_state_dict(saved)

    @torch.no_grad()
    def begin_step(self, *, whole: bool) -> None:
        """Before the first micro-batch.

        whole:  the model holds all its weights: cast each once, for all micro-batches
        memory: if whole, 2 bytes per weight until `end_step`
        """
        if self.history:
            self.history.abandon_step()   # clear what a failed step left behind
        self._cast_all(whole)

    @contextmanager
    @torch.no_grad()
    def weights_cast(self, *, whole: bool) -> Iterator[None]:
        """A context between two steps, in which no weight changes: each is cast once. whole, memory: see `begin_step`"""
        self._cast_all(whole)
        try:
            yield
        finally:
            self.drop_casts()

    def _cast_all(self, whole: bool) -> None:
        self._cast = list(self.layers.values()) if whole else []
        for layer, both in zip(self._cast, cast_weights(self._cast)):
            layer.held = both

    def end_step(self, group: Group, *, finite: bool = True) -> None:
        """Before the weights change: drop their casts, and agree on the magnitudes for the next step's scales.

        group:  all ranks that use these weights
        finite: False, on all ranks, when the step updates nothing
        """
        self.drop_casts()
        if self.history and finite:
            self.history.close_step(group)

    def drop_casts(self) -> None:
        """Drop the casts of weights that change."""
        for layer in self._cast:
            layer.held = None
        self._cast = []


def to_float8(model: nn.Module, recipe: Recipe | None = None, elsewhere: Group | None = None) -> Float8Layers:
    """Convert the linear layers of `model` to 8-bit products, in place. Call it when the model is on its device and split over ranks.

    elsewhere: ranks that hold other parts of these layers, or other pipeline stages
    raises: ConfigError, on all ranks, when no layer can be converted, a pattern of `recipe.keep` fits none, or a dim of a rank's part
            is not a multiple of 16
    """
    recipe = recipe or Recipe()
    plan = plan_float8(model, recipe.keep)
    chosen = {name: model.get_submodule(name) for name, reason in plan.items() if not reason}
    if not chosen:
        stays = [f"{name or 'the model'}: {reason}" for name, reason in plan.items()] or ["there is no nn.Linear in it"]
        more = [f"and {len(stays) - SHOWN} more"] if len(stays) > SHOWN else []
        raise ConfigError(f"no layer of this model can be in fp8: {'; '.join([*stays[:SHOWN], *more])}. Train it in bf16")
    _expect_even_parts(chosen, elsewhere)
    history = None
    if recipe.timing == "delayed":
        flows = [f"{name}.{flow}" for name in chosen for flow in ("input", "gradient")]
        history = AmaxHistory(flows, recipe.history, next(iter(chosen.values())).weight.device, elsewhere)   # type: ignore[arg-type]
    layers = {}
    for name, layer in chosen.items():
        layer.__class__ = KINDS[type(layer)]
        assert isinstance(layer, InFloat8), "a layer was not converted"
        layer.recipe, layer.held = recipe, None
        layer.meters = FlowMeters(history.meters[f"{name}.input"], history.meters[f"{name}.gradient"]) if history else None
        layers[name] = layer
    return Float8Layers(layers, history)


def plan_float8(model: nn.Module, keep: Sequence[str] = ()) -> dict[str, str]:
    """For each linear layer: why it is not converted; "" if it is.

    Not converted are layers with a dim that is 0 or no multiple of 16, the output layer (the last that is a direct child of the model),
    where an error goes straight into the loss, those that `keep` names, and those whose weight a module that is not converted uses too:
    a weight that is gathered in 8 bits has no other values.
    """
    linears, held = linear_layers(model), holdings(model)
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(f"fp8 keep: {pattern!r} fits no linear layer. {did_you_mean(pattern, linears)}")
    last = next((name for name in reversed(linears) if "." not in name), None)
    kept = {name for name in linears if any(fnmatchcase(name, pattern) for pattern in keep)}
    candidates = {id(layer) for name, layer in linears.items() if name not in kept and name != last}
    others = (module for module in model.modules() if id(module) not in candidates)
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}

    def reason(name: str, layer: nn.Module) -> str:
        shape = held[full_name(name, "weight")].shape   # of the whole weight: the choice is that of one process
        if any(n % GRAIN for n in shape):
            return f"{_sizes(shape)} does not divide by {GRAIN}"
        if not all(shape):   # a dim of 0, and nothing to scale by
            return f"{_sizes(shape)} has no elements"
        if name == last:
            return "it makes the output"
        if name in kept:
            return "keep names it"
        return "its weight is another module's too" if id(layer.weight) in shared else ""

    return {name: reason(name, layer) for name, layer in linears.items()}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> linear layer that could be converted, split or not, in the order of the model."""
    return {name: module for name, module in model.named_modules() if type(module) in KINDS and not getattr(module, "transposed", False)}


def _expect_even_parts(layers: Mapping[str, nn.Module], elsewhere: Group | None) -> None:
    """Raise when a dim of a part is no multiple of 16. Keeping such layers in bf16 silently would make results depend on the mesh."""
    shapes = {name: tuple(weight.shape) for name, layer in layers.items() if isinstance(weight := layer.weight, Tensor)}
    found = [(name, _sizes(shape)) for name, shape in shapes.items() if any(n % GRAIN for n in shape)]
    if elsewhere is not None:   # parts may differ by rank
        found = [uneven for of_rank in elsewhere.all_gather_object(found, label="parts of layers in fp8") for uneven in of_rank]
    if found:
        (first, sizes), keep = found[0], tuple(dict.fromkeys(re.sub(r"\d+", "*", name) for name, _ in found))
        raise ConfigError(f"{first}: a rank's part of the weight is {sizes}, which does not divide by {GRAIN}. Use fewer tensor "
                          f"ranks, or sizes that divide by {GRAIN} times their number, or let such layers stay in bf16, on any mesh: "
                          f"`dataclasses.replace(PRECISIONS['fp8'], float8=Recipe(keep={keep}))` as precision, of "
                          "rankloom.train.precision and rankloom.train.fp8")


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, reversed(shape)))   # in x out, the order of nn.Linear's arguments
