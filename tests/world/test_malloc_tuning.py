"""Memory that every step frees and asks for again stays with the process, unless its user has decided otherwise."""

import os
import platform
import subprocess
import sys

import pytest

COMPILED = """
import types, warnings, torch
import rankloom as rl
from rankloom.world import malloc_tuning

calls = []
libc = types.SimpleNamespace(mallopt=lambda number, value: calls.append(number))
malloc_tuning.ctypes = types.SimpleNamespace(CDLL=lambda name: libc)
rl.init(device="cpu")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(optimizer.step, backend="eager")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        step()
print(calls, [str(each.message) for each in told if "rankloom" in str(each.message)])
"""

STEPS = """
import ctypes, resource, torch
import rankloom as rl

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo

rl.init(device="cpu")
model = torch.nn.Linear(2, 2)   # a loop of one's own, whatever it trains
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2)).sum().backward()
optimizer.step()

def run(steps):
    for _ in range(steps):
        pieces = [torch.ones(3 << 18) for _ in range(8)]   # 24 MiB
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

faults = -run(5) + run(5)
before = mallinfo().hblks
larger = torch.empty(7 << 20)   # 28 MiB, more than any piece so far
print(faults, mallinfo().hblks - before)
"""


# Either setting gives each piece pages of its own. By itself glibc may or may not give pieces back: that depends on what lies above.
SETTINGS = [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
@pytest.mark.parametrize(("decided", "stays"), SETTINGS, ids=str)
def test_a_process_keeps_what_a_step_frees_once_an_optimizer_has_stepped(decided, stays):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, "-c", STEPS], env=plain | decided, capture_output=True, text=True, check=True)
    faults, apart = map(int, done.stdout.split())
    assert faults < 1000 if stays else faults > 20_000, "five steps of 6,144 pages"
    assert apart == (0 if stays else 1), "a new piece that is not too large comes from the heap, where it can stay"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's heap")
def test_a_step_that_its_user_compiles_sets_the_limits_once_and_warns_of_nothing():
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout == "[-3, -1] []\n"
