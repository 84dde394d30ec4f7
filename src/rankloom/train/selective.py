"""The policy `selective`: keep the outputs of matrix products and attention, and hand them out when the block runs again.

What is kept is dear to compute for its size. The scores of an attention that is written out are products too, but large and cheap.

    forward   `Keep` notes the output of each operation in KEPT, in order
    again     `Reuse` hands them out in that order, and lets every other operation run

torch has such a pair too, which counts every operation, kept or not; so a weight that autocast had cached in the first run and casts
anew in the second stops it. This one counts only what it keeps, and learns in the first backward how many of them are asked for:
the last product of a block mostly is not, since nothing after it saves a thing.

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
KEPT = ATTENTION | {   # dear to compute for their size
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten._scaled_mm, aten.convolution,
}
HEAD = 256   # the widest head whose scores are taken for scores


def is_kept(operation: Any, args: Any) -> bool:
    """Whether `selective` keeps what an operation, an overload such as aten.mm.default, makes of its arguments."""
    packet = getattr(operation, "overloadpacket", None)
    return packet in KEPT and not operation._schema.is_mutable and not (packet in (aten.bmm, aten.baddbmm) and _are_scores(*args[-2:]))


def _are_scores(queries: Tensor, keys: Tensor) -> bool:
    """[b, n, k] by [b, k, m]: large and cheap, where attention is written out. Not to keep them is the point of Korthikanti 2022."""
    (n, k), m = queries.shape[-2:], keys.shape[-1]
    return k <= HEAD and n * m > k * (n + m)


class Keep(TorchDispatchMode):
    """Notes outputs. `most`: how many, where it is known that no more are asked for."""

    def __init__(self, most: int | None = None):
        super().__init__()   # type: ignore[no-untyped-call]
        self.outputs: list[Any] = []   # None: to be computed again
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        out = func(*args, **(kwargs or {}))
        if is_kept(func, args):
            wanted = self._most is None or len(self.outputs) < self._most
            # detached: what is kept must not hold the graph that holds it
            self.outputs.append(tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out) if wanted else None)
        elif func._schema.is_mutable:
            self.forget((args, kwargs))
        return out

    def forget(self, changed: Any) -> None:
        """These tensors change after they were noted, or may: compute them again."""
        storages = _storages(changed)
        self.outputs = [None if storages & _storages(kept) else kept for kept in self.outputs]


class Reuse(TorchDispatchMode):
    """Hands out what `Keep` has noted. `used`: how many of them a run has come to."""

    def __init__(self, kept: Keep):
        super().__init__()   # type: ignore[no-untyped-call]
        self.used = 0
        self._kept = kept

    def __enter__(self) -> "Reuse":
        self.used = 0
        return super().__enter__()   # type: ignore[no-untyped-call,no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation, or finds what it gave."""
        if is_kept(func, args):
            kept = self._kept.outputs[self.used]
            self.used += 1
            if kept is not None:
                return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, kept)
        return func(*args, **(kwargs or {}))


def _storages(tree: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(tree) if isinstance(t, Tensor) and t.layout == torch.strided}
