"""Ranks as processes: results, every way in which one can end, and that nothing is left behind."""

import gc
import multiprocessing.util
import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import FunctionType

import psutil
import pytest
import torch

import rankloom as rl
from patience import AT_ONCE


class Picky(Exception):
    """An exception that pickles, but does not come back: its constructor wants two arguments."""

    def __init__(self, code: int, text: str):
        super().__init__(f"{code}: {text}")


class Mute(Picky):
    """One that has no text either."""

    def __str__(self) -> str:
        return 3   # type: ignore[return-value]


def whoami(world):
    time.sleep(0.05 * (world.size - world.rank))
    return world.rank, world.size, os.getpid(), world.all_reduce(torch.tensor(world.rank)).item()


def never_collected(world):
    return gc.get_freeze_count(), gc.isenabled()


def is_debugged(world):
    return world.debug


def raise_on(bad, world):
    if world.rank == bad:
        raise KeyError("mine")
    world.barrier(label="never comes together")


def raise_picky(kind, world):
    if world.rank == 1:
        raise kind(3, "will not come back")
    world.barrier()


def end_on(bad, how, world):
    world.barrier()
    if world.rank == bad:
        how()
    world.barrier()


def return_early(world):
    world.barrier()
    if world.rank == 0:
        world.recv(torch.empty(3), 1)


def send_and_return(world):
    if world.rank == 0:
        world.send(torch.ones(4), 1)
        return world.send(torch.ones(1 << 20), 1, async_op=True).label
    time.sleep(0.3)
    return world.recv(torch.empty(4), 0).sum().item() + world.recv(torch.empty(1 << 20), 0).sum().item()


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def put_in_order(folder, world):
    finish = (folder / str(world.rank)).write_text
    multiprocessing.util.Finalize(None, lambda: [time.sleep(0.05), finish("done")], exitpriority=1)   # what a process does as it ends


def leave_quietly():
    os._exit(0)


def die_in_the_middle_of_the_answer(world):
    def half(pipe, data):
        os.write(pipe.fileno(), data[:len(data) // 2])
        kill_self()

    Connection._send = half
    return torch.ones(1000).tolist()


def die_after_the_answer(how, world):
    send = Connection.send_bytes
    Connection.send_bytes = lambda pipe, answer: [send(pipe, answer), how()] if world.rank == 1 else send(pipe, answer)
    return world.rank


SLEEPERS = """
import os, pathlib, time
import rankloom as rl

def sleep_long(world):
    pathlib.Path(f"rank-{world.rank}").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    rl.spawn(2, sleep_long)
"""


def lose_it_before_it_dies(world):
    """Rank 0 is quicker to tell that it lost rank 1 than the system to tell that rank 1 is dead."""
    if world.rank == 0:
        raise rl.RankLost("collateral")
    time.sleep(0.3)
    kill_self()


def lose_nobody(world):
    if world.rank == 0:
        raise rl.RankLost("nobody else has failed")
    return world.rank


def lose_one_that_waited_in_vain(world):
    """As over gloo, which closes the connections of a call that times out before the call returns."""
    if world.rank == 1:
        raise rl.RankLost("rank 1: connection closed by peer")
    time.sleep(0.1)
    raise rl.CollectiveTimeout("rank 0: nobody came")


def lose_one_that_fails_and_let_torch_tell(world):
    if world.rank == 0:
        raise torch.distributed.DistNetworkError("Connection was likely closed")
    time.sleep(0.3)
    raise KeyError("late")


def return_a_lambda(world):
    return lambda: world.rank


def return_picky(world):
    return Picky(3, "will not come back")


def ports_and_children(world):
    return sorted({c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN})


def grandchildren() -> set[int]:
    """Living children of this process and of its fork-server, zombies left out."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def fork_server():
    """Is started by the first call, and stays."""
    rl.spawn(1, whoami)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(fork_server):
    children, ports = grandchildren(), listening()
    yield
    deadline = time.monotonic() + AT_ONCE
    while grandchildren() - children and time.monotonic() < deadline:
        time.sleep(0.05)
    assert grandchildren() <= children
    assert listening() <= ports


def test_ranks_share_what_their_server_has_imported_for_good():
    for objects, collects in rl.spawn(2, never_collected):
        assert objects > 100_000 and collects


@pytest.mark.parametrize("p", [1, 2, 3])
def test_results_come_in_rank_order_each_from_a_process_of_its_own(p):
    results = rl.spawn(p, whoami)
    assert [result[:2] for result in results] == [(rank, p) for rank in range(p)]
    assert [result[3] for result in results] == [sum(range(p))] * p
    assert len({pid for _, _, pid, _ in results} | {os.getpid()}) == p + 1


HAS_THE_COMPILER = """
import sys
import rankloom as rl

def has_the_compiler(world):
    return "torch._dynamo" in sys.modules

if __name__ == "__main__":
    assert rl.spawn(2, has_the_compiler) == [True, True]
"""


def test_a_rank_starts_with_what_the_first_optimizer_would_import(tmp_path):
    """In each of them that would take as long as the import of torch. A process has one fork-server, so this one is new."""
    (tmp_path / "job.py").write_text(HAS_THE_COMPILER)
    subprocess.run([sys.executable, "job.py"], cwd=tmp_path, check=True)


def test_the_body_may_carry_arguments_as_a_partial_function():
    with pytest.raises(KeyError):
        rl.spawn(1, partial(raise_on, 0))


def test_processes_end_in_order_also_where_their_caller_is_handling_an_error(tmp_path):
    try:
        raise KeyError("the caller's")
    except KeyError:
        rl.spawn(2, partial(put_in_order, tmp_path))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["done", "done"]


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_keeps_its_type_and_brings_its_traceback_as_a_note(bad):
    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        rl.spawn(2, partial(raise_on, bad), timeout=60)
    (note,) = caught.value.__notes__
    assert note.startswith(f"(rank {bad} of 2 failed first; the others were stopped because of it)")
    assert "in raise_on" in note and 'raise KeyError("mine")' in note
    assert time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize(("kind", "text"), [(Picky, "Picky: 3: will not come back"), (Mute, "Mute: <exception str.. failed>")])
def test_an_exception_that_cannot_travel_arrives_as_text(kind, text):
    with pytest.raises(rl.RankFailed, match=f"rank 1 failed: {text}") as caught:
        rl.spawn(2, partial(raise_picky, kind))
    assert caught.value.rank == 1
    assert "in raise_picky" in caught.value.__notes__[0]


def test_a_rank_killed_by_a_signal_is_named_with_the_signal():
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed, match=r"rank 1 of 3 ended without a word: killed by SIGKILL") as caught:
        rl.spawn(3, partial(end_on, 1, kill_self), timeout=60)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < AT_ONCE


def test_a_rank_that_leaves_in_the_middle_is_a_failure_although_it_says_that_all_is_well():
    with pytest.raises(rl.RankFailed, match=r"rank 0 of 2 ended without a word: exit code 0"):
        rl.spawn(2, partial(end_on, 0, leave_quietly), timeout=60)


def test_a_rank_that_waits_for_one_whose_body_has_returned_is_told_at_once():
    begin = time.monotonic()
    with pytest.raises(rl.RankLost, match="rank 0: recv .* lost rank 1: it has left the group"):
        rl.spawn(2, return_early, timeout=2 * AT_ONCE)
    assert time.monotonic() - begin < 2 * AT_ONCE


def test_what_a_rank_has_sent_before_its_body_returned_arrives():
    assert rl.spawn(2, send_and_return) == ["send", 4.0 + (1 << 20)]


def test_a_rank_that_exits_does_not_end_the_caller_without_a_word():
    with pytest.raises(rl.RankFailed, match=r"rank 0 called sys.exit\(\).* ends with `return`") as caught:
        rl.spawn(2, partial(end_on, 0, sys.exit), timeout=60)
    assert caught.value.rank == 0 and "in end_on" in caught.value.__notes__[0]


def test_a_rank_that_dies_in_the_middle_of_its_answer_has_given_none():
    with pytest.raises(rl.RankFailed, match=r"rank 0 of 1 ended without a word: killed by SIGKILL"):
        rl.spawn(1, die_in_the_middle_of_the_answer)


@pytest.mark.parametrize(("how", "says"), [(kill_self, "killed by SIGKILL"), (partial(os._exit, 3), "exit code 3")])
def test_a_rank_that_dies_after_its_answer_is_named_too(how, says):
    with pytest.raises(rl.RankFailed, match=f"rank 1 of 3 gave its result, and did not end well: {says}") as caught:
        rl.spawn(3, partial(die_after_the_answer, how))
    assert caught.value.rank == 1


def test_ranks_that_were_started_end_where_others_cannot_be(monkeypatch):
    start = ForkServerProcess.start

    def fail(process):
        if process.name == "rank-1":
            raise OSError("too many open files")
        start(process)

    monkeypatch.setattr(ForkServerProcess, "start", fail)
    with pytest.raises(OSError, match="too many open files"):
        rl.spawn(3, whoami)


def test_ranks_end_with_their_parent_however_that_ends(tmp_path):
    (tmp_path / "sleepers.py").write_text(SLEEPERS)
    parent = subprocess.Popen([sys.executable, "sleepers.py"], cwd=tmp_path)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None
        time.sleep(0.05)
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs(ranks, AT_ONCE)
    assert not [rank for rank in left if rank.status() != psutil.STATUS_ZOMBIE]


def test_the_cause_is_reported_and_not_the_loss_of_it_that_another_rank_reported_first():
    with pytest.raises(rl.RankFailed, match="rank 1 of 2 ended without a word: killed by SIGKILL"):
        rl.spawn(2, lose_it_before_it_dies)


def test_a_loss_without_another_cause_is_itself_reported():
    with pytest.raises(rl.RankLost, match="nobody else has failed"):
        rl.spawn(2, lose_nobody)


def test_a_rank_that_tells_of_its_closed_connection_before_its_peer_tells_why_it_closed_is_not_the_first():
    with pytest.raises(rl.CollectiveTimeout, match="nobody came") as caught:
        rl.spawn(2, lose_one_that_waited_in_vain, backend="gloo")
    assert caught.value.__notes__[0].startswith("(rank 0 of 2 failed first")


def test_a_rank_that_tells_its_loss_by_an_error_of_torch_is_not_the_first_either():
    with pytest.raises(KeyError, match="late"):
        rl.spawn(2, lose_one_that_fails_and_let_torch_tell)


def test_a_rank_killed_by_a_signal_without_a_name_is_named_with_its_number():
    with pytest.raises(rl.RankFailed, match=r"rank 0 of 1 ended without a word: killed by signal 40"):
        rl.spawn(1, partial(end_on, 0, partial(signal.raise_signal, 40)))


def test_a_result_that_cannot_travel_is_an_error_of_that_rank():
    with pytest.raises(rl.ConfigError, match="what the body returned on rank 0, a function, cannot be sent back .*pickle.*return tensors"):
        rl.spawn(1, return_a_lambda)


def test_a_result_that_does_not_come_back_is_an_error_that_names_the_rank():
    with pytest.raises(rl.RankFailed, match="rank 0 of 1: what it returned does not come back from pickle: TypeError: .*Picky") as caught:
        rl.spawn(1, return_picky)
    assert caught.value.rank == 0


def test_a_body_that_cannot_travel_is_refused_with_the_way_out():
    with pytest.raises(rl.ConfigError, match=r"cannot be sent to another process .*top of a module, or use rl.simulate"):
        rl.spawn(2, lambda world: None)


def test_a_body_that_is_in_no_file_is_refused_with_the_way_out(monkeypatch):
    """One of a notebook: it can be sent by name, and nobody finds it there."""
    typed = FunctionType(whoami.__code__, globals(), "typed")
    typed.__qualname__, typed.__module__ = "typed", __name__
    monkeypatch.setitem(globals(), "typed", typed)
    with pytest.raises(rl.ConfigError, match=r"does not find .*'typed'.* notebook .* put the function into a module, or use rl.simulate"):
        rl.spawn(1, typed)


def test_a_program_from_standard_input_is_told_that_spawned_processes_cannot_read_it():
    program = "import rankloom as rl\ndef body(world): return world.rank\nif __name__ == '__main__': rl.spawn(1, body)\n"
    ended = subprocess.run([sys.executable], input=program, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "this one came from standard input; save it as a file, or use rl.simulate" in ended.stderr


def test_a_program_that_spawns_when_its_file_is_read_is_told_where_the_call_belongs(monkeypatch):
    """Python's own words for that fill half a page."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)   # as when a spawned process reads the file
    with pytest.raises(rl.ConfigError, match='put the call under `if __name__ == "__main__":`'):
        rl.spawn(1, whoami)


def test_no_rank_listens_on_an_open_interface():
    for addresses in rl.spawn(2, ports_and_children):
        assert set(addresses) <= {"127.0.0.1"}
    assert {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}


def test_a_mesh_gives_its_axes_to_processes_too():
    assert rl.spawn(rl.Mesh(replicate=2), whoami)[1][:2] == (1, 2)
    with pytest.raises(rl.MeshError):
        rl.spawn(0, whoami)


def test_ranks_are_in_the_debug_mode_of_the_moment_though_their_server_is_older(monkeypatch):
    monkeypatch.delenv("RANKLOOM_DEBUG", raising=False)
    assert rl.spawn(2, is_debugged) == [False, False]
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")
    assert rl.spawn(2, is_debugged) == [True, True]


def spawn_again(world):
    try:
        rl.spawn(1, whoami)
    except rl.ConfigError as error:
        return str(error)


def test_a_spawned_rank_that_spawns_is_told_that_it_cannot():
    assert rl.spawn(1, spawn_again)[0].startswith("spawn: this process is a rank that spawn has started, and cannot start others")


def test_more_ranks_than_shared_memory_has_room_for_are_refused_before_any_is_started():
    with pytest.raises(rl.ConfigError, match="257 ranks share a host, expected 256 at most"):
        rl.spawn(257, int)


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(rl.ConfigError, match="device = 'tpu', expected 'cpu' or 'cuda'"):
        rl.spawn(1, whoami, device="tpu")


def call_in_a_forked_child(world):
    other = 1 - world.rank
    calls = [world.barrier, lambda: world.send(torch.ones(1), other), lambda: world.recv(torch.ones(1), other, async_op=True)]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        for call in calls:
            try:
                call()
            except rl.ConfigError as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as said:
        return said.read().splitlines(), world.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_process_that_a_rank_has_forked_is_told_that_it_is_no_rank_and_the_rank_goes_on(backend):
    for rank, (errors, total) in enumerate(rl.spawn(2, call_in_a_forked_child, backend=backend, timeout=20.0)):
        assert total == 2.0
        assert [error.split(" in group")[0] for error in errors] == [f"rank {rank}: {name}" for name in ("barrier", "send", "recv")]
        assert all("this process was forked from one that owns the group; build groups after the fork" in error for error in errors)
