"""Which options of training exclude each other, for `rl.prepare` and for config files: nothing is accepted and then ignored. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rankloom.base.compression import BACKEND, EXACT, why_not_for_slices
from rankloom.models.config import GPTConfig
from rankloom.train.blocks.budget import CHOICES, NONE


class Effect(NamedTuple):
    """The default of an option, and the stages at which another value has an effect."""

    default: Any
    stages: tuple[int, ...]


HAS_EFFECT = {
    "all_reduce": Effect(BACKEND, (0,)),
    "compress": Effect(EXACT, (0, 1, 2, 3)),
    "compress_after": Effect(0, (0, 1, 2, 3)),
    "units": Effect("auto", (1, 2, 3)),
    "offload": Effect(False, (1, 2, 3)),
    "gradient_memory": Effect(0, (2, 3)),
    "reshard_after_forward": Effect(True, (3,)),
    "ahead": Effect(1, (3,)),
}
FLOAT8_GRAIN = 16   # GRAIN of base/float8.py, which needs torch
WITHOUT_PIPE = ("gradient_memory", "reshard_after_forward", "ahead")
NOT_DETERMINISTIC = {"all_reduce": "it adds in an order of its own", "compress": "what is lost depends on the number of ranks"}
NOT_ONE_GRAPH = ('with compile wants each block in one graph, and no graph contains what ranks along context, tensor or expert exchange '
                 'inside blocks: take "full", or the bytes that activations may take, or do not compile')


class Conflict(NamedTuple):
    """An option that must be left out, and why. Callers put their own name of the option before the reason."""

    option: str
    reason: str


def conflicts(asked: Mapping[str, Any], *, stage: int, ranks: Mapping[str, int | None]) -> Iterator[Conflict]:
    """The options in `asked` (name -> value) that exclude others or have no effect. An option that is left out has its default.

    asked: options of HAS_EFFECT; `deterministic`: the number of logical shards, 0 for none; `pipe`: the schedule, or None;
           `recompute`, `offload_activations` and `compile`; `tensor_overlap`, and `float8`: whether layers multiply in 8 bits
    ranks: mesh axis -> number of ranks along it; None: not known yet, perhaps several. An axis that is left out has one

    >>> [f"{option} {reason}" for option, reason in conflicts({"offload": True}, stage=0, ranks={"replicate": 2})]
    ['offload has no meaning at stage 0, only at stage 1 and 2 and 3']
    """
    several = {axis for axis, n in ranks.items() if n != 1}
    exchanges_in_blocks = bool(several & {"context", "tensor", "expert"})
    is_split = exchanges_in_blocks or "pipe" in several
    has_replicas = bool(several & {"replicate", "context", "expert"})   # other ranks hold the same, and gradients are summed over them
    has_slices = stage > 0 and "shard" in several                       # each rank keeps a slice of the summed gradients
    sums_gradients = has_replicas or "shard" in several or not is_split
    deterministic = asked.get("deterministic", 0)
    if deterministic and is_split:
        yield Conflict("deterministic", "holds bits equal along the data axes only: use a mesh of replicate and shard, or turn it off")
    if asked.get("pipe") is not None and "pipe" not in several:
        yield Conflict("pipe", "has no meaning on a mesh without pipe ranks")
    if asked.get("tensor_overlap", 1) != 1 and "tensor" not in several:
        yield Conflict("tensor_overlap", "has no meaning on a mesh without tensor ranks")
    if asked.get("tensor_overlap", 1) != 1 and asked.get("float8"):
        yield Conflict("tensor_overlap", "has no meaning with precision fp8: products in 8 bits are not computed in pieces")
    if exchanges_in_blocks and asked.get("compile") and asked.get("recompute") == "selective":
        yield Conflict("recompute", NOT_ONE_GRAPH)
    if asked.get("offload_activations") and asked.get("recompute", NONE) not in CHOICES:
        yield Conflict("offload_activations", "moves away what recompute counts, a number of bytes: only with none, selective or full")
    compress = asked.get("compress", EXACT)
    if compress != EXACT and not sums_gradients:
        yield Conflict("compress", "has nothing to compress where ranks only split the model: no gradient is summed over ranks")
    if has_slices and (reason := why_not_for_slices(compress, has_replicas)):
        yield Conflict("compress", reason)
    if compress != EXACT and asked.get("gradient_memory"):
        yield Conflict("gradient_memory", f"has no meaning with compress={compress!r}: gradients are then reduced once a step")
    for option, (default, stages) in HAS_EFFECT.items():
        if option not in asked or repr(asked[option]) == repr(default):   # 1 == True, but asks for something else
            continue
        if option == "all_reduce" and is_split:
            yield Conflict(option, "is for data parallel alone: not on a mesh with other axes than replicate and shard")
        if option in NOT_DETERMINISTIC and deterministic:
            yield Conflict(option, f"has no meaning with deterministic: {NOT_DETERMINISTIC[option]}")
        if option in WITHOUT_PIPE and "pipe" in several:
            yield Conflict(option, "has no meaning with pipe ranks: stages are gathered before the schedule and reduced after it")
        if stage not in stages:
            yield Conflict(option, f"has no meaning at stage {stage}, only at stage {' and '.join(map(str, stages))}")


def float8_misfit(shape: GPTConfig, tensor: int) -> str:
    """Why a model of this shape cannot be trained in fp8 on so many tensor ranks, as fp8.py would find later; "" if it can.

    >>> float8_misfit(GPTConfig(width=24, heads=4, kv_heads=4), tensor=1)
    'width = 24 does not divide by 16, so no layer could be in 8 bits'
    """
    if shape.width % FLOAT8_GRAIN:
        return f"width = {shape.width} does not divide by {FLOAT8_GRAIN}, so no layer could be in 8 bits"
    keys = max(1, shape.kv_heads // tensor) * shape.head_width   # a head is never cut
    whole = {"width": (shape.width, shape.width // tensor), "width of keys": (shape.kv_width, keys)}
    if shape.moe is None:   # experts are not cut over tensor ranks
        whole["ffn"] = (shape.ffn, shape.ffn // tensor)
    for name, (size, part) in whole.items():
        if not size % FLOAT8_GRAIN and part % FLOAT8_GRAIN:
            return f"{name} = {size} over [mesh] tensor {tensor} leaves {part} a rank, which does not divide by {FLOAT8_GRAIN}"
    return ""
