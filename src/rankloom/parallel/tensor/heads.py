"""Attention heads over ranks: where queries, keys and values may be cut, and what their module must know afterwards.

A head is never cut. Query heads must divide by the ranks. With grouped queries there are fewer key-value heads: either
they divide too, or the ranks divide by them, and then neighbouring ranks, whose query heads share a key-value head, hold
the same one. Their gradients are terms of a sum: the holding says `owed`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.parallel.tensor.holding import Spans, pieces, shared

# What the attention modules of the field call the width of a head, its number, and those of keys and values.
WIDTHS = ("head_dim", "head_width", "attention_head_size")
QUERIES = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
KEY_VALUES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
FEATURES = ("split_size", "all_head_size")   # of all queries


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention module, as they are before the cut."""

    width: int
    query: int
    name: str      # of the module, for messages

    def spans(self, features: int, ranks: int) -> tuple[Spans, bool]:
        """Who holds which of the `features` of queries, keys or values; and whether ranks hold the same, so that gradients are owed.

        raises: ConfigError with the reason
        """
        units, rest = divmod(features, self.width)
        if rest:
            raise ConfigError(f"{self.name}: {features} features are no whole number of heads of width {self.width}")
        self._expect_queries_divide(ranks)
        if units % ranks == 0:
            return pieces([features], ranks), False
        if units < self.query and ranks % units == 0:
            return shared(units, self.width, ranks), True
        raise ConfigError(f"{self.name}: {units} key-value heads and {ranks} ranks: one must divide by the other, for a rank's query heads "
                          f"to share its key-value heads; choose tensor = {_choices(self.query, units)}")

    def fused(self, features: int, key_values: int | None, ranks: int) -> Spans:
        """The same for queries, keys and values in one matrix: each rank gets its heads of all three.

        key_values: how many key-value heads; None: as many as query heads
        """
        self._expect_queries_divide(ranks)
        each = key_values or self.query
        if (self.query + 2 * each) * self.width != features:
            raise ConfigError(f"{self.name}: {features} fused features are not {self.query} query heads and twice {each} key-value heads "
                              f"of width {self.width}")
        if each % ranks:
            raise ConfigError(f"{self.name}: {each} key-value heads, fused with the queries, do not divide by {ranks} ranks; "
                              f"choose tensor = {_choices(self.query, each, repeats=False)}, or layers that are not fused")
        return pieces([self.query * self.width, each * self.width, each * self.width], ranks)

    def _expect_queries_divide(self, ranks: int) -> None:
        if self.query % ranks:
            raise ConfigError(f"{self.name}: {self.query} query heads do not divide by {ranks} ranks, and a head is never cut; "
                              f"choose tensor = {_choices(self.query, self.query)}")


def _choices(query: int, key_values: int, *, repeats: bool = True) -> str:
    fitting = [p for p in range(1, query + 1) if query % p == 0 and (key_values % p == 0 or (repeats and p % key_values == 0))]
    return ", ".join(map(str, fitting[:-1])) + (" or " if fitting[1:] else "") + str(fitting[-1])


def heads_of(module: nn.Module, name: str, features: Iterable[int]) -> Heads | None:
    """The heads of `module`, if it is attention. features: of its column-cut layers, before the cut; the most are the queries'."""
    most = max(features)
    for attribute in WIDTHS:
        if _count(module, attribute):
            return Heads(getattr(module, attribute), most // getattr(module, attribute), name)
    for attribute in QUERIES:
        count = _count(module, attribute)
        if count and most % count == 0:
            return Heads(most // count, count, name)
    return None


def fused_heads_of(module: nn.Module, name: str, features: int) -> tuple[Heads, int | None]:
    """The heads of a module whose queries, keys and values are one matrix of `features`, and how many key-value heads.

    raises: ConfigError when the module does not say
    """
    width = next((count for attribute in WIDTHS if (count := _count(module, attribute))), None)
    query, key_values = _anywhere(module, QUERIES), _anywhere(module, KEY_VALUES)
    if width is None and query:
        width = features // (query + 2 * (key_values or query))
    if not width:
        raise ConfigError(f"{name} does not say how wide its heads are; give it head_dim, or num_heads")
    if not query:
        query = features // width - 2 * key_values if key_values else features // width // 3
    return Heads(width, query, name), key_values


def tell_local_counts(module: nn.Module, local: Sequence[int], width: int) -> None:
    """Once cut, an attention module that keeps counts of its own must keep those of this rank.

    local: heads of this rank: of queries, then of keys and values
    """
    query, key_values = max(local), min(local)
    values = [(QUERIES, query), (KEY_VALUES, key_values), (FEATURES, query * width), (("num_key_value_groups",), query // key_values)]
    for names, value in values:
        for attribute in names:
            if _count(module, attribute):
                setattr(module, attribute, value)


def _anywhere(module: nn.Module, names: Iterable[str]) -> int | None:
    config: Any = getattr(module, "config", None)
    return next((count for owner in (module, config) for name in names if (count := _count(owner, name))), None)


def _count(owner: object, attribute: str) -> int:
    value = getattr(owner, attribute, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def cut_evenly(length: int, ranks: int, what: str, *, parts: int = 1) -> Spans:
    """Spans of `parts` fused matrices of equal size.

    raises: ConfigError that says what does not divide
    """
    if length % parts:
        raise ConfigError(f"{what}: {length} features are not {parts} fused matrices of equal size")
    try:
        return pieces([length // parts] * parts, ranks)
    except ShapeMismatch as error:
        raise ConfigError(f"{what}: {length // parts} features do not divide by {ranks} ranks") from error
