"""Check that all ranks of a job run the same program: with an older checkout on one host, ranks may wait for what is never sent.

The ranks compare versions in the store, before they connect.
"""

import contextlib
import hashlib
import json
import platform
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

import rankloom
from rankloom.base.alike import first_difference
from rankloom.base.errors import ConfigError
from rankloom.world.transport.meet import hear_all, wait_for

FAREWELL = 5.0   # seconds to wait until all ranks have read the store


def expect_same_program(store: dist.Store, rank: int, size: int, timeout: float, **given: object) -> None:
    """Compare the versions of torch, Python and this package, and the arguments of `init`, with those of the other ranks.

    raises: ConfigError, on all ranks, with the difference; RankLost with the ranks that did not come within `timeout` seconds
    """
    python = ".".join(platform.python_version_tuple()[:2])   # the third number is for fixes, which do not change what ranks send
    mine = {"torch": torch.__version__, "Python": python, "rankloom": _version()} | {name: str(value) for name, value in given.items()}
    everyone = [json.loads(told) for told in hear_all(store, "program", rank, size, timeout, json.dumps(mine))]
    if problem := first_difference("program", everyone, range(size)):
        with contextlib.suppress(RuntimeError):   # the store ends with rank 0, which stays until all ranks have read it, or time is up
            store.set(f"heard/{rank}", "yes")
            if rank == 0:
                wait_for(store, {f"heard/{other}": other for other in range(size)}, rank, min(timeout, FAREWELL))
        raise ConfigError(problem)


@cache
def _version() -> str:
    """With a hash of all source files: a checkout keeps its version number for a long time."""
    folder = Path(rankloom.__file__).parent
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py"))))
    return f"{rankloom.__version__} ({sources.hexdigest()[:8]})"
