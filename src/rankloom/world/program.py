"""All ranks of a job must run one program: an older checkout on one host would speak otherwise, and wait for what nobody sends.

They say so in the store, before they connect.
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
from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.transport.meet import hear_all

FAREWELL = 5.0   # seconds


def expect_same_program(store: dist.Store, rank: int, size: int, timeout: float, **given: object) -> None:
    """Compare versions of torch, of Python and of this package, and what `init` was given, with those of the other ranks.

    raises: ConfigError, on all ranks, with what differs; RankLost naming the ranks that did not come within `timeout` seconds
    """
    python = ".".join(platform.python_version_tuple()[:2])   # the third number mends, and changes nothing that ranks say to each other
    mine = {"torch": torch.__version__, "Python": python, "rankloom": _version()} | {name: str(value) for name, value in given.items()}
    everyone = [json.loads(told) for told in hear_all(store, "program", rank, size, timeout, json.dumps(mine))]
    if problem := first_difference("program", everyone, range(size)):
        with contextlib.suppress(RankLost):   # the store ends with rank 0, which leaves when all have heard, or have gone
            hear_all(store, "heard", rank, size, min(timeout, FAREWELL), "yes")
        raise ConfigError(problem)


@cache
def _version() -> str:
    """With a hash of all source files: a checkout has the same number for a long time."""
    folder = Path(rankloom.__file__).parent
    sources = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py"))))
    return f"{rankloom.__version__} ({sources.hexdigest()[:8]})"
