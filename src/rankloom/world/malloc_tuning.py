"""Let glibc keep what a training step frees: the next step asks for the same again.

By itself it gives memory at the end of its heap back as soon as that is more than twice the largest piece so far: each step of a small
model gives back some MiB, and gets them again page by page, with a fault of microseconds for each. That was some 6 % of a step of an 11M
GPT of 128 tokens, and of the deterministic one of `make train`. Fixed here are the limits that it comes to in the end. Not before the
first step is over: what a model leaves behind when it moves into flat buffers must go, or the peak of a 57M GPT grows by 30 to 60 MiB.
"""

import ctypes
import platform
from functools import cache

from torch.optim.optimizer import register_optimizer_step_post_hook

from rankloom.world.launch import decides_heap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3   # of mallopt(3)
LARGEST_KEPT = 32 << 20   # bytes of a piece; larger ones have pages of their own, which go when they are freed
MOST_KEPT = 64 << 20      # free bytes at the end of the heap


@cache
def keep_freed_memory() -> None:
    """In this process, from the first step of any optimizer on; unless its user has set the limits (MALLOC_..., GLIBC_TUNABLES) or its C
    library is another one.
    """
    if platform.libc_ver()[0] == "glibc" and not decides_heap():
        register_optimizer_step_post_hook(lambda *_: _set_limits())


@cache   # only once: by the first step all is there that stays
def _set_limits() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
