"""The policy `selective`: keep the outputs of matrix products and attention, and reuse them when the block is recomputed.

These are expensive to compute for their size. Scores of an attention that is written out are products, too, but large and cheap.

    forward     `Keep` keeps the output of each operation in KEPT, in order
    recompute   `Reuse` returns them in that order, and runs every other operation

torch's own pair counts every operation, kept or not, so it fails when autocast casts a weight anew that it had cached in the first run.
This one counts only what it keeps. In the first backward it learns how many outputs are used: mostly all but that of a block's last
product, which no gradient needs.

source: Korthikanti et al. 2022
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
ATTENTION = frozenset({
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
})
KEPT = ATTENTION | {   # expensive to compute for their size
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten._scaled_mm, aten.convolution,
}
HEAD = 256   # the widest head; a product over more columns is not taken for scores of attention


def is_kept(operation: Any, args: Any) -> bool:
    """Whether `selective` keeps the output of an operation, an overload such as aten.mm.default, for these arguments."""
    packet = getattr(operation, "overloadpacket", None)
    return packet in KEPT and not operation._schema.is_mutable and not (packet in (aten.bmm, aten.baddbmm) and _are_scores(*args[-2:]))


def _are_scores(queries: Tensor, keys: Tensor) -> bool:
    """Whether [b, n, k] by [b, k, m] has the shape of attention scores: large and cheap, so Korthikanti 2022 does not keep them."""
    (n, k), m = queries.shape[-2:], keys.shape[-1]
    return k <= HEAD and n * m > k * (n + m)


class Keep(TorchDispatchMode):
    """Keeps outputs. most: only so many, once it is known that no more are used"""

    def __init__(self, most: int | None = None):
        super().__init__()   # type: ignore[no-untyped-call]
        self.outputs: list[Any] = []   # None: recompute it
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and keep its output if it is in KEPT."""
        out = func(*args, **(kwargs or {}))
        if is_kept(func, args):
            wanted = self._most is None or len(self.outputs) < self._most
            # detached: a kept output must not refer to the graph, which refers to it
            self.outputs.append(tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out) if wanted else None)
        elif func._schema.is_mutable:
            self.forget((args, kwargs))
        return out

    def forget(self, changed: Any) -> None:
        """Recompute these tensors: they may change after they were kept."""
        gone = storages(changed).keys()
        self.outputs = [None if gone & storages(kept).keys() else kept for kept in self.outputs]


class Reuse(TorchDispatchMode):
    """Returns outputs that `Keep` kept. used: how many a run has reached"""

    def __init__(self, kept: Keep):
        super().__init__()   # type: ignore[no-untyped-call]
        self.used = 0
        self._kept = kept

    def __enter__(self) -> "Reuse":
        self.used = 0
        return super().__enter__()   # type: ignore[no-untyped-call,no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, or return its kept output."""
        if is_kept(func, args):
            kept = self._kept.outputs[self.used]
            self.used += 1
            if kept is not None:
                return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, kept)
        return func(*args, **(kwargs or {}))


def storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the strided tensors in nested containers, by address."""
    found = [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout == torch.strided]
    return {storage._cdata: storage for storage in found}
