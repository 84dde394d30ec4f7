"""Choose what each block recomputes in backward, so that a step's activations fit a budget of bytes. A pure decision.

From its forward to its backward a block keeps

    none       everything that its gradient needs
    selective  the outputs of matrix products and attention; the rest, which is cheap, is recomputed
    full       only its inputs; everything is recomputed

While block i is recomputed, it holds what it would have kept with `none`, and blocks before it what they keep; those after it have
freed theirs. All these moments must fit. Of the plans that fit, the one that repeats least work wins. recompute.py measures the costs
and applies the plan. Source of the three choices: Korthikanti et al. 2022.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rankloom.base.errors import ConfigError
from rankloom.base.quantities import show_bytes

NONE, SELECTIVE, FULL = CHOICES = ("none", "selective", "full")
COMPETING = 1000   # partial plans kept; if there are more, the plan found fits, but may not be the very best


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What one block keeps and repeats, by choice. Work is in any unit, the same for all blocks."""

    name: str
    kept: Mapping[str, int]          # bytes from forward to backward, with the output, without the input
    repeated: Mapping[str, int]      # work done a second time
    work: int                        # of one forward
    calls: int = 1                   # forwards of it that wait for their backward at the same time

    def moment(self, choice: str) -> int:
        """Bytes in addition to `kept` while the block is recomputed."""
        return max(0, self.kept[NONE] - self.kept[choice])


@dataclass(frozen=True, slots=True)
class RecomputeDecision:
    """What one block recomputes, and why."""

    block: str
    choice: str
    kept: int          # bytes, over all its calls
    repeated: float    # fraction of its forward
    reason: str


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """A decision for each block. Printed, it is a table."""

    decisions: tuple[RecomputeDecision, ...]
    budget: int
    peak: int          # most bytes at any moment of backward
    repeated: float    # fraction of the forward of all blocks

    def __str__(self) -> str:
        rows = [("block", "choice", "kept", "repeated", "why")] + [
            (d.block, d.choice, show_bytes(d.kept), f"{d.repeated:.0%}", d.reason) for d in self.decisions]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"at most {show_bytes(self.peak)} of {show_bytes(self.budget)}, "
                                  f"{self.repeated:.0%} of the forward of these blocks twice"])


@dataclass(frozen=True, slots=True)
class _Partial:
    """Choices for the first blocks."""

    kept: int
    repeated: int
    choices: tuple[str, ...] = ()


def fit(costs: Sequence[BlockCost], budget: int) -> RecomputePlan:
    """Choose for each block, in forward order, so that all fits in `budget` bytes and the least work is repeated.

    raises: ConfigError with the bytes needed, when even `full` everywhere does not fit

    >>> cost = {"kept": {"none": 90, "selective": 50, "full": 10}, "repeated": {"none": 0, "selective": 20, "full": 100}}
    >>> [d.choice for d in fit([BlockCost(name, work=100, **cost) for name in "abc"], 200).decisions]
    ['selective', 'selective', 'none']
    """
    nothing = [NONE] * len(costs)
    if peak(costs, nothing) <= budget:
        return _plan(costs, nothing, budget)
    # With several micro-batches in flight, later blocks still hold bytes of others: set room for the largest moment aside.
    aside = max(cost.moment(_least(cost)) for cost in costs) if _several(costs) else 0
    partials = [_Partial(0, 0)]
    for cost in costs:
        grown = [_Partial(partial.kept + cost.calls * cost.kept[choice], partial.repeated + cost.calls * cost.repeated[choice],
                          (*partial.choices, choice)) for partial in partials for choice in CHOICES]
        most = [aside if aside else cost.moment(partial.choices[-1]) for partial in grown]
        partials = _best([partial for partial, more in zip(grown, most) if partial.kept + more <= budget])
        if not partials:
            raise _too_small(costs, budget)
    best = min(partials, key=lambda partial: (partial.repeated, partial.kept))
    return _plan(costs, best.choices, budget)


def peak(costs: Sequence[BlockCost], choices: Sequence[str]) -> int:
    """The most bytes at any moment of backward; an upper bound, where several forwards wait."""
    moments = [cost.moment(choice) for cost, choice in zip(costs, choices, strict=True)]
    kept = list(accumulate(cost.calls * cost.kept[choice] for cost, choice in zip(costs, choices)))
    if _several(costs):
        return kept[-1] + max(moments)
    return max((before + more for before, more in zip(kept, moments)), default=0)


def _several(costs: Sequence[BlockCost]) -> bool:
    return any(cost.calls > 1 for cost in costs)


def _least(cost: BlockCost) -> str:
    return min(CHOICES, key=lambda choice: cost.kept[choice])


def _best(partials: list[_Partial]) -> list[_Partial]:
    """Drop each partial plan that is no better than another in both bytes kept and work repeated."""
    best: list[_Partial] = []
    for partial in sorted(partials, key=lambda partial: (partial.kept, partial.repeated)):
        if not best or partial.repeated < best[-1].repeated:
            best.append(partial)
    if len(best) > COMPETING:   # thin them evenly, with both ends
        best = [best[i * (len(best) - 1) // (COMPETING - 1)] for i in range(COMPETING)]
    return best


def _plan(costs: Sequence[BlockCost], choices: Sequence[str], budget: int) -> RecomputePlan:
    decisions = tuple(_explain(cost, choice) for cost, choice in zip(costs, choices, strict=True))
    work = sum(cost.calls * cost.work for cost in costs)
    repeated = sum(cost.calls * cost.repeated[choice] for cost, choice in zip(costs, choices))
    return RecomputePlan(decisions, budget, peak(costs, choices), repeated / work if work else 0.0)


def _explain(cost: BlockCost, choice: str) -> RecomputeDecision:
    kept, share = cost.calls * cost.kept[choice], cost.repeated[choice] / cost.work if cost.work else 0.0
    why = "there is room" if choice == NONE else f"saves {show_bytes(cost.calls * cost.kept[NONE] - kept)}"
    return RecomputeDecision(cost.name, choice, kept, share, why)


def _too_small(costs: Sequence[BlockCost], budget: int) -> ConfigError:
    need, whole = peak(costs, [_least(cost) for cost in costs]), peak(costs, [NONE] * len(costs))
    return ConfigError(f"recompute = {budget} bytes: the activations of {len(costs)} blocks need {need} bytes ({show_bytes(need)}) even "
                       f"when as much as possible is recomputed, and {show_bytes(whole)} when nothing is; give at least that many, "
                       "or smaller micro-batches")
