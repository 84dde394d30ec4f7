"""Attention heads over ranks: where queries, keys and values may be cut, and which counts their module must update.

A head is never cut: the ranks must divide the query heads. With grouped queries there are fewer KV heads. The ranks divide these too, or
several ranks share each: then neighbours, whose query heads read the same KV head, all hold it, and each has one term of its gradient
(`grad_partial`). Fused with the queries or not, only that head is shared.

A module keeps its number of heads in an attribute, which has many names in the field. A module that seems to be attention and has none of
them is refused: otherwise a head might be cut in half without an error.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.layout import Span
from rankloom.base.names import full_name
from rankloom.parallel.tensor.holding import Spans, cut_each, cut_shared

# The field's names for the width of a head, the number of query heads, and that of KV heads.
WIDTHS = ("head_dim", "head_width", "head_size", "attention_head_size", "d_head", "dim_head", "dim_per_head", "d_k")
QUERIES = ("num_heads", "num_attention_heads", "num_q_heads", "num_query_heads", "n_head", "n_heads", "n_q_heads", "n_local_heads",
           "nhead", "nheads", "heads")
KEY_VALUES = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads", "n_local_kv_heads", "kv_heads")
FEATURES = ("split_size", "all_head_size")   # of all query heads together
QUERIES_OF_A_KEY = ("num_key_value_groups", "n_rep")
SHORT_QUERIES, SHORT_WIDTHS = ("nh", "n_h", "h"), ("hd", "hs", "d_h", "dh")   # taken for heads only in attention
CONFIGS = ("config", "cfg", "args")
KEYS_OR_VALUES = re.compile(r"(w|to_?)?(k|v|kv|key|value|keys|values|key_value)(_proj|_projection|_lin|_linear|_layer)?")
# Column-cut layers of an MLP, which may stand beside queries, keys and values in one module.
OF_AN_MLP = re.compile(r"(up|gate|fc1|fc_in|c_fc|w1|w3|lin1|linear1|ff\d?|ffn\d?|mlp)(_\w+)?|"
                       r"fc|lin_in|linear_in|dense_in|dense_h_to_4h|intermediate|expand")   # not fc_q, which is of attention


class HeadCount(NamedTuple):
    """Of queries, keys or values: how many heads there are, and how wide they are. The larger count compares as the larger."""

    whole: int   # in all
    here: int    # on a rank
    width: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention module before the cut."""

    width: int
    query: int
    name: str      # of the module, for messages

    def spans(self, features: int, ranks: int) -> tuple[Spans, bool]:
        """How `features` of queries, keys or values are cut; and whether ranks share KV heads, so that gradients are partial.

        raises: ConfigError with the reason
        """
        units, rest = divmod(features, self.width)
        if rest:
            raise ConfigError(f"{self.name}: {features} features are no whole number of heads of width {self.width}")
        self._expect_queries_divide(ranks)
        if units % ranks == 0:
            return cut_each([features], ranks), False
        if units < self.query and ranks % units == 0:
            return cut_shared(units, self.width, ranks), True
        raise ConfigError(f"{self.name}: {units} key-value heads and {ranks} ranks: one must divide by the other, for a rank's query heads "
                          f"to share its key-value heads; choose tensor = {_choices(self.query, units)}")

    def fused(self, features: int, key_values: int | None, ranks: int) -> tuple[Spans, bool]:
        """How a layer of queries, keys and values end to end is cut: each rank gets its heads of all three. See `spans`

        key_values: how many key-value heads; None: as many as query heads
        """
        self._expect_queries_divide(ranks)
        each = key_values or self.query
        if (self.query + 2 * each) * self.width != features:
            raise ConfigError(f"{self.name}: {features} fused features are not {self.query} query heads and twice {each} key-value heads "
                              f"of width {self.width}")
        queries, _ = self.spans(self.query * self.width, ranks)
        keys, is_partial = self.spans(each * self.width, ranks)
        starts = (0, self.query * self.width, (self.query + each) * self.width)   # of queries, keys and values in the layer

        def shifted(spans: tuple[Span, ...], by: int) -> Span:
            (own,) = spans
            return Span(own.start + by, own.stop + by)

        return tuple(tuple(map(shifted, matrices, starts)) for matrices in zip(queries, keys, keys)), is_partial

    def _expect_queries_divide(self, ranks: int) -> None:
        if self.query % ranks:
            raise ConfigError(f"{self.name}: {self.query} query heads do not divide by {ranks} ranks, and a head is never cut; "
                              f"choose tensor = {_choices(self.query, self.query)}")


def _choices(query: int, key_values: int) -> str:
    fitting = [p for p in range(1, query + 1) if query % p == 0 and (key_values % p == 0 or p % key_values == 0)]
    return ", ".join(map(str, fitting[:-1])) + (" or " if fitting[1:] else "") + str(fitting[-1])


def heads_of(module: nn.Module, name: str, layer: int, features: Sequence[int], behind: Collection[int]) -> Heads | None:
    """The heads in one layer of `module`, if that is attention: from its width of a head if it has one, else from its number of heads.

    layer:    the features of the layer, before the cut
    features: of all column-cut layers of the module; the largest are the queries
    behind:   what its row-cut layers take
    raises:   ConfigError where it seems to be attention, but has neither
    """
    _expect_no_whole_latents(module, name)
    name, most = name or "the model", max(features)
    seems_attention = len(features) > 2 or len(set(features)) > 1   # a gated MLP has two such layers, equally wide
    if width := _first_number(module, WIDTHS):
        # GPT-NeoX lays query, key and value of each head side by side, Qwen3-Next query and gate: all are cut as one head
        queries = width * _configured(module, QUERIES)
        in_a_row, gated = len(features) == 1 and most == 3 * queries, most == 2 * queries and queries in behind
        widest = width * (3 if in_a_row else 2 if gated else 1)
        return Heads(widest if layer == most else width, most // widest, name)
    for attribute in (*QUERIES, *(SHORT_QUERIES if seems_attention else ())):
        count = _number_at(module, attribute)
        if count and most % count == 0:
            return Heads(most // count, count, name)
    if not seems_attention:
        return None
    if width := _first_number(module, SHORT_WIDTHS):
        return Heads(width, most // width, name)
    if hints := _hints(module, features):
        raise ConfigError(f"{name} has {len(features)} column-cut layers of {', '.join(map(str, features))} features and seems to be "
                          f"attention, but only {hints[0]} could say how many heads that are; give the module itself num_heads, "
                          "or head_dim if it reads the number off its input")
    return None


def _expect_no_whole_latents(module: nn.Module, name: str) -> None:
    """In a plan that does not know them: every rank would have one term of the gradient of the features that go past the heads' layers."""
    if latents := next((child for child, _ in module.named_children() if child.startswith("kv_a_proj")), None):
        raise ConfigError(f"{full_name(name, latents)} makes a key that heads of all ranks read, beside the latents of keys and values, "
                          "so each rank would have one term of its gradient: say mla_kv_a_proj for it")


def heads_behind_latents(module: nn.Module, name: str, features: int) -> Heads:
    """The heads of one layer of multi-head latent attention: queries, and keys and values side by side, have widths of their own.

    raises: ConfigError when the module does not say how many they are
    """
    name, count = name or "the model", _configured(module, QUERIES)
    if not count:
        raise ConfigError(f"{name} does not say how many heads it has; give it num_heads")
    if features % count:
        raise ConfigError(f"{name}: {features} features are not equally many for each of {count} heads")
    return Heads(features // count, count, name)


def rotated_features_of(module: nn.Module, layer: str, features: int) -> int:
    """How many of the `features` of the layer before the latents are its rotated key; 0 if it makes none. raises: ConfigError"""
    owners = (module, getattr(module, "config", None))
    rotated = next((value for owner in owners if isinstance(value := getattr(owner, "qk_rope_head_dim", None), int)), None)
    if rotated is None or not 0 <= rotated < features:
        raise ConfigError(f"{layer}: mla_kv_a_proj wants to know how many of its {features} features, the last ones, are the rotated key; "
                          f"the module around it says qk_rope_head_dim={rotated}")
    return rotated


def has_width(module: nn.Module) -> bool:
    """Whether an attribute of the module says how wide a head is."""
    return _first_number(module, WIDTHS) > 0


def of_an_mlp(name: str) -> bool:
    """Whether a layer of this name belongs to an MLP, whatever stands beside it."""
    return bool(OF_AN_MLP.fullmatch(name.rpartition(".")[2].lower()))


def _hints(module: nn.Module, features: Sequence[int]) -> list[str]:
    """Attributes that may be the number or width of heads under unknown names, and counts in a config, which other modules read too."""
    places = re.compile("idx|index|len|max|window")
    own = [name for name, value in vars(module).items() if _number_at(module, name) and not places.search(name)
           and 1 < value < max(features) and not any(each % value for each in features)]
    shared = [f"{place}.{name}" for place in CONFIGS for name in (*QUERIES, *SHORT_QUERIES)
              if _number_at(getattr(module, place, None), name)]
    return own + shared


def fused_heads_of(module: nn.Module, name: str, features: int) -> tuple[Heads, int | None]:
    """The heads of a module whose queries, keys and values are one layer of `features`; and its number of KV heads, if it has one.

    raises: ConfigError when the module does not say how wide a head is
    """
    name = name or "the model"
    width, query, key_values = _first_number(module, WIDTHS), _configured(module, QUERIES), _configured(module, KEY_VALUES)
    if not width and query:
        width = features // (query + 2 * (key_values or query))
    if not width:
        raise ConfigError(f"{name} does not say how wide its heads are; give it head_dim, or num_heads")
    if not query:
        query = features // width - 2 * key_values if key_values else features // width // 3
    return Heads(width, query, name), key_values or None


def tell_local_counts(module: nn.Module, name: str, counts: Sequence[HeadCount]) -> None:
    """After the cut, set the counts of heads of an attention module, `name`, to those of this rank. counts: of queries, keys and values

    raises: ConfigError where keys or values are still whole
    """
    query, key_values = max(counts), min(counts)
    if query.here < query.whole:
        _expect_no_whole_keys(module, name)
    values = [(QUERIES, query.here), (KEY_VALUES, key_values.here), (FEATURES, query.here * query.width),
              (QUERIES_OF_A_KEY, query.here // key_values.here)]
    known = {name: value for names, value in values for name in names}
    here = {count.whole: count.here for count in (key_values, query)}
    for name in list(vars(module)):
        count = _number_at(module, name)
        counts_heads = re.search(r"head|^n?_?(h|kv)$", name) and not re.search(r"dim|size|width|^d_|_d$", name)
        if count and name in known:
            setattr(module, name, known[name])
        elif counts_heads and count in here:   # an unknown name
            setattr(module, name, here[count])


def _expect_no_whole_keys(module: nn.Module, name: str) -> None:
    """Every rank would use them for its own queries, and have one term of their gradient and of that of their input."""
    for child, layer in module.named_children():
        if isinstance(layer, nn.Linear) and KEYS_OR_VALUES.fullmatch(child.lower()):
            raise ConfigError(f"{full_name(name, child)} stays whole beside queries that are cut, so each rank would have one term of its "
                              "gradient: say colwise for it too. Of fewer key-value heads than ranks, neighbours hold the same ones")


def _configured(module: nn.Module, names: Sequence[str]) -> int:
    """The first of `names` that is a number, in the module or its config; 0 if there is none."""
    return _first_number(module, names) or _first_number(getattr(module, "config", None), names)


def _first_number(owner: object, names: Sequence[str]) -> int:
    return next((count for name in names if (count := _number_at(owner, name))), 0)


def _number_at(owner: object, attribute: str) -> int:
    value = getattr(owner, attribute, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
