"""`rl.init`: alone, under a launcher's variables, and what it says when the others do not come."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest
import torch

import rankloom as rl
from patience import AT_ONCE, STARTED, wait_until

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
            "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch, **env: str) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


HELD: list[socket.socket] = []


@pytest.fixture(autouse=True, scope="module")
def ports_are_given_back():
    yield
    while HELD:
        HELD.pop().close()


def free_port() -> int:
    """One that the system gives to nobody else: it is bound here, and nobody listens there yet."""
    HELD.append(held := socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held.getsockname()[1]


def test_without_a_launcher_init_gives_a_world_of_one():
    world = rl.init(device="cpu")
    assert (world.rank, world.size, world.local_rank, world.mesh) == (0, 1, 0, rl.Mesh())
    assert torch.equal(world.all_reduce(torch.ones(2)), torch.ones(2))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(rl.ConfigError, match="device = 'cuda': torch finds no GPU"):
        rl.init(device="cuda")


def test_a_mesh_that_needs_other_ranks_is_refused_with_the_arithmetic_before_anybody_is_waited_for(monkeypatch):
    with pytest.raises(rl.MeshError, match="shard 2 x tensor 2 = 4 ranks, but there are 1"):
        rl.init(rl.Mesh(shard=2, tensor=2))
    launched(monkeypatch, RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    begin = time.monotonic()
    with pytest.raises(rl.MeshError, match="replicate 2 = 2 ranks, but there are 3"):
        rl.init(rl.Mesh(replicate=2))
    assert time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize("mesh", [2, "shard", {"shard": 2}], ids=repr)
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(rl.MeshError, match=r"init was given .* for a mesh; expected one, such as rl.Mesh\(shard=2\), or nothing"):
        rl.init(mesh)


def test_nobody_at_the_meeting_point_is_rank_lost_within_the_time_out(monkeypatch):
    port = free_port()
    launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    begin = time.monotonic()
    why = rf"rank 1 of 2 could not reach the meeting point .*127.0.0.1:{port} in \d.\d s: nothing listens at 127.0.0.1, port {port} "
    with pytest.raises(rl.RankLost, match=why):
        rl.init(timeout=1, device="cpu")
    assert 1 <= time.monotonic() - begin < AT_ONCE


def test_a_host_that_does_not_exist_is_rank_lost_within_the_time_out(monkeypatch):
    launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500")
    begin = time.monotonic()
    with pytest.raises(rl.RankLost, match="no-such-host.invalid:29500 in [1-9].*: .*(not known|resolution)"):
        rl.init(timeout=1, device="cpu")
    assert 1 <= time.monotonic() - begin < AT_ONCE, "it may become known"


def test_others_that_never_come_are_rank_lost_within_the_time_out(monkeypatch):
    launched(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    begin = time.monotonic()
    with pytest.raises(rl.RankLost, match=r"rank 0: rank\(s\) 1 did not join the group within 1 s"):
        rl.init(timeout=1, device="cpu")
    assert time.monotonic() - begin < AT_ONCE


def test_a_port_in_use_is_said_to_be_in_use(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launched(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        with pytest.raises(rl.ConfigError, match=rf"rank 0 of 2: port {taken.getsockname()[1]} is in use .* set MASTER_PORT to another"):
            rl.init(timeout=2, device="cpu")


@pytest.mark.parametrize("cause", [RuntimeError("can't start new thread"), OSError(11, "Resource temporarily unavailable")])
def test_a_limit_of_threads_is_no_lost_rank(monkeypatch, cause):
    def refuse(thread):
        raise cause

    launched(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(rl.ConfigError, match=r"rank 0 of 2: this host starts no more threads .*\(ulimit -u\)"):
        rl.init(timeout=2, device="cpu")


def test_a_service_that_takes_the_connection_and_says_nothing_is_rank_lost_within_the_time_out(monkeypatch):
    """torch itself waits for it without end."""
    monkeypatch.setattr("rankloom.world.transport.ask.SLACK", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(foreign.getsockname()[1]))
        with pytest.raises(rl.RankLost, match="what answers there is not the store of a job"):
            rl.init(timeout=1, device="cpu")


def test_a_service_that_answers_something_else_is_said_to_be_no_store(monkeypatch):
    """torch asks again until the time-out, and then says what it had expected to read."""
    def answer():
        with suppress(OSError):   # in the end it is shut down
            while True:
                connection, _ = foreign.accept()
                with connection, suppress(OSError):
                    connection.sendall(b"220 mail.example.com ESMTP\r\n")
                    connection.recv(99)

    with socket.create_server(("127.0.0.1", 0)) as foreign:
        service = threading.Thread(target=answer)
        service.start()
        launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(foreign.getsockname()[1]))
        try:
            with pytest.raises(rl.RankLost, match="what answers there is not the store of a job"):
                rl.init(timeout=1, device="cpu")
        finally:
            foreign.shutdown(socket.SHUT_RDWR)
            service.join()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), 0, -1, 1e9])
def test_a_time_out_that_cannot_be_counted_is_refused(monkeypatch, timeout):
    def refused():
        return pytest.raises(rl.ConfigError, match=r"timeout = [-+\w]+: expected seconds above 0 and up to 2,000,000")

    with refused():
        rl.init(timeout=timeout, device="cpu")
    with refused():
        rl.simulate(2, bool, timeout=timeout)
    with refused():
        rl.spawn(2, bool, timeout=timeout)
    launched(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    with refused():
        rl.init(timeout=timeout, device="cpu")


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_meeting_point_is_named(monkeypatch, missing):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    launched(monkeypatch, **{name: value for name, value in env.items() if name != missing})
    with pytest.raises(rl.ConfigError, match=f"rank 0 of 2: {missing} must say where ranks meet"):
        rl.init(timeout=1, device="cpu")


@pytest.mark.parametrize("port", ["abc", "0", "65536"])
def test_a_port_that_is_none_is_named(monkeypatch, port):
    launched(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(rl.ConfigError, match=f"environment variable MASTER_PORT is '?{port}'?, expected"):
        rl.init(timeout=1, device="cpu")


def run_by_hand(body: Callable[[], Any]) -> list[Any]:
    """What `body` returns in two processes that have a launcher's variables and no launcher's store; rank 0 serves the meeting point."""
    rl.spawn(1, bool)   # starts the fork-server, from which processes have torch at once
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as pool:
        started = [pool.submit(with_variables, shared | {"RANK": rank, "LOCAL_RANK": rank}, body) for rank in "01"]
        return [rank.result(60) for rank in started]


def with_variables(variables: dict[str, str], body: Callable[[], Any]) -> Any:
    os.environ.update(variables)
    return body()


def meet_and_sum() -> tuple[int, ...]:
    world = rl.init(rl.Mesh(shard=2), device="cpu", timeout=30)
    total = world.group("shard").all_reduce(torch.tensor(world.rank + 1)).item()
    world.barrier()
    return world.rank, world.size, world.local_rank, world.local_size, total


def test_ranks_started_by_hand_with_a_launchers_variables_find_each_other():
    assert run_by_hand(meet_and_sum) == [(0, 2, 0, 2, 3), (1, 2, 1, 2, 3)]


def meet_under_mpirun(jobs: dict[str, str]) -> str | float:
    rank = os.environ.pop("RANK")
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_SIZE": os.environ.pop("WORLD_SIZE"),
                   "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": jobs[rank]}
    try:
        return rl.init(device="cpu", timeout=3 if jobs["0"] != jobs["1"] else 30).all_reduce(torch.ones(1)).item()
    except rl.RankLost as lost:
        return str(lost)


def test_ranks_of_two_jobs_that_were_given_one_meeting_point_do_not_take_each_other_for_their_own():
    assert run_by_hand(partial(meet_under_mpirun, {"0": "77", "1": "77"})) == [2.0, 2.0]
    told = run_by_hand(partial(meet_under_mpirun, {"0": "77", "1": "78"}))
    assert all(isinstance(each, str) and f"rank(s) {1 - rank} did not join" in each for rank, each in enumerate(told)), told


def meet_with_a_cluster_file_on_rank_1_only() -> str:
    with pytest.raises(rl.ConfigError) as refused:
        rl.init(device="cpu", timeout=AT_ONCE, topology="cluster.toml" if os.environ["RANK"] == "1" else None)
    return str(refused.value)


def test_a_cluster_file_that_only_one_rank_was_given_is_told_on_all():
    told = "rank 1 was given another program than rank 0: topology is a file, on rank 0 left out; give all ranks the same"
    assert run_by_hand(meet_with_a_cluster_file_on_rank_1_only) == [told] * 2


def meet_twice() -> tuple[int, float]:
    """Rank 1 is there for the second world while rank 0 has not closed the first."""
    for _ in range(2):
        world = rl.init(device="cpu", timeout=60)
        total = world.all_reduce(torch.ones(1)).item()
        time.sleep(0.0 if world.rank else 1.0)
        world.close()
        rank = world.rank
        del world
    return rank, total


def test_a_rank_that_is_quick_to_build_the_next_world_waits_for_the_one_that_serves_the_meeting_point():
    assert run_by_hand(meet_twice) == [(0, 2.0), (1, 2.0)]


def meet_after_restarts() -> float:
    """torchrun counts for each node those restarts that its own ranks have caused."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    return rl.init(device="cpu", timeout=20).all_reduce(torch.ones(1)).item()


def test_ranks_whose_nodes_count_other_restarts_meet():
    assert run_by_hand(meet_after_restarts) == [2.0, 2.0]


TWICE = """
import torch
import rankloom as rl
sums = []
for backend in ("rankloom", "rankloom", "gloo"):
    world = rl.init(timeout=80, device="cpu", backend=backend)
    sums.append(world.all_reduce(torch.ones(1)).item())
    world.close()
print(f"{world.rank} {sums}\\n", end="", flush=True)   # in one piece
"""


def test_a_world_can_be_closed_and_built_again_in_the_same_processes(tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
               "127.0.0.1:0", "--log-dir", "logs", "twice.py"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert {"0 [2.0, 2.0, 2.0]", "1 [2.0, 2.0, 2.0]"} <= set(done.stdout.splitlines()), done.stdout


AGENT = """
import os, subprocess, sys
rank = "import os, time; import rankloom as rl; rl.init(device='cpu'); open('rank', 'w').write(str(os.getpid())); time.sleep(300)"
subprocess.run([sys.executable, "-c", rank], env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job"})
"""


@pytest.mark.parametrize(("ending", "closed"), [
    ("", True),
    ("handle = world.all_gather(torch.ones(1 << 16), async_op=True)   # in messages, as of a gather ahead after the last step", True),
    ("world.send(torch.ones(1 << 16), 1 - world.rank, async_op=True); y = world.recv(torch.ones(1 << 16), 1 - world.rank)", True),
    ("handle = world.recv(x, 1 - world.rank, async_op=True)", False), ("raise ValueError('of the user')", False)])
def test_a_program_that_ends_closes_its_world_unless_others_may_be_waited_for(tmp_path, ending, closed):
    """torch's gloo aborts one such process in ten, unless it is closed before Python ends."""
    script = tmp_path / "forgets_to_close.py"
    script.write_text(f"""
import torch, rankloom as rl
import rankloom.world.join
rankloom.world.join.SECONDS_TO_END = 0.2 if {not closed} else 20
world = rl.init(rl.Mesh(replicate=2), backend="gloo", device="cpu", timeout=20)
x, close = torch.ones(2), world.close
world.close = lambda: (close(), print("closed", world._process_group))
world.all_reduce(x)
world.barrier()
{ending}
""")
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, str(script)], env=env | {"RANK": rank, "LOCAL_RANK": rank}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in "01"]
    said = [rank.communicate(timeout=STARTED)[0] for rank in ranks]
    assert said == (["closed None\n"] * 2 if closed else [""] * 2)
    assert ending or [rank.returncode for rank in ranks] == [0, 0]


def test_a_rank_of_torchrun_does_not_outlive_it(tmp_path):
    file = tmp_path / "rank"
    with subprocess.Popen([sys.executable, "-S", "-c", AGENT], cwd=tmp_path) as agent:
        wait_until(lambda: file.exists() and file.read_text(), STARTED)
        rank = psutil.Process(int(file.read_text()))
        agent.kill()
    wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
