"""The words of a plan: what each does to the module it names. They are those of Hugging Face's `tp_plan`, and some of our own.

    colwise                         cut by output features; attention heads stay whole
    colwise_rep, colwise_gather_output    cut by output features, and the output gathered (a vocabulary is padded if needed)
    rowwise                         cut by input features, for a cut input; its output is all-reduced, or reduce-scattered by tokens
    rowwise_rep, rowwise_split_input      the same, for an input that is whole
    packed_colwise, packed_rowwise  gate and up (two matrices of equal size) fused in one
    packed_qkv_colwise              all queries, then all keys, then all values fused in one (our own). Where query, key and value of each
                                    head lie side by side (GPT-NeoX), say colwise, and give the module head_dim alone
    embedding_rowwise               cut over the vocabulary, padded if needed
    embedding_colwise               cut by features, and the output gathered
    mla_kv_a_proj                   whole, as what it makes: latents of keys and values (the layer behind them is colwise), then the rotated
                                    key that all heads read, whose gradient backward sums (DeepSeek-V2)
    vocabulary_output               logits, or the loss without gathering them               (our own; models/gpt.py)
    moe_tp_experts, all_reduce      a module whose parameters [experts, out, in] the plan names too: colwise cuts the last dim but one,
                                    rowwise the last; its input is whole, its output all-reduced
    local_params                    a module with parameters for each head or feature (attention sinks) that the plan names too: colwise
                                    cuts their first dim
    moe_identity_expert             inside such a module, returns what it gets: 1/p of it on each of p ranks, for the sum
    sequence_parallel               a norm of this rank's tokens; its output is gathered for the split layers after it
    sequence_parallel_rep           the same, before layers that are not split               (our own)
    sequence_dropout                dropout of a rank's tokens, with its part of one mask    (our own)
    sequence_split                  the input of this module is cut by tokens                (our own)
    replicated_with_grad_allreduce  whole, but its gradient is a partial sum
    replicate                       whole, like every module that no pattern names
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.layout import Layout
from rankloom.base.names import full_name
from rankloom.parallel.tensor.cutting import Site
from rankloom.parallel.tensor.debug import unwatched
from rankloom.parallel.tensor.heads import (
    HeadCount,
    Heads,
    fused_heads_of,
    has_width,
    heads_behind_latents,
    heads_of,
    of_an_mlp,
    rotated_features_of,
)
from rankloom.parallel.tensor.holding import Holding, Spans, cut_evenly, cut_padded, hold
from rankloom.parallel.tensor.layers import (
    ColumnLinear,
    RowLinear,
    TokenDropout,
    change_first_before,
    move_after,
    split_tokens_before,
    sum_over_experts,
)
from rankloom.parallel.tensor.moves import BY_TOKENS, BY_WIDTH, GRAD_PARTIAL, WHOLE, Entrance, redistribute
from rankloom.parallel.tensor.overlap import OverlappedColumnLinear, OverlappedRowLinear
from rankloom.parallel.tensor.tags import Ends, declare
from rankloom.parallel.tensor.vocabulary import VocabularyOutput, VocabularyShard, look_up_own_rows


def is_transposed(module: nn.Module) -> bool | None:
    """Whether a linear layer keeps its weight as [in, out] (GPT-2's Conv1D) and not [out, in]; None when it is no linear layer."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return False
    return True if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def out_features(layer: Any) -> int:
    """The number of output features of a linear layer."""
    return layer.weight.shape[1 if is_transposed(layer) else 0]   # type: ignore[no-any-return]


def _linear(site: Site) -> tuple[Any, bool]:
    """The linear layer here, and whether it `is_transposed`. raises: ConfigError for another module"""
    transposed = is_transposed(site.module)
    if transposed is None:
        raise ConfigError(f"{site.name}: {site.cutting.words[site.name]} is for nn.Linear and Conv1D, but this is a "
                          f"{type(site.module).__name__}")
    return site.module, transposed


def _length(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans[0])


def _cut_outputs(site: Site, length: int, spans: Spans, *, is_partial: bool = False, gathers: int = 0) -> None:
    """Put this rank's output features of a linear layer in its place. length: of a rank's part; gathers: see `ColumnLinear`"""
    (layer, transposed), cutting = _linear(site), site.cutting
    held = {"weight": Holding(tuple(layer.weight.shape), length, 1 if transposed else 0, spans, is_partial)}
    if layer.bias is not None:
        held["bias"] = Holding(tuple(layer.bias.shape), length, 0, spans, is_partial)
    kind = OverlappedColumnLinear if cutting.pieces > 1 else ColumnLinear
    parts, enter = site.parts(held), cutting.entrance(site.parent)
    ends = Ends(WHOLE if enter else GRAD_PARTIAL, WHOLE if gathers else BY_WIDTH, width=parts[0].shape[0 if transposed else 1])
    site.replace(kind(*parts, site.group, enter, transposed=transposed, gathers=gathers, label=site.name), held, ends)


def column(site: Site, *, gathers: bool = False) -> None:
    """colwise, and colwise_rep when it `gathers`."""
    (layer, _), cutting, ranks = _linear(site), site.cutting, site.group.size
    features, is_partial = out_features(layer), False
    if gathers:
        length, spans = cut_padded(features, ranks)
    else:
        siblings = {name: n for name, n in cutting.features.items() if name.rpartition(".")[0] == site.parent}
        if heads := _heads_of(site, features, siblings):
            _expect_unfused(site, features, len(siblings))
            spans, is_partial = heads.spans(features, ranks)
            cutting.heads.setdefault(site.parent, []).append(
                HeadCount(features // heads.width, _length(spans) // heads.width, heads.width))
        else:
            _expect_one_matrix(site, features, len(siblings))
            spans = cut_evenly(features, ranks, site.name)
        length = _length(spans)
    _cut_outputs(site, length, spans, is_partial=is_partial, gathers=features if gathers else 0)


def _heads_of(site: Site, features: int, siblings: dict[str, int]) -> Heads | None:
    """The heads that the features of a column-cut layer are of. siblings: the features of all such layers of its module"""
    module, words = site.cutting.model.get_submodule(site.parent), site.cutting.words_in(site.parent).values()
    attention = [n for name, n in siblings.items() if not of_an_mlp(name)]
    is_fused = "packed_qkv_colwise" in words   # then other layers are no queries, keys or values
    if is_fused or (of_an_mlp(site.name) and (attention or _has_whole_layers(site))):
        return None
    if "mla_kv_a_proj" in words:
        return heads_behind_latents(module, site.parent, features)
    return heads_of(module, site.parent, features, attention or [*siblings.values()], _row_cut_beside(site).values())


def _has_whole_layers(site: Site) -> bool:
    """Whether the module around this layer has linear layers that the plan leaves whole: its attention, perhaps."""
    children = site.cutting.model.get_submodule(site.parent).named_children()
    return any(is_transposed(child) is not None and full_name(site.parent, name) not in site.cutting.words for name, child in children)


def _expect_one_matrix(site: Site, features: int, siblings: int) -> None:
    """Raise ConfigError for gate and up fused in one matrix: then the row-cut layer after it takes half its features."""
    if name := _takes_a_part(site, features, 2, siblings):
        raise ConfigError(f"{site.name} has {features} output features, and {name} takes {features // 2}: cut as one matrix, two fused "
                          "ones (gate and up) would be cut across each other; say packed_colwise")


def _expect_unfused(site: Site, features: int, siblings: int) -> None:
    """Raise ConfigError for queries, keys and values that seem to be fused end to end, where no width of a head says that they are not."""
    name = _takes_a_part(site, features, 3, siblings)
    if name and not has_width(site.cutting.model.get_submodule(site.parent)):
        raise ConfigError(f"{site.name} has {features} output features, and {name} takes {features // 3}: queries, keys and values, fused "
                          "end to end, would be cut across each other; say packed_qkv_colwise. If those of each head lie side by side, "
                          "give the module around them a head_dim")


def _takes_a_part(site: Site, features: int, parts: int, siblings: int) -> str | None:
    """The row-cut layer behind this one, if this is the only column-cut one before it, and `parts` times as wide."""
    behind = _row_cut_beside(site) if siblings == 1 else {}
    return next((name for name, taken in behind.items() if features == parts * taken), None)


def _row_cut_beside(site: Site) -> dict[str, int]:
    """The row-cut layers of its module, and how many features each takes before the cut."""
    beside = [(full_name(site.parent, name), child) for name, child in site.cutting.model.get_submodule(site.parent).named_children()]
    return {name: _in_features(child) for name, child in beside if site.cutting.words.get(name) == "rowwise"}


def _in_features(module: Any) -> int:
    transposed = is_transposed(module)
    return 0 if transposed is None else module.weight.shape[0 if transposed else 1]   # type: ignore[no-any-return]


def packed_column(site: Site, *, qkv: bool) -> None:
    """packed_colwise, and packed_qkv_colwise."""
    (layer, _), cutting, ranks = _linear(site), site.cutting, site.group.size
    features = out_features(layer)
    if qkv:
        heads, key_values = fused_heads_of(cutting.model.get_submodule(site.parent), site.parent, features)
        spans, is_partial = heads.fused(features, key_values, ranks)
        cutting.heads[site.parent] = [HeadCount(count, max(count // ranks, 1), heads.width)
                                      for count in (heads.query, key_values or heads.query)]
    else:
        spans, is_partial = cut_evenly(features, ranks, site.name, parts=2), False
    _cut_outputs(site, _length(spans), spans, is_partial=is_partial)


def row(site: Site, *, slices: bool = False, parts: int = 1) -> None:
    """rowwise, rowwise_rep when it `slices` its input, packed_rowwise when that is `parts` matrices."""
    (layer, transposed), cutting = _linear(site), site.cutting
    shape, dim = tuple(layer.weight.shape), 0 if transposed else 1
    spans = cut_evenly(shape[dim], site.group.size, site.name, parts=parts)
    held = {"weight": Holding(shape, _length(spans), dim, spans)}
    if layer.bias is not None:
        held["bias"] = Holding(tuple(layer.bias.shape), grad_partial=cutting.sequence)
    kind = partial(OverlappedRowLinear, pieces=cutting.pieces) if cutting.pieces > 1 else RowLinear
    width = shape[dim] if slices else held["weight"].length
    site.replace(kind(*site.parts(held), site.group, cutting.stream, transposed=transposed, slices=slices, label=site.name), held,
                 Ends(WHOLE if slices else BY_WIDTH, cutting.stream, width=width))


def embedding(site: Site, *, by_rows: bool) -> None:
    """embedding_rowwise, or embedding_colwise. The module is kept, with a part of its weight."""
    source, group = site.module, site.group
    if not isinstance(source, nn.Embedding) or source.max_norm is not None or source.sparse or source.scale_grad_by_freq:
        raise ConfigError(f"{site.name} is a {type(source).__name__}; only an nn.Embedding can be cut, without max_norm, sparse "
                          "or scale_grad_by_freq")
    shape = tuple(source.weight.shape)
    if by_rows:
        length, spans = cut_padded(shape[0], group.size)
        holding = Holding(shape, length, 0, spans)
        shard, out = VocabularyShard.of(shape[0], group), WHOLE if "sequence_split" in site.cutting.words.values() else site.cutting.stream
        source.padding_idx = shard.local_index_of(source.padding_idx)
        look_up_own_rows(source, shard, group, out, site.name)
        declare(source, Ends(gives=out))
    else:
        spans = cut_evenly(shape[1], group.size, site.name)
        holding = Holding(shape, _length(spans), 1, spans)
        move_after(source, BY_WIDTH, WHOLE, group, site.name)   # sent: an all-gather of [..., W / p]
        declare(source, Ends(gives=WHOLE))
    hold(source, "weight", holding)
    source.weight = site.cutting.cut(source, "weight", holding)
    source.num_embeddings, source.embedding_dim = holding.local_shape


def vocabulary_output(site: Site) -> None:
    """vocabulary_output: a module without parameters, with a `vocab_size`, that turns hidden states into logits or a loss."""
    vocabulary = getattr(site.module, "vocab_size", None)
    if vocabulary is None or list(site.module.parameters()):
        raise ConfigError(f"{site.name}: vocabulary_output wants a module without parameters that knows its vocab_size, like the `output` "
                          "of rankloom's GPT; for an nn.Linear say colwise_rep")
    enter = None if site.cutting.sequence else Entrance(site.group, f"entrance of {site.name}")
    new = VocabularyOutput(VocabularyShard.of(vocabulary, site.group), site.group, enter, label=site.name)
    if enter:
        enter.ends_with(new)
    site.replace(new, {}, Ends(WHOLE if enter else GRAD_PARTIAL, WHOLE))


def experts(site: Site) -> None:
    """moe_tp_experts, all_reduce. The module is kept, with a part of each of its matrices."""
    module, group, label = site.module, site.group, site.name
    if site.cutting.sequence:
        raise ConfigError(f"{label}: {site.cutting.words[label]} wants whole tokens, but the norms of this plan are sequence_parallel")
    inner = set()
    for name, param in list(module.named_parameters(recurse=False)):
        word = site.cutting.words.get(f"{label}.{name}", "")
        if word not in MATRICES or param.dim() < 2:
            raise ConfigError(f"{label}: the plan cuts this module's experts, and says nothing of their {name} that could be done to it; "
                              f"expected one of {', '.join(MATRICES)}, for a matrix")
        dim, parts = MATRICES[word]
        inner.add(param.shape[dim] // parts)
        _cut_parameter(site, name, param.dim() + dim, parts)
    for name, value in list(vars(module).items()):   # its own copies of the width between its matrices
        if type(value) is int and value in inner and re.search("intermediate|expert_dim|ffn|inner", name):
            setattr(module, name, value // group.size)
    sum_over_experts(module, group, label)


def own_parameters(site: Site) -> None:
    """local_params. The module is kept, with a part of each of its own parameters that the plan names."""
    for name, param in list(site.module.named_parameters(recurse=False)):
        word = site.cutting.words.get(f"{site.name}.{name}")
        if word not in (None, "colwise") or (word and not param.dim()):
            raise ConfigError(f"{site.name}.{name}, of shape {tuple(param.shape)}, is to be {word!r}; of a module that is local_params "
                              "parameters may be colwise, which cuts their first dim")
        if word:
            _cut_parameter(site, name, 0)


def _cut_parameter(site: Site, name: str, dim: int, parts: int = 1) -> None:
    """Put this rank's part of a parameter of the module itself in its place."""
    module, param = site.module, site.module.get_parameter(name)
    spans = cut_evenly(param.shape[dim], site.group.size, f"{site.name}.{name}", parts=parts)
    holding = Holding(tuple(param.shape), _length(spans), dim, spans)
    setattr(module, name, site.cutting.cut(module, name, holding))
    hold(module, name, holding)


def latents(site: Site) -> None:
    """mla_kv_a_proj. The layers behind the latents sum the gradient of these where they enter; the rotated key goes past them.

    sent: backward, an all-reduce of the gradient of the rotated key
    """
    (module, _), group, label = _linear(site), site.group, site.name
    if site.cutting.sequence:
        raise ConfigError(f"{label}: mla_kv_a_proj wants whole tokens, but the norms of this plan are sequence_parallel")
    features = out_features(module)
    rotated = rotated_features_of(site.cutting.model.get_submodule(site.parent), label, features)

    @torch.compiler.disable
    def for_the_heads_of_all_ranks(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        with unwatched():   # no layout is that of both parts
            compressed, key = output.split([features - rotated, rotated], dim=-1)
            return torch.cat([compressed, redistribute(key, WHOLE, GRAD_PARTIAL, group, label=label)], dim=-1)

    if group.size > 1:
        module.register_forward_hook(for_the_heads_of_all_ranks)
    declare(module, Ends(WHOLE))


def identity_expert(site: Site) -> None:
    """moe_identity_expert."""
    ranks = site.group.size
    change_first_before(site.module, lambda x: x / ranks)


def partial_gradients(site: Site) -> None:
    """replicated_with_grad_allreduce: parameters are whole, gradients partial sums. Modules inside are alike, but those with a word."""
    for place, module in site.module.named_modules(prefix=site.name):
        for name, param in module.named_parameters(recurse=False) if place == site.name or place not in site.cutting.words else ():
            hold(module, name, Holding(tuple(param.shape), grad_partial=True))


def between_tokens(site: Site, *, out: Layout = GRAD_PARTIAL) -> None:
    """sequence_parallel, and sequence_parallel_rep: a norm that runs on this rank's tokens.

    out:  GRAD_PARTIAL before split layers, WHOLE before layers that all ranks compute alike
    sent: an all-gather of its output; backward, with GRAD_PARTIAL, a reduce-scatter of its gradient
    """
    partial_gradients(site)
    move_after(site.module, BY_TOKENS, out, site.group, f"tokens after {site.name}", unread=out is GRAD_PARTIAL)
    declare(site.module, Ends(BY_TOKENS, out))


def dropout(site: Site) -> None:
    """sequence_dropout."""
    if type(site.module) is not nn.Dropout:
        raise ConfigError(f"{site.name}: sequence_dropout wants an nn.Dropout, but this is a {type(site.module).__name__}")
    site.replace(TokenDropout(site.module.p, site.group), {}, Ends(BY_TOKENS, BY_TOKENS))


def from_here_by_tokens(site: Site) -> None:
    """sequence_split."""
    split_tokens_before(site.module, site.group, f"tokens before {site.name}")
    declare(site.module, Ends(WHOLE))


MATRICES = {"colwise": (-2, 1), "rowwise": (-1, 1), "packed_colwise": (-2, 2), "packed_rowwise": (-1, 2)}   # word -> dim, fused matrices
STYLES: dict[str, Callable[[Site], None]] = {
    "colwise": column,
    "colwise_rep": partial(column, gathers=True),
    "colwise_gather_output": partial(column, gathers=True),
    "rowwise": row,
    "rowwise_rep": partial(row, slices=True),
    "rowwise_split_input": partial(row, slices=True),
    "packed_colwise": partial(packed_column, qkv=False),
    "packed_qkv_colwise": partial(packed_column, qkv=True),
    "packed_rowwise": partial(row, parts=2),
    "embedding_rowwise": partial(embedding, by_rows=True),
    "embedding_colwise": partial(embedding, by_rows=False),
    "mla_kv_a_proj": latents,
    "vocabulary_output": vocabulary_output,
    "moe_tp_experts": experts,
    "all_reduce": experts,
    "local_params": own_parameters,
    "moe_identity_expert": identity_expert,
    "sequence_parallel": between_tokens,
    "sequence_parallel_rep": partial(between_tokens, out=WHOLE),
    "sequence_dropout": dropout,
    "sequence_split": from_here_by_tokens,
    "replicated_with_grad_allreduce": partial_gradients,
    "replicate": lambda site: None,
}
OWNERS = ("moe_tp_experts", "all_reduce", "local_params")   # of modules whose own parameters a plan names, too
COLUMNS = ("colwise", "packed_colwise", "packed_qkv_colwise")
ROWS = ("rowwise", "packed_rowwise")   # those whose input is cut
