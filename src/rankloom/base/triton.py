"""Triton, for files with a kernel of our own. Only CUDA builds of torch include it, it calls a compiler for C, and it takes a quarter of a
second to import. So kernels have files of their own, which are imported where they run.
"""

import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAS_TRITON = find_spec("triton") is not None
BUILDS = HAS_TRITON and any(map(shutil.which, ("cc", "gcc", "clang")))   # whether kernels can be run


def language() -> tuple[Any, Callable[[Callable], Any]]:
    """triton.language and triton.jit; without Triton, stand-ins with which a kernel can be defined, and not run."""
    if not HAS_TRITON:
        return SimpleNamespace(constexpr=object), lambda kernel: kernel
    return import_module("triton.language"), import_module("triton").jit
