"""Triton, for files with a kernel of our own. They can be imported without it; where BUILDS is false the kernels cannot be run.

Only CUDA builds of torch include Triton, and it calls a compiler for C.
"""

import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAS_TRITON = find_spec("triton") is not None
BUILDS = HAS_TRITON and any(map(shutil.which, ("cc", "gcc", "clang")))
tl: Any = import_module("triton.language") if HAS_TRITON else SimpleNamespace(constexpr=object)   # for the signatures of kernels
jit: Callable[[Callable], Any] = import_module("triton").jit if HAS_TRITON else lambda kernel: kernel
