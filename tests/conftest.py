"""What holds for the whole run: signals that can be sent, what simulated ranks talk over, and a table at its end."""

import gc
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings

from rankloom.world.group import Group
from rankloom.world.simulate import _Simulation, simulate
from rankloom.world.transport import wire

NCCL_KNOWS = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
collect_ignore = ["pretended_gpu"]   # is started by its own run.py
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])   # no test asks how fast a machine is
settings.load_profile("patient")
LONG = ("test_cli.py", "test_collectives.py", "test_agent.py", "test_sharded_equivalence.py", "test_matrix.py", "test_namespaces.py")


def pytest_addoption(parser):
    parser.addoption("--whole-matrix", action="store_true", help="test_matrix.py: all stages, models and schedules on each mesh")


def pytest_configure():
    """The garbage collector looks less often than usual: it took a tenth of the time.

    A shell that runs this in the background has some signals ignored, and every process started from here would inherit that.
    """
    gc.set_threshold(20_000, 20, 20)
    for each, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, handler)
    if torch.version.cuda and not torch.cuda.is_available():   # torch would replace this guard under the threads that use it, and crash
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def pytest_sessionstart():
    """Of several workers, each lets its simulated ranks share one core: threads of one interpreter that run on two hand it to each
    other at every operator of torch, for a fifth more processor time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cores, run = sorted(os.sched_getaffinity(0)), _Simulation._one

    def run_on_one_core(simulation, rank):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})   # of this thread, which ends with the rank
        run(simulation, rank)

    _Simulation._one = run_on_one_core


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that none is left for one worker at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish():
    """What was imported stays, so the garbage collector need not look at it again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze_garbage_of_earlier_files():
    """A full collection takes as long as there are objects, and some tests ask for two."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup():
    """A test that draws without a seed of its own draws the same in any order of tests: a failure comes again."""
    torch.manual_seed(0)
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()   # its graphs do not tell modules with hooks from those without: one of an earlier test might be taken


@pytest.fixture(autouse=True)
def simulated_ranks_share_memory(request, monkeypatch):
    """Ranks that are threads take a tenth of the processor time over shared memory, so most of them meet there.

    Over gloo run: the tests of `world`; what is marked so, for its memory and its bills are those of ranks that share none; and
    what names it.
    """
    if "world" not in request.path.parts and not request.node.get_closest_marker("gloo"):
        monkeypatch.setitem(simulate.__kwdefaults__, "backend", "rankloom")


@pytest.fixture(autouse=True)
def ranks_on_pretended_hosts_have_time_to_answer(monkeypatch):
    """When a group breaks, its ranks are asked what they are doing. Tests ask what they say, and not how soon."""
    monkeypatch.setattr(wire, "PATIENCE", 5.0)


def pytest_terminal_summary(terminalreporter):
    """The table of test_matrix.py, wherever its tests ran: the largest error of every layout that was compared with one process."""
    layouts = [value for report in terminalreporter.getreports("passed") for name, value in report.user_properties if name == "layout"]
    if layouts:
        terminalreporter.section("layouts against one process, fp64: largest relative error over so many stages, models and schedules")
        for layout, error in layouts:
            terminalreporter.write_line(f"{layout:<55} {error}")


@pytest.fixture
def one_queue(monkeypatch):
    """Messages as over NCCL: some dtypes are unknown, tags mean nothing, what two ranks send each other on one connection is done one
    after the other, and the first waits for both.
    """
    send, recv, lanes = Group.send, Group.recv, {}

    def queued(call):
        def start(group, x, peer, *, tag=0, label="", async_op=False):
            assert x.dtype in NCCL_KNOWS, f"NCCL cannot send {x.dtype}"
            is_first = (group, peer) not in lanes
            done = lanes.setdefault((group, peer), ThreadPoolExecutor(1)).submit(call, group, x, peer, label=label)
            if is_first or not async_op:
                done.result()
            return SimpleNamespace(wait=done.result) if async_op else x
        return start

    def exchange(group, out, to, into, frm, *, tag=0, label="", async_op=False):   # both ways at once, as one call
        assert not async_op
        coming = recv(group, into, frm, tag=1, label=label, async_op=True)
        send(group, out, to, tag=1, label=label)
        return coming.wait()

    for name, value in {"send": queued(send), "recv": queued(recv), "exchange": exchange,
                        "in_order": property(lambda self: self.size > 1)}.items():
        monkeypatch.setattr(Group, name, value)
    yield
    for lane in lanes.values():
        lane.shutdown()
