"""Torch's own tests of a backend for processes, those its wheel carries, on "rankloom" and on gloo: what passes where.

    pip install expecttest                                      # torch's tests import it
    python benchmarks/torch_suite.py                            # all, on 8 ranks: some need as many
    python benchmarks/torch_suite.py --ranks 3 --tests 'test_DistributedDataParallel*'

The tests are methods of torch.testing._internal.distributed.distributed_test: collectives, messages, sub-groups, barriers, objects, the
profiler, and DistributedDataParallel with its hooks and its uneven inputs. They ask for gloo by name; on "rankloom" that name gives ours.
Tests that want GPUs, or that torch itself has turned off, are skipped on both.
"""

import datetime
import fnmatch
import os
import random
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from common import Words, count, keep, machine, show
from pool import Pool
from serve import serve

BACKENDS = ("gloo", "rankloom")
TORCHS_ENVIRONMENT = {"BACKEND": "gloo", "TEMP_DIR": tempfile.gettempdir()}   # torch's tests read it when they are imported


def torchs_tests() -> list[str]:
    """Their names."""
    try:
        from torch.testing._internal.distributed.distributed_test import DistributedTest
    except ModuleNotFoundError as error:
        raise SystemExit(f"torch's own tests import {error.name}, which is not installed: pip install {error.name}") from None
    return sorted(name for name in dir(DistributedTest._DistTestBase) if name.startswith("test_"))


def one_rank(backend: str) -> Callable[[dict], list[str]]:
    """What runs a test on this rank, and answers "passed", "skipped" or "failed", and why."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test as torchs

    import rankloom.transport  # noqa: F401
    torch.set_num_threads(1)
    rank, ranks, new_group = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), dist.new_group
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}

    class OnThisRank(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):
        """In a process that is there already."""

    def run(question: dict) -> list[str]:
        name, folder = question["test"], question["folder"]
        os.environ["TEMP_DIR"], torchs.Barrier.barrier_id = folder, 0
        torch.manual_seed(0)
        random.seed(0)
        try:
            limit = datetime.timedelta(seconds=torchs.CUSTOM_PG_TIMEOUT.get(name, 30))
            dist.init_process_group(backend, init_method=f"file://{folder}/store", world_size=ranks, rank=rank, timeout=limit)
            test = OnThisRank(name)
            test.rank, test.file_name = rank, f"{folder}/file"
            test._barrier()   # as torch does, around each test
            getattr(test, name)()
            test._barrier()
            return ["passed", ""]
        except unittest.SkipTest as skip:
            return ["skipped", str(skip)]
        except SystemExit as end:   # how torch's tests skip in a process of their own
            return ["skipped" if end.code in skips else "failed", skips.get(cast(int, end.code), f"exit {end.code}")]
        except Exception as error:
            return ["failed", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"]

    def run_and_clean_up(question: dict) -> list[str]:
        answer = run(question)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.set_debug_level(dist.DebugLevel.OFF)
        return answer

    def ours_for_gloo(*args: Any, **named: Any) -> Any:
        return new_group(*args, **named | ({"backend": backend} if named.get("backend") == "gloo" else {}))

    torchs.dist.new_group = ours_for_gloo
    return run_and_clean_up


def one_failed(verdicts: dict[str, list[str]]) -> bool:
    """Whether a test failed on one of the backends."""
    return any(outcome == "failed" for outcome, _ in verdicts.values())


def verdict(answers: list[list[str]]) -> list[str]:
    """Of all ranks: one that failed decides, then one that did not skip."""
    return min(answers, key=lambda answer: ("failed", "passed", "skipped").index(answer[0]))


def main() -> None:
    """Run every test on both, print what did not pass on one of them, and keep the counts in benchmarks/results/."""
    parser = Words(__doc__)
    parser.add_argument("--ranks", type=count, default=8)
    parser.add_argument("--tests", default="*")
    args = parser.read()
    os.environ.update(TORCHS_ENVIRONMENT | {"WORLD_SIZE": str(args.ranks)})
    where, tests = machine(), fnmatch.filter(torchs_tests(), args.tests)
    with tempfile.TemporaryDirectory() as scratch:
        pools = {backend: Pool(backend, args.ranks, Path(scratch), [sys.executable, __file__, "--worker", backend]) for backend in BACKENDS}
        verdicts: dict[str, dict[str, list[str]]] = {}
        for test in tests:
            for backend, pool in pools.items():
                folder = Path(scratch, backend, test)
                for part in ("barrier", "test_dir", "init_dir"):
                    (folder / part).mkdir(parents=True)
                verdicts.setdefault(test, {})[backend] = verdict(pool.ask(test=test, folder=str(folder)))
            if one_failed(verdicts[test]):
                print(test, *(f"    {backend}: {' '.join(said)}" for backend, said in verdicts[test].items()), sep="\n", flush=True)
        for pool in pools.values():
            pool.end()
    counts = {backend: Counter(of[backend][0] for of in verdicts.values()) for backend in BACKENDS}
    rows = [{"backend": backend, "ranks": args.ranks, "tests": len(tests), "passed": counts[backend]["passed"],
             "skipped": counts[backend]["skipped"], "failed": counts[backend]["failed"]} for backend in BACKENDS]
    print(show(rows))
    details = [{"test": test} | {backend: " ".join(said).replace("|", "/") for backend, said in of.items()}
               for test, of in verdicts.items() if one_failed(of)]
    keep("torch_suite", where, rows, f"\nThose that failed on one of them:\n\n{show(details)}\n" if details else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(sys.argv[3], int(os.environ["RANK"]), one_rank(sys.argv[2]))
    else:
        main()
