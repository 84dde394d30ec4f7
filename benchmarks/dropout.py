"""What keyed dropout costs: forward and backward of one layer, beside torch's own `nn.Dropout`, on a GPU where there is one.

    python benchmarks/dropout.py
"""

from collections.abc import Callable
from functools import partial

import torch
from common import Words, count, keep, machine, median_ms, median_ratio, pin_to_core, show, synchronize, take_turns, the_device
from torch import nn

from rankloom.train.dropout import DropoutKey, KeyedDropout

SHAPES = ((2, 128, 64), (8, 256, 256), (8, 1024, 768), (4, 8, 512, 512))   # the last: attention weights


def make_layers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], None]]:
    """A forward and backward of each kind, on the same input."""
    x, key = torch.randn(shape, dtype=dtype, device=device, requires_grad=True), DropoutKey(seed=0)
    key.set_rows(0, range(shape[0]))
    layers = {"torch": nn.Dropout(0.1), "rankloom": KeyedDropout(0.1, "dropout", key)}

    def run(layer: nn.Module) -> None:
        layer(x).backward(x.detach())
        x.grad = None

    return {name: partial(run, layer) for name, layer in layers.items()}


def main() -> None:
    """Measure every shape and format, print the table, keep it."""
    parser = Words(__doc__)
    parser.add_argument("--repeat", type=count, default=30)
    args = parser.read()
    device, where = the_device(), machine()
    if device.type == "cpu":
        pin_to_core(0)
    rows = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            times = take_turns(make_layers(shape, dtype, device), args.repeat, partial(synchronize, device))
            mine, torch_own = times["rankloom"]["wall"], times["torch"]["wall"]
            rows.append({"shape": "x".join(map(str, shape)), "format": str(dtype).removeprefix("torch."), "torch ms": median_ms(torch_own),
                         "rankloom ms": median_ms(mine), "over torch": median_ratio(mine, torch_own)})
    print(show(rows))
    keep("dropout" if device.type == "cpu" else "gpu_dropout", where, rows)


if __name__ == "__main__":
    main()
