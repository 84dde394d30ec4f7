"""The results of a bench: the fastest algorithm at each size and why, what links cost, and all of it as JSON.

Pure functions from times to values. `cli.py` prints them, `watch/plots.py` draws them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

from rankloom.base.events import Timed
from rankloom.base.quantities import algorithm_bandwidth, bus_factor
from rankloom.base.topology import Topology
from rankloom.comm.fit import Fitted, fit_links
from rankloom.comm.price import Price, price, route


@dataclass(frozen=True, slots=True)
class Finding:
    """One size: the times of all algorithms with a right result, the fastest first, and their prices by the fit."""

    bytes: int
    times: tuple[Timed, ...]
    prices: tuple[Price, ...]   # in the same order

    @property
    def winner(self) -> Timed:
        """The fastest."""
        return self.times[0]

    @property
    def reason(self) -> str:
        """Whether latency or bandwidth is the larger part of the winner's price."""
        return self.prices[0].reason

    @property
    def expected(self) -> str:
        """The fastest algorithm by the fit: the one that "auto" would take."""
        return min(zip(self.prices, self.times), key=lambda pair: pair[0].seconds)[1].algorithm


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of one collective on one number of ranks."""

    collective: str
    topology: Topology         # with the links from before the fit
    times: tuple[Timed, ...]   # also those of wrong results
    fitted: Fitted
    sizes: tuple[Finding, ...]
    wide: int                  # see comm/algorithms.py

    def curve(self, algorithm: str) -> list[tuple[int, float]]:
        """(bytes, seconds) by the fit, from the smallest size to the largest, each sqrt(2) times the one before."""
        smallest, largest = (pick(at.bytes for at in self.sizes) for pick in (min, max))
        sizes = [round(smallest * 2 ** (k / 2)) for k in range(2 * (largest // smallest).bit_length())]
        return [(size, self.price(algorithm, size).seconds) for size in [*(size for size in sizes if size < largest), largest]]

    def price(self, algorithm: str, nbytes: int) -> Price:
        """The time an algorithm should take, by the fit."""
        return price(route(self.collective, algorithm, nbytes, self.topology, wide=self.wide), self.fitted.links)

    def worst(self) -> dict[str, tuple[int, float]]:
        """algorithm -> the size at which the fit is farthest off, and measured over predicted seconds there; medians hide it."""
        found: dict[str, tuple[int, float]] = {}
        for at in self.sizes:
            for timed, priced in zip(at.times, at.prices):
                ratio = timed.seconds / priced.seconds
                if abs(log(ratio)) >= abs(log(found.get(timed.algorithm, (0, 1.0))[1])):
                    found[timed.algorithm] = at.bytes, ratio
        return found

    def as_table(self) -> dict[str, Any]:
        """JSON values: every time with its bandwidths, the fit and its errors, the winners."""
        links = {name: value for name, value in self.fitted.links.as_table().items() if name.removesuffix("_gbps") in self.fitted.measured}
        fastest = [{"bytes": at.bytes, "algorithm": at.winner.algorithm, "seconds": at.winner.seconds, "because": at.reason,
                    "predicted_seconds": at.prices[0].seconds, "fastest_by_the_fit": at.expected} for at in self.sizes]
        worst = {name: {"bytes": size, "measured_over_predicted": ratio} for name, (size, ratio) in self.worst().items()}
        times = [asdict(timed) | {"algbw_GBps": bandwidth(timed), "busbw_GBps": bus_bandwidth(timed)} for timed in self.times]
        return {"ranks": self.topology.size, "nodes": self.topology.as_table()["nodes"], "fastest": fastest,
                "fit": {"links": links, "errors": dict(self.fitted.errors), "worst": worst}, "times": times}


def bandwidth(timed: Timed) -> float:
    """algbw, GB/s."""
    return algorithm_bandwidth(timed.bytes, timed.seconds)


def bus_bandwidth(timed: Timed) -> float:
    """busbw, GB/s."""
    return bandwidth(timed) * bus_factor(timed.collective, timed.ranks)


def find(times: Sequence[Timed], topology: Topology, *, wide: int = 1) -> list[Findings]:
    """The findings of each collective that was timed on `topology`. wide: see comm/algorithms.py"""
    return [_find_one([timed for timed in times if timed.collective == collective], topology, wide)
            for collective in dict.fromkeys(timed.collective for timed in times)]


def _find_one(times: list[Timed], topology: Topology, wide: int) -> Findings:
    right = [timed for timed in times if not timed.wrong]
    found = Findings(times[0].collective, topology, tuple(times), fit_links(right or times, topology, wide=wide), (), wide)
    sizes = []
    for size in sorted({timed.bytes for timed in right}):
        by_time = sorted((timed for timed in right if timed.bytes == size), key=lambda timed: timed.seconds)
        sizes.append(Finding(size, tuple(by_time), tuple(found.price(timed.algorithm, size) for timed in by_time)))
    return replace(found, sizes=tuple(sizes))
