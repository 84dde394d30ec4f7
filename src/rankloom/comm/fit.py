"""From measured times to what links cost: alpha (seconds per message), beta (per byte) and gamma (per byte added).

    time = alpha * steps + beta * bytes + gamma * added

There is one alpha and one beta for each kind of link that the measured collectives used; none is below zero. The fit minimises
the sum of squared relative errors. All algorithms made of messages share these constants. So the fit also predicts sizes and numbers
of ranks that were not measured. The backend's own collectives have their own constants.

Times do not determine all constants: in an fp32 all-reduce, half of the bytes sent are also added, so only a combination of beta
and gamma can be measured. The predicted times do not depend on how it is split between the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from statistics import median

import numpy as np

from rankloom.base.errors import ConfigError
from rankloom.base.events import Timed
from rankloom.base.topology import Link, Links, Topology
from rankloom.comm.price import Route, price, route

ADDED = ("adding", "gamma")
NOTHING = 1e-12   # of |b|: a fit with more constants must reduce the error by at least this


@dataclass(frozen=True, slots=True)
class Fitted:
    """The links fitted to measured times, and the errors of the fit."""

    links: Links
    measured: tuple[str, ...]               # names of the links that were fitted; the others are unchanged
    errors: tuple[tuple[str, float], ...]   # by algorithm, the median over sizes of |predicted / measured - 1|

    @property
    def error(self) -> float:
        """The median of `errors`."""
        return median(error for _, error in self.errors)


def fit_links(times: Sequence[Timed], topology: Topology, *, wide: int = 1) -> Fitted:
    """The links that best fit the times on one topology. Links that no measured collective used stay as they were.

    raises: ConfigError without times
    """
    if not times or topology.size == 1:
        raise ConfigError("there are no times to fit")
    routes = [route(timed.collective, timed.algorithm, timed.bytes, topology, wide=wide) for timed in times]
    # Of two constants that the times cannot tell apart, take the first: beta, not gamma, where every byte sent is also added.
    unknowns = sorted({key for way in routes for key in _amounts(way)}, key=lambda key: (key == ADDED, key))
    amounts = np.array([[_amounts(way).get(key, 0.0) for key in unknowns] for way in routes])
    seconds = np.array([timed.seconds for timed in times])
    found = dict(zip(unknowns, nonnegative_least_squares(amounts / seconds[:, None], np.ones(len(times))).tolist()))
    links = _with_constants(topology.links, found)
    errors: dict[str, list[float]] = {}
    for timed, way in zip(times, routes):
        errors.setdefault(timed.algorithm, []).append(abs(price(way, links).seconds / timed.seconds - 1))
    measured = dict.fromkeys(kind for (kind, what), constant in found.items() if (kind, what) != ADDED or constant)
    return Fitted(links, tuple(measured), tuple((name, median(values)) for name, values in errors.items()))


def _amounts(way: Route) -> dict[tuple[str, str], float]:
    """(kind of link, constant) -> how often a route pays it, if it does at all."""
    amounts: dict[tuple[str, str], float] = {}
    for kind, path in way.parts:
        amounts |= {(kind, "alpha"): float(path.steps), (kind, "beta"): float(path.bytes)}
    amounts[ADDED] = float(sum(path.added for _, path in way.parts))
    return {key: amount for key, amount in amounts.items() if amount}


def _with_constants(links: Links, found: Mapping[tuple[str, str], float]) -> Links:
    """`links` with the fitted constants."""
    for kind in {kind for kind, _ in found}:
        if kind == "adding":
            links = replace(links, adding_gbps=Link.of(0.0, found[ADDED]).bandwidth_gbps)
        else:
            before = links.named(kind)
            link = Link.of(found.get((kind, "alpha"), before.alpha), found.get((kind, "beta"), before.beta))
            links = replace(links, **{kind: link})   # type: ignore[arg-type]
    return links


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |a x - b|. Tries every subset of the unknowns; those outside it are zero.

    a: [m, n]   b: [m] -> [n], n up to about ten

    >>> nonnegative_least_squares(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 2.0])).round(9).tolist()
    [2.5, 0.0]
    """
    n = a.shape[1]
    best, least = np.zeros(n), float(np.linalg.norm(b))
    for chosen in chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1)):
        columns = a[:, chosen]
        scale = np.linalg.norm(columns, axis=0)   # beta is about a millionth of alpha
        x = np.linalg.lstsq(columns / scale, b, rcond=None)[0] / scale
        miss = float(np.linalg.norm(columns @ x - b))
        if (x >= 0).all() and miss < least - NOTHING * float(np.linalg.norm(b)):
            best, least = np.zeros(n), miss
            best[list(chosen)] = x
    return best
