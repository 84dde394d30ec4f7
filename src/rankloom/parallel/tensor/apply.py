"""`rl.tensor_parallel` cuts a plain model over the ranks of a group, by a plan of name patterns. Each rank then computes its part.

    rl.tensor_parallel(model, {"layers.*.attention.query": "colwise", ..., "layers.*.attention.output": "rowwise"}, group)

Communication plan: column-cut layers read whole activations, row-cut ones end in a partial sum: one all-reduce forward and one backward
for each half block (attention, MLP). With "sequence_parallel" norms, activations between half blocks are cut by tokens: reduce-scatter
and all-gather replace each all-reduce. The loss is the same on every rank, and every rank starts its backward from it. All ranks of the
group must see the same batch.

Read base/layout.py for layouts, styles.py for the words of a plan, layers.py and vocabulary.py for the layers, holding.py for parameters
and gradients.
"""

import re
from collections.abc import Collection, Mapping
from functools import partial
from types import NoneType

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, ModelMismatch, did_you_mean
from rankloom.base.expect import expect_type, is_whole_number
from rankloom.base.names import is_inside
from rankloom.parallel.axes import note_axis
from rankloom.parallel.replicas.equal_start import make_replicas_equal
from rankloom.parallel.replicas.guards import guard_part
from rankloom.parallel.replicas.refused import expect_model_and_group
from rankloom.parallel.sections.wrapping import repeated_blocks
from rankloom.parallel.tensor.cut_region import watch_dropout
from rankloom.parallel.tensor.cutting import Cutting, Site
from rankloom.parallel.tensor.debug import watch
from rankloom.parallel.tensor.holding import Holding, held_parameters, sum_partial_gradients
from rankloom.parallel.tensor.same_function import keep_whole, look_before_first_call
from rankloom.parallel.tensor.styles import COLUMNS, OWNERS, ROWS, STYLES, is_transposed, out_features
from rankloom.world.group import Group

_GPT2 = {
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.attn.c_attn": "packed_qkv_colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "colwise_rep",
}
_SUCH_AS = 'give a plan, such as {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}'
_PLAN = "name patterns and their words, as a dict, or None for the model's own tp_plan"
PLANS = {"GPT2LMHeadModel": _GPT2}   # for models without a plan of their own


def tensor_parallel(model: nn.Module, plan: Mapping[str, str] | None, group: Group, *, overlap: int = 1,
                    finish_gradients: bool = True) -> nn.Module:
    """Cut `model`, in place, over the ranks of `group`; returns it. Begin with the whole model on every rank.

    plan:   pattern of module names (`*` is one part of a name) -> a word of styles.py; None: the model's own `tp_plan`, without the
            patterns that match nothing: such a plan is for a family of models
    overlap: in how many pieces a row-cut product is computed, each sent while the next is multiplied. With more than one, weight gradients
            are also computed while the input gradient is summed. 1: the plain path. The same bytes, in more messages
    finish_gradients: after `backward()` every gradient is this rank's part of the plain model's. False leaves those that
            `holdings(model)` calls partial to one `sum_partial_gradients` a step: fewer messages
    sent:   the model once, from rank 0, as `data_parallel`; a model on the meta device is only cut (load_full_state_dict)
    raises: ConfigError, on all ranks, for an empty plan, a pattern that matches nothing, an unknown word, heads or features that do not
            divide, or a parameter that is cut and tied to a module without a word; ModelMismatch when models or plans differ between ranks

    Dropout of whole activations must draw the same on all ranks. `rl.prepare` sees to it; in a loop of your own, seed them alike.
    """
    expect_model_and_group(model, group)
    expect_type("plan", plan, (Mapping, NoneType), _PLAN)
    expect_overlap("overlap", overlap)
    expect_type("finish_gradients", finish_gradients, bool, "True or False")
    plan = _plan_of(model) if plan is None else dict(plan)
    _expect_same_plan(plan, group)
    if not plan and group.size > 1:
        raise ConfigError(f"{group.where('tensor_parallel')}: the plan is empty, so each of the {group.size} ranks would hold and compute "
                          f"the whole {type(model).__name__}; {_SUCH_AS}, or None for the model's own tp_plan")
    words = _with_tied(model, _words(model, plan))
    if not any(param.is_meta for param in model.parameters()):
        make_replicas_equal(model, group)
    outputs = [(name, module) for name, module in model.named_modules(remove_duplicate=False)
               if words.get(name) in COLUMNS and is_transposed(module) is not None]
    cutting = Cutting(model, group, words, {name: out_features(module) for name, module in outputs}, pieces=overlap)
    _expect_entry(cutting)
    _expect_gathered_logits(cutting)
    whole = keep_whole(model, words) if group.size > 1 else {}
    _cut_modules(cutting)
    cutting.expect_ties()
    cutting.tell_attention()
    note_axis(model, "tensor", group)
    heads = {name: queries.here for name, (queries, *_) in cutting.heads.items()}
    watch_dropout(model, _modules_with(COLUMNS, model, words), _modules_with(ROWS, model, words), heads, group)
    look_before_first_call(model, whole, group, cutting.stream)
    if group.size > 1:
        watch_parameters = partial(_watch_parameters, group=group, finish=finish_gradients)
        watch_parameters(model)
        model.register_forward_pre_hook(watch_parameters)   # some may be thawed since, or new: `to_empty` and copies lose marks and hooks
    if group.debug and group.size > 1:
        watch(model, group)
    return model


def _modules_with(kinds: Collection[str], model: nn.Module, words: Mapping[str, str]) -> list[str]:
    """Names of the modules with a word of these kinds: a plan names parameters, too."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [name for name, word in words.items() if word in kinds and name in modules]


def expect_overlap(name: str, pieces: int) -> None:
    """Check in how many pieces a product is to be computed. name: of the option. raises: ConfigError"""
    if not is_whole_number(pieces, 1):
        raise ConfigError(f"{name}={pieces!r}, expected a whole number of pieces, 1 or more")


def expect_plan(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Check a plan where one rank holds the whole, so nothing is cut. raises: ConfigError as `tensor_parallel`"""
    expect_type("tensor_plan", plan, Mapping, _PLAN)
    _words(model, plan)


def _plan_of(model: nn.Module) -> dict[str, str]:
    plan = getattr(model, "tp_plan", None) or PLANS.get(type(model).__name__)
    if not plan:
        raise ConfigError(f"{type(model).__name__} has no tp_plan of its own; {_SUCH_AS}")
    used = {pattern: word for pattern, word in plan.items() if _found(model, pattern, plan)}   # the plan is for a family of models
    return used or dict(plan)


def _expect_same_plan(plan: dict[str, str], group: Group) -> None:
    for pattern in plan:
        expect_type("a pattern of the plan", pattern, str, "a text such as 'layers.*.mlp.up'")
    if group.size > 1 and any(theirs != plan for theirs in group.all_gather_object(plan, label="tensor-parallel plan")):
        raise ModelMismatch(f"{group.where('tensor_parallel')}: the plans of the ranks differ; give all of them the same")


def _words(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Module name -> word, for all modules that the plan names, and for the parameters that it names, of modules such as moe_tp_experts.

    raises: ConfigError for patterns that match nothing, unknown words, or two words for one module
    """
    words: dict[str, str] = {}
    plan = _with_whole_names(model, plan)
    for pattern, word in plan.items():
        if word not in STYLES:
            raise ConfigError(f"plan: {pattern!r} is to be {word!r}, which is no style. {did_you_mean(str(word), STYLES)}")
        found = _found(model, pattern, plan)
        if not found:
            raise ConfigError(_no_match(model, pattern))
        for name in found:
            if words.setdefault(name, word) != word:
                raise ConfigError(f"plan: {name} is to be both {words[name]!r} and {word!r}; let one pattern match it")
    return words


def _with_whole_names(model: nn.Module, plan: Mapping[str, str]) -> Mapping[str, str]:
    """The plan with names as they are in `model`. Those of `transformers` (`config.base_model_tp_plan`) are names inside its base model."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not isinstance(getattr(model, prefix, None), nn.Module):
        return plan
    with_prefix = {f"{prefix}.{pattern}": word for pattern, word in plan.items()}

    def name_here(pattern: str) -> str:
        whole = f"{prefix}.{pattern}"
        return whole if not _found(model, pattern, plan) and _found(model, whole, with_prefix) else pattern

    return {name_here(pattern): word for pattern, word in plan.items()}


def _found(model: nn.Module, pattern: str, plan: Mapping[str, str]) -> list[str]:
    """The names of the modules that a pattern matches, and of parameters of such as experts."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    return [name for name in names if _matches(pattern, name)] + [
        name for name, _ in model.named_parameters() if _matches(pattern, name) and _is_of_an_owner(name, plan)]


def _matches(pattern: str, name: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name))


def _is_of_an_owner(parameter: str, plan: Mapping[str, str]) -> bool:
    owner = parameter.rpartition(".")[0]
    return any(word in OWNERS and _matches(pattern, owner) for pattern, word in plan.items())


def _no_match(model: nn.Module, pattern: str) -> str:
    kind, names = type(model).__name__, [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameter = next((name for name, _ in model.named_parameters() if _matches(pattern, name)), None)
    if parameter:
        return (f"plan: {pattern!r} is a parameter of {kind}; a plan names modules, here {pattern.rpartition('.')[0]!r}, and only of those "
                f"that are {' or '.join(OWNERS)} their parameters too")
    if not names:
        return f"plan: {kind} has no modules inside that a plan could name; put it into one, such as nn.Sequential(layer)"
    starred = {re.sub(r"(?:^|(?<=\.))\d+(?=\.|$)", "*", name) for name in names}
    hint = did_you_mean(pattern, names if starred == {"*"} else starred)
    return f"plan: pattern {pattern!r} matches no module of {kind}. {hint}"


def _with_tied(model: nn.Module, words: dict[str, str]) -> dict[str, str]:
    """The plan, with a word for every other layer that is tied to a matrix which the plan cuts over the vocabulary."""
    by_vocabulary = ("embedding_rowwise", "colwise_rep", "colwise_gather_output")
    cut = {id(getattr(model.get_submodule(name), "weight", name)) for name, word in words.items() if word in by_vocabulary}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in words or id(getattr(module, "weight", None)) not in cut:
            continue
        words = words | {name: "embedding_rowwise" if isinstance(module, nn.Embedding) else "colwise_rep"}
    return words


def _expect_entry(cutting: Cutting) -> None:
    words = set(cutting.words.values())
    if not cutting.sequence or "sequence_split" in words:
        return
    if "embedding_rowwise" not in words:
        raise ConfigError("plan: norms are sequence_parallel, but nothing cuts the stream by tokens before them; make the embedding "
                          "embedding_rowwise, or the first block sequence_split")
    blocks = list(repeated_blocks(cutting.model))
    for name, module in cutting.model.named_modules():
        if isinstance(module, nn.Embedding) and name not in cutting.words and not any(is_inside(name, block) for block in blocks):
            raise ConfigError(f"plan: the embedding cuts the stream by tokens, and {name} may be one of positions: each rank would look up "
                              "its own tokens, counted from 0. Cut behind both: say sequence_split for the first block; the embedding may "
                              f"stay embedding_rowwise. If {name} is not of positions, say replicated_with_grad_allreduce")


def _expect_gathered_logits(cutting: Cutting) -> None:
    """Raise ConfigError for a layer that makes a logit of each token and leaves them cut, where no row-cut layer beside it reads them."""
    vocabularies = {module.num_embeddings for module in cutting.model.modules() if isinstance(module, nn.Embedding)}
    blocks = list(repeated_blocks(cutting.model))
    for name, features in cutting.features.items():
        beside = cutting.words_in(name.rpartition(".")[0]).values()
        if features in vocabularies and not set(beside) & set(ROWS) and not any(is_inside(name, block) for block in blocks):
            raise ConfigError(f"plan: {name} is {cutting.words[name]}, so each rank would have the logits of its own part of {features} "
                              "tokens, and look for targets there; say colwise_rep, which gathers them")


def _cut_modules(cutting: Cutting) -> None:
    """Cut each module that the plan names, once, though the model may have it under several names."""
    model, words = cutting.model, cutting.words
    parameters, cut = dict(model.named_parameters()), dict[nn.Module, str]()
    names = [name for name in words if name not in parameters]
    for name in sorted(names, key=lambda name: words[name] not in COLUMNS):   # first those that find out the heads
        before = cut.get(model.get_submodule(name))
        if before is None:
            STYLES[words[name]](Site(cutting, name))
            cut[model.get_submodule(name)] = words[name]
        elif before != words[name]:
            raise ConfigError(f"plan: {name} is to be {words[name]!r}, and the same module under another name {before!r}")


@torch.compiler.disable
def _watch_parameters(model: nn.Module, _args: object = (), *, group: Group, finish: bool) -> None:
    """Let optimizers know which parameters are parts. finish: sum partial gradients in backward"""
    for name, param, held in held_parameters(model):
        if held.dim is not None:
            guard_part(param, name)
        if finish and held.grad_partial and param.requires_grad and not _is_summed(param):
            param.register_hook(partial(_summed, held=held, group=group))


def _is_summed(param: nn.Parameter) -> bool:
    return any(isinstance(hook, partial) and hook.func is _summed for hook in (param._backward_hooks or {}).values())


def _summed(gradient: Tensor, *, held: Holding, group: Group) -> Tensor:
    total = gradient.clone()
    sum_partial_gradients([("", total)], {"": held}, group)
    return total
