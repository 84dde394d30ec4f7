"""Ranks killed, stopped, ended or aborting in the middle of collectives: what the survivors are told, and how soon.

    python benchmarks/faults.py                  # 200 random injections
    python benchmarks/faults.py --count 20 --seed 7

Each injection: 2 to 5 processes build a group and call random collectives; one of them is struck at a random moment. All is
well when every survivor raises the right error naming that rank within a second (where it was stopped: within a second after
the group's time-out, and not before), when the survivors can build a new group in the same processes, and when
nothing is left behind: descriptors, threads, mappings, files in /dev/shm. See tests/conformance/faults.py.
"""

import random
import statistics
import sys
from pathlib import Path

from common import Words, count, keep, machine, show

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conformance.faults import KINDS, STOPPED, Injection, Outcome, Pool, inject

SOON = 1.0   # seconds until the last survivor must have been told


def all_is_well(outcome: Outcome) -> bool:
    """The right error, in time, and nothing left behind."""
    return not outcome.problems and outcome.late < SOON


def row_of(kind: str, outcomes: list[Outcome]) -> dict:
    """One line of the table."""
    latencies = [outcome.latency * 1e3 for outcome in outcomes]
    return {
        "struck by": kind, "injections": len(outcomes), "survivors": sum(outcome.injection.size - 1 for outcome in outcomes),
        "right error, nothing left": sum(not outcome.problems for outcome in outcomes),
        "within 1 s": sum(outcome.late < SOON for outcome in outcomes),
        "last survivor told after, median ms": round(statistics.median(latencies), 1), "max ms": round(max(latencies), 1),
    }


def main() -> None:
    """Run them all, print the table and every problem, keep it in benchmarks/results/."""
    parser = Words(__doc__)
    parser.add_argument("--count", type=count, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.read()
    where, pool, rng = machine(), Pool(), random.Random(args.seed)
    outcomes = []
    for number in range(args.count):
        outcomes.append(inject(pool, Injection.draw(rng.randrange(2**32), KINDS[number % len(KINDS)])))
        if not all_is_well(outcomes[-1]):
            print(outcomes[-1], flush=True)
    pool.end()
    rows = [row_of(kind, [o for o in outcomes if o.injection.kind == kind]) for kind in KINDS]
    print(show(rows))
    keep("faults", where, rows, f"\nAfter a stop, the time is counted from the end of the group's time-out of {STOPPED:g} s.\n")
    if not all(map(all_is_well, outcomes)):
        raise SystemExit("not all was well")


if __name__ == "__main__":
    main()
