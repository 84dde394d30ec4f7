"""The parts in C. pyproject.toml says everything else.

Each is optional: where there is no compiler the install goes on without it, and slower Python takes its place.
They use the stable interface of Python 3.11, so one build serves every later version.
"""

from setuptools import Extension, setup


def extension(name: str, source: str, *flags: str) -> Extension:
    """One module in C of this package."""
    # Contracted products would round otherwise on some processors, and ranks must agree on every bit.
    return Extension(name, [source], extra_compile_args=["-O3", "-ffp-contract=off", *flags], optional=True, py_limited_api=True,
                     define_macros=[("Py_LIMITED_API", "0x030B0000")])


EXTENSIONS = [
    extension("rankloom.comm._quantize", "src/rankloom/comm/_quantize.c"),
    extension("rankloom.comm._lowrank", "src/rankloom/comm/_lowrank.c"),
    extension("rankloom.comm._sparse", "src/rankloom/comm/_sparse.c"),
    extension("rankloom.world.transport._shared", "src/rankloom/world/transport/_shared.c", "-pthread"),
]

setup(ext_modules=EXTENSIONS, options={"bdist_wheel": {"py_limited_api": "cp311"}})
