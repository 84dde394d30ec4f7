"""FP8 training: the products of a model's linear layers in eight bits, everything else as it was.

    forward    y  = x @ w.T       x and w in E4M3
    backward   dx = g @ w         g in E5M2
               dw = g.T @ x

A layer stays an `nn.Linear` with the same parameter under the same name; only its class changes. So optimizers, wrappers and checkpoints
see nothing of it. Weights are always scaled by what they are now, the whole of them; they are cast once a step (`begin_step`), come in
eight bits (shard/float8_unit.py), or are cast in each pass. `timing="delayed"` is for what flows: inputs and gradients (amax.py).

Over tensor ranks a scale is that of the whole matrix, too: ranks that hold parts of one agree on its largest magnitude, and cast to the
very bits that one process casts to.

    column     x whole        w cut by rows      g cut by columns    y, dw: those of one process; dx: a partial sum
    row        x cut by columns    w cut by columns    g whole       dx, dw: those of one process; y: a partial sum

A partial sum is rounded on every rank, as in bf16: off by up to (p + 1) 2**-8 of the sum of its terms' magnitudes.

Read base/float8.py first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.float8 import E4M3, E5M2, STEP, Float8, cast, magnitude, scaled_product
from rankloom.parallel.tensor.holding import holdings
from rankloom.parallel.tensor.layers import ColumnLinear, RowLinear
from rankloom.train.amax import AmaxHistory, Meter
from rankloom.world.group import Group

MOST_MARGIN = 6   # powers of two; more would leave fp32's range where an amax is the largest fp32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors become eight bits.

    scaling: "tensor": one scale for a matrix; "row": one for each row (for each column, where a product sums over rows)
    timing:  "current": by a tensor's own largest magnitude; "delayed": by that of the last `history` steps, which saves a pass
    history: steps remembered
    margin:  powers of two left free above the remembered magnitude, for what grows
    keep:    patterns of layers that stay as they are (`blocks.0.*`), beside those that always do: see `plan_float8`
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


class Among(NamedTuple):
    """The ranks that hold the other parts of a matrix, and the dim that it is cut along."""

    group: Group
    dim: int


class InFloat8(nn.Module):
    """A linear layer that multiplies in eight bits. Never built: `to_float8` turns a plain one into one, where it stands.

    cut:    the dim of its weight [out, in] that tensor ranks hold parts of
    held:   this step's weight in eight bits, for products that sum over its rows' elements and over its columns'; None: cast in each pass
    meters: of its input and of its gradient, for delayed scaling
    """

    cut: int | None = None
    weight: Any
    recipe: Recipe
    held: tuple[Float8, Float8] | None
    meters: tuple[Meter, Meter] | None

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

    def among(self, dim: int | None) -> Among | None:
        """For a matrix that is cut along `dim`, if at all."""
        return None if self.peers is None or dim is None else Among(self.peers, dim)

    def cast_weight(self, weight: Tensor) -> tuple[Float8, Float8]:
        """The weight [out, in], scaled for products over `in` and for products over `out`."""
        return cast_both_ways(weight, self.recipe.forward, self.recipe, self.among(self.cut))

    def cast_flow(self, x: Tensor, dtype: torch.dtype, which: int) -> tuple[Float8, Float8]:
        """The input (0) or the gradient (1) [m, n], scaled for products over n and for products over m; its magnitude is noted."""
        among = self.among(1 if self.cut == 1 - which else None)   # features that the layer sums over, or puts out, lie on all ranks
        if self.meters is None or not self.training:   # evaluation leaves no trace in the scales
            return cast_both_ways(x, dtype, self.recipe, among)
        largest = magnitude(x)
        reference = self.meters[which].read(largest)
        if reference is None:
            largest = _agreed(largest, among, 1)
        both = cast(x, dtype, largest, reference=reference, margin=self.recipe.margin)
        return both, both


class Float8Linear(InFloat8, nn.Linear):
    """A whole one."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        return self.product(x, self.bias)


class _Split(InFloat8):
    group: Group

    @property
    def peers(self) -> Group:
        """The tensor ranks."""
        return self.group

    @torch.compiler.disable   # nothing of what ranks say to each other can be in a graph
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in], or this rank's features of it -> [..., out], or this rank's."""
        return super().product(x, bias)


class Float8Column(_Split, ColumnLinear):
    """One that is cut by output features."""

    cut = 0


class Float8Row(_Split, RowLinear):
    """One that is cut by input features."""

    cut = 1


KINDS: dict[type[nn.Module], type[InFloat8]] = {nn.Linear: Float8Linear, ColumnLinear: Float8Column, RowLinear: Float8Row}


class Float8Product(torch.autograd.Function):
    """x [m, in] and a layer's weight [out, in] -> x @ weight.T [m, out], and its two products backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: InFloat8) -> Tensor:
        """Kept for backward: the input in eight bits; the weight so, where the layer holds it, else itself: it may be gathered again."""
        x_rows, x_columns = layer.cast_flow(x, layer.recipe.forward, 0)
        w_rows, w_columns = layer.held or layer.cast_weight(weight)
        ctx.layer, ctx.held, ctx.dtypes = layer, layer.held is not None, (x.dtype, weight.dtype)
        ctx.save_for_backward(*x_columns, *(w_columns if ctx.held else (weight,)))
        return scaled_product(x_rows, w_rows.transposed(), x.dtype, fast_accum=True)

    @staticmethod
    @torch.autograd.function.once_differentiable   # eight bits do not know what they were cast from
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradient is cast once, for both products. They add up in fp32 on every device: they are sums of many small parts."""
        layer = ctx.layer
        data, scale, *weight = ctx.saved_tensors
        w_columns = Float8(*weight) if ctx.held else layer.cast_weight(weight[0])[1]
        g_rows, g_columns = layer.cast_flow(grad, layer.recipe.backward, 1)
        dx = scaled_product(g_rows, w_columns, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = scaled_product(g_columns.transposed(), Float8(data, scale), ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def cast_both_ways(x: Tensor, dtype: torch.dtype, recipe: Recipe, among: Among | None = None) -> tuple[Float8, Float8]:
    """x [m, n] for products that sum over n and for those that sum over m: one and the same, unless scaled by rows.

    among: who holds the other parts of x   sent: then an all-reduce of one number; by rows, of one for each row or column that is cut
    """
    if recipe.scaling == "tensor":
        both = cast(x, dtype, _agreed(magnitude(x), among, 0, 1))
        return both, both
    return cast(x, dtype, _agreed(magnitude(x, 1), among, 1)), cast(x, dtype, _agreed(magnitude(x, 0), among, 0))


def _agreed(largest: Tensor, among: Among | None, *over: int) -> Tensor:
    """The largest of all ranks, where these magnitudes were taken over the dim that is cut. A NaN counts as infinity: none misses that."""
    if among is None or among.dim not in over:
        return largest
    found: Tensor = among.group.all_reduce(largest.nan_to_num(nan=torch.inf, posinf=torch.inf), "max", label="amax of a whole matrix")
    return found


class Float8Layers:
    """The layers of a model that `to_float8` has converted, and what they need from a training step. There may be none."""

    def __init__(self, layers: dict[str, InFloat8], history: AmaxHistory | None):
        self.layers, self.history = layers, history
        self._cast: list[InFloat8] = []   # in this step

    def readers(self, model: nn.Module) -> dict[str, list[InFloat8]]:
        """Weights of `model` that can travel in eight bits (shard/float8_unit.py): by name, the layers that multiply by each.

        None when scaled by rows: backward needs these scaled by columns too, and what travels has one scale.
        """
        found: dict[str, list[InFloat8]] = {}
        names = {id(param): name for name, param in model.named_parameters()}
        for layer in self.layers.values():
            if layer.recipe.scaling == "tensor":
                found.setdefault(names[id(layer.weight)], []).append(layer)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """What delayed scaling remembers, in CPU memory; else nothing."""
        return self.history.state_dict() if self.history else {}

    def misfit(self, saved: Mapping[str, Tensor]) -> str | None:
        """What keeps `saved` from being loaded, in words, or None."""
        return self.history.misfit(saved) if self.history and saved else None

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with what another run remembers; given nothing, as a new run begins. Without delayed scaling it changes nothing."""
        if self.history:
            self.history.load_state_dict(saved)

    @torch.no_grad()
    def begin_step(self, *, whole: bool) -> None:
        """Before the first micro-batch.

        whole:  the model holds all its weights, so that each is cast once for all micro-batches
        memory: then 1 byte for each weight, 2 when scaled by rows, until `end_step`
        """
        if self.history:
            self.history.abandon_step()   # whatever a failed step left behind
        self._cast = list(self.layers.values()) if whole else []
        for layer in self._cast:
            layer.held = layer.cast_weight(layer.weight)

    def end_step(self, group: Group, *, finite: bool = True) -> None:
        """Before the weights change: drop their casts; ranks agree on the magnitudes that the next step scales by.

        group:  all ranks that work with these weights
        finite: False after a step that changes nothing, on all ranks
        """
        self.drop_casts()
        if self.history and finite:
            self.history.close_step(group)

    def drop_casts(self) -> None:
        """The weights are to change, or have changed."""
        for layer in self._cast:
            layer.held = None
        self._cast = []


def to_float8(model: nn.Module, recipe: Recipe | None = None, elsewhere: Group | None = None) -> Float8Layers:
    """Let the linear layers of `model` multiply in eight bits, where they stand. To be called once it is on its device, and split over
    tensor ranks.

    elsewhere: ranks that hold other parts of these layers, or other stages
    raises: ConfigError, on all ranks, when no layer is left, a pattern of `recipe.keep` fits none, or a part of a layer does not divide
            by 16
    """
    recipe = recipe or Recipe()
    plan = plan_float8(model, recipe.keep)
    chosen = {name: model.get_submodule(name) for name, reason in plan.items() if not reason}
    if not chosen:
        stays = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in plan.items()) or "there is no nn.Linear in it"
        raise ConfigError(f"no layer of this model can be in fp8: {stays}")
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
        layer.meters = (history.meters[f"{name}.input"], history.meters[f"{name}.gradient"]) if history else None
        layers[name] = layer
    return Float8Layers(layers, history)


def plan_float8(model: nn.Module, keep: Sequence[str] = ()) -> dict[str, str]:
    """For each linear layer: why it stays as it is; "" when it goes to eight bits.

    Those stay whose dims do not divide by 16; whose weight another kind of module uses as well; the one that makes the model's output (the
    last that hangs on the model itself), where an error goes straight into the loss; and what `keep` names.
    """
    linears, held = linear_layers(model), holdings(model)
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(f"fp8 keep: {pattern!r} fits no linear layer. {did_you_mean(pattern, linears)}")
    others = (module for module in model.modules() if not isinstance(module, tuple(KINDS)))
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}
    last = next((name for name in reversed(linears) if "." not in name), None)

    def reason(name: str, layer: nn.Module) -> str:
        shape = held[f"{name}.weight"].shape   # of the whole: layers are chosen as in one process
        if any(n % STEP for n in shape):
            return f"{_sizes(shape)} does not divide by {STEP}"
        if id(layer.weight) in shared:
            return "its weight is another module's too"
        if name == last:
            return "it makes the output"
        return "keep names it" if any(fnmatchcase(name, pattern) for pattern in keep) else ""

    return {name: reason(name, layer) for name, layer in linears.items()}


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Those that could multiply in eight bits, whole or split, in the order of the model."""
    return {name: module for name, module in model.named_modules() if type(module) in KINDS and not getattr(module, "transposed", False)}


def _expect_even_parts(layers: Mapping[str, nn.Module], elsewhere: Group | None) -> None:
    """Raise where a part of a layer does not divide. To let it stay in bf16 unasked would make a run's numbers depend on its layout."""
    shapes = {name: tuple(weight.shape) for name, layer in layers.items() if isinstance(weight := layer.weight, Tensor)}
    found = [(name, _sizes(shape)) for name, shape in shapes.items() if any(n % STEP for n in shape)]
    told = [found] if elsewhere is None else elsewhere.all_gather_object(found, label="parts of layers in fp8")   # parts may differ
    first = next((about[0] for about in told if about), None)
    if first is not None:
        keep = tuple(dict.fromkeys(re.sub(r"\d+", "*", name) for about in told for name, _ in about))
        raise ConfigError(f"{first[0]}: a rank's part of the weight is {first[1]}, which does not divide by {STEP}. Use fewer tensor "
                          f"ranks, or sizes that divide by {STEP} times their number, or let such layers stay in bf16, on any mesh: "
                          f"`dataclasses.replace(PRECISIONS['fp8'], float8=Recipe(keep={keep}))` as precision (rankloom.train)")


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, reversed(shape)))   # in x out, as nn.Linear is called
