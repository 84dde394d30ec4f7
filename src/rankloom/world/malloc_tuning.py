"""Let glibc keep the memory that a training step frees: the next step asks for the same again.

By default glibc returns free memory at the end of its heap when that is more than twice the largest piece so far: each step of a small
model returns some MiB, and gets them back page by page, with a page fault of microseconds each. That was some 6 % of a step of an 11M
GPT with 128 tokens, and of the deterministic step of `make train`. This file sets the limits that glibc would reach in the end. Not
before the end of the first step: memory that a model frees when it moves into flat buffers must be returned, or the peak of a 57M GPT
grows by 30 to 60 MiB.
"""

import ctypes
import platform
from functools import cache

from torch.optim.optimizer import register_optimizer_step_post_hook

from rankloom.world.launch import decides_heap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3   # of mallopt(3)
LARGEST_KEPT = 32 << 20   # bytes; a larger piece has pages of its own, which are returned when it is freed
MOST_KEPT = 64 << 20      # free bytes at the end of the heap


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in this process, from the first step of any optimizer on. Does nothing if the user has set the limits
    (MALLOC_..., GLIBC_TUNABLES) or the C library is not glibc.
    """
    if platform.libc_ver()[0] == "glibc" and not decides_heap():
        done: list[bool] = []   # no `cache`: torch.compile steps into the hooks of an optimizer, and warns its user of one

        def set_limits_once(*_: object) -> None:
            if not done:   # by the first step, everything that stays is allocated
                done.append(True)
                _set_limits()

        register_optimizer_step_post_hook(set_limits_once)


def _set_limits() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
