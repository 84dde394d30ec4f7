"""FP8 training: the products of a model's linear layers in eight bits, everything else as it was.

    forward    y  = x @ w.T       x and w in E4M3
    backward   dx = g @ w         g in E5M2
               dw = g.T @ x

A layer stays an `nn.Linear` with the same parameter under the same name; only its class changes. So optimizers, wrappers and checkpoints
see nothing of it. Weights are always scaled by what they are now, the whole of them; they are cast once a step (`begin_step`), come in
eight bits (shard/float8_unit.py), or are cast in each pass. `timing="delayed"` is for what flows: inputs and gradients (amax.py).

Read base/float8.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.float8 import E4M3, E5M2, STEP, Float8, cast, magnitude, scaled_product
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


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in eight bits. Never built: `to_float8` turns an `nn.Linear` into one, where it stands.

    held:   this step's weight in eight bits, for products that sum over its rows' elements and over its columns'; None: cast in each pass
    meters: of its input and of its gradient, for delayed scaling
    """

    recipe: Recipe
    held: tuple[Float8, Float8] | None
    meters: tuple[Meter, Meter] | None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        if not x.numel():   # nothing to scale by
            return F.linear(x, self.weight, self.bias)
        product: Tensor = Float8Product.apply(x.flatten(0, -2), self.weight, self)   # type: ignore[no-untyped-call]
        y = product.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def cast_flow(self, x: Tensor, dtype: torch.dtype, which: int) -> tuple[Float8, Float8]:
        """The input (0) or the gradient (1) [m, n], scaled for products over n and for products over m; its magnitude is noted."""
        if self.meters is None or not self.training:   # evaluation leaves no trace in the scales
            return cast_both_ways(x, dtype, self.recipe)
        largest = magnitude(x)
        both = cast(x, dtype, largest, reference=self.meters[which].read(largest), margin=self.recipe.margin)
        return both, both


class Float8Product(torch.autograd.Function):
    """x [m, in] and a layer's weight [out, in] -> x @ weight.T [m, out], and its two products backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Float8Linear) -> Tensor:
        """Kept for backward: the input in eight bits; the weight so, where the layer holds it, else itself: it may be gathered again."""
        x_rows, x_columns = layer.cast_flow(x, layer.recipe.forward, 0)
        w_rows, w_columns = layer.held or cast_both_ways(weight, layer.recipe.forward, layer.recipe)
        ctx.layer, ctx.held, ctx.dtypes = layer, layer.held is not None, (x.dtype, weight.dtype)
        ctx.save_for_backward(*x_columns, *(w_columns if ctx.held else (weight,)))
        return scaled_product(x_rows, w_rows.transposed(), x.dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradient is cast once, for both products. They add up in fp32 on every device: they are sums of many small parts."""
        layer = ctx.layer
        data, scale, *weight = ctx.saved_tensors
        w_columns = Float8(*weight) if ctx.held else cast_both_ways(weight[0], layer.recipe.forward, layer.recipe)[1]
        g_rows, g_columns = layer.cast_flow(grad, layer.recipe.backward, 1)
        dx = scaled_product(g_rows, w_columns, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        dw = scaled_product(g_columns.transposed(), Float8(data, scale), ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def cast_both_ways(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Float8, Float8]:
    """x [m, n] for products that sum over n and for those that sum over m: one and the same, unless scaled by rows."""
    if recipe.scaling == "tensor":
        both = cast(x, dtype, magnitude(x))
        return both, both
    return cast(x, dtype, magnitude(x, 1)), cast(x, dtype, magnitude(x, 0))


class Float8Layers:
    """The layers of a model that `to_float8` has converted, and what they need from a training step. There may be none."""

    def __init__(self, layers: dict[str, Float8Linear], history: AmaxHistory | None):
        self.layers, self.history = layers, history
        self._cast: list[Float8Linear] = []   # in this step

    @property
    def names(self) -> list[str]:
        """Of the layers, in the order of the model."""
        return list(self.layers)

    def readers(self, model: nn.Module) -> dict[str, list[Float8Linear]]:
        """Weights of `model` that can travel in eight bits (shard/float8_unit.py): by name, the layers that multiply by each.

        None when scaled by rows: backward needs these scaled by columns too, and what travels has one scale.
        """
        found: dict[str, list[Float8Linear]] = {}
        names = {id(param): name for name, param in model.named_parameters()}
        for layer in self.layers.values():
            if layer.recipe.scaling == "tensor":
                found.setdefault(names[id(layer.weight)], []).append(layer)
        return found

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
            layer.held = cast_both_ways(layer.weight, layer.recipe.forward, layer.recipe)

    def end_step(self, group: Group, *, finite: bool = True) -> None:
        """Before the weights change: drop their casts; ranks agree on the magnitudes that the next step scales by.

        group:  all ranks that work with these weights
        finite: False after a step that changes nothing, on all ranks
        """
        for layer in self._cast:
            layer.held = None
        self._cast = []
        if self.history and finite:
            self.history.close_step(group)


def to_float8(model: nn.Module, recipe: Recipe | None = None) -> Float8Layers:
    """Let the linear layers of `model` multiply in eight bits, where they stand. To be called once it is on its device.

    raises: ConfigError when no layer is left, or a pattern of `recipe.keep` fits none
    """
    recipe = recipe or Recipe()
    plan = plan_float8(model, recipe.keep)
    chosen = {name: model.get_submodule(name) for name, reason in plan.items() if not reason}
    if not chosen:
        stays = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in plan.items()) or "there is no nn.Linear in it"
        raise ConfigError(f"no layer of this model can be in fp8: {stays}")
    history = None
    if recipe.timing == "delayed":
        flows = [f"{name}.{flow}" for name in chosen for flow in ("input", "gradient")]
        history = AmaxHistory(flows, recipe.history, next(iter(chosen.values())).weight.device)   # type: ignore[arg-type]
    layers = {}
    for name, layer in chosen.items():
        layer.__class__ = Float8Linear
        assert isinstance(layer, Float8Linear), "a layer was not converted"
        layer.recipe, layer.held = recipe, None
        layer.meters = (history.meters[f"{name}.input"], history.meters[f"{name}.gradient"]) if history else None
        layers[name] = layer
    return Float8Layers(layers, history)


def plan_float8(model: nn.Module, keep: Sequence[str] = ()) -> dict[str, str]:
    """For each `nn.Linear`: why it stays as it is; "" when it goes to eight bits.

    Those stay whose dims do not divide by 16; whose weight another kind of module uses as well; the one that makes the model's output (the
    last that hangs on the model itself), where an error goes straight into the loss; and what `keep` names.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(f"fp8 keep: {pattern!r} fits no linear layer. {did_you_mean(pattern, linears)}")
    shared = {id(p) for module in model.modules() if not isinstance(module, nn.Linear) for p in module.parameters(recurse=False)}
    last = next((name for name in reversed(linears) if "." not in name), None)

    def reason(name: str, layer: nn.Linear) -> str:
        if layer.in_features % STEP or layer.out_features % STEP:
            return f"{layer.in_features} x {layer.out_features} does not divide by {STEP}"
        if id(layer.weight) in shared:
            return "its weight is another module's too"
        if name == last:
            return "it makes the output"
        return "keep names it" if any(fnmatchcase(name, pattern) for pattern in keep) else ""

    return {name: reason(name, layer) for name, layer in linears.items()}
