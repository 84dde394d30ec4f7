"""Whatever happens to a rank in the middle of a collective: the others are told who it was, in time, and nothing is left behind.

`benchmarks/faults.py` does the same 200 times and keeps the table.
"""

import psutil
import pytest

from conformance.faults import KINDS, POOL, Injection, Pool, inject
from patience import AT_ONCE


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.end()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_are_told_who_is_gone_and_nothing_is_left_behind(pool, kind, seed):
    outcome = inject(pool, Injection.draw(10 * seed + KINDS.index(kind), kind))
    assert not outcome.problems and outcome.late < AT_ONCE, outcome
    ranks = {each.process.pid for each in pool.idle}
    assert len(ranks) == POOL == len([p for p in ranks if psutil.pid_exists(p)])
