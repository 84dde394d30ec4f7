"""`launch_ranks`: real processes of this host that fail, hang, are killed and are told to stop; none may survive.

Where a test is about processes only, its ranks are plain scripts: those start in no time. Ranks with a world cost the
import of torch, so there are few of them.
"""

import errno
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

import rankloom as rl
from patience import AT_ONCE, STARTED, wait_until
from rankloom.world import agent
from rankloom.world.agent import RankWatch, StopRequests, _Meeting, conclude, launch_ranks
from rankloom.world.launch import rank_environment
from rankloom.world.verdict import Ending

# A job of real ranks: a custom backward, so that its error comes from inside autograd, then an all-reduce per step.
JOB = """
import os, signal, sys, time
import torch
import rankloom as rl
from rankloom.world.launch import report_uncaught

report_uncaught()
fault, timeout = sys.argv[1], float(sys.argv[2])
open("here-" + os.environ["RANK"], "w").close()
while not os.path.exists("here-0") or not os.path.exists("here-1"):   # a short time-out must not begin with an import
    time.sleep(0.01)
world = rl.init(timeout=timeout, device="cpu")
victim = world.rank == 1

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        if victim and fault == "raise" and step == 2:
            raise ZeroDivisionError("no more steps")   # THE LINE
        return 2 * grad

for step in range(100):
    x = torch.ones(3, requires_grad=True)
    if step == 2 and victim and fault in ("SIGKILL", "SIGSTOP"):
        open("struck", "w").close()
        os.kill(os.getpid(), signal.Signals[fault])
    Double.apply(x).sum().backward()
    world.all_reduce(x.grad, label="gradients")
"""
LAUNCHER = """
import sys
from pathlib import Path
from rankloom.base.errors import RankloomError
from rankloom.world.agent import launch_ranks
try:
    sys.exit(launch_ranks(2, [sys.executable, *sys.argv[1:]], log_dir=Path("logs")))
except RankloomError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder is empty; no process that a test started survives it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = {child.pid for child in psutil.Process().children()}
    yield tmp_path
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline())]


def launch(body, *words, ranks=2, grace=20.0):
    """Run a script as ranks of this process."""
    Path("job.py").write_text(body)
    return launch_ranks(ranks, [sys.executable, "job.py", *words], log_dir=Path("logs"), grace=grace)


def line_of(text, body=JOB):
    return 1 + next(i for i, line in enumerate(body.splitlines()) if text in line)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------- ranks with a world


def test_an_error_inside_backward_is_the_last_thing_on_the_screen_with_rank_file_and_line():
    Path("job.py").write_text(JOB)
    done = subprocess.run([sys.executable, "-c", LAUNCHER, "job.py", "raise", "60"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 1
    lines = done.stdout.rstrip().splitlines()
    assert lines[0] == "error: rank 1 of 2 failed first", "neither a traceback nor the agent's own talk before it"
    assert lines[1].startswith("\u256d\u2500 rank 1 of 2 on host ") and lines[-1].startswith("\u2570")
    assert "ZeroDivisionError: no more steps" in done.stdout
    assert f"job.py:{line_of('THE LINE')} in backward" in done.stdout
    assert "stopped  because of it: rank 0" in done.stdout and "logs/rank-1.stderr.log" in done.stdout
    assert "ZeroDivisionError: no more steps" in Path("logs/rank-1.stderr.log").read_text()


def test_a_killed_rank_is_the_cause_and_memory_is_hinted_at(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(rl.RankFailed, match="rank 1 of 2 failed first") as failed:
        launch(JOB, "SIGKILL", "60")
    assert failed.value.rank == 1
    assert "by SIGKILL. Nothing here sent it: the kernel does that when memory runs out" in str(failed.value)
    assert "logs/rank-1.stderr.log" in str(failed.value) and Path("logs/rank-1.stderr.log").exists()
    assert "rank 0   RankLost: rank 0: gradients" in str(failed.value)


def test_a_stopped_rank_ends_the_job_within_the_time_out():
    with pytest.raises(rl.RankFailed) as failed:
        launch(JOB, "SIGSTOP", "5")
    assert 0 < time.time() - Path("struck").stat().st_mtime < 5 + AT_ONCE
    assert failed.value.rank == 1, "not rank 0, which only waited for it"
    assert "it was stopped (SIGSTOP, or Ctrl-Z)" in str(failed.value)
    assert "rank 0   CollectiveTimeout: rank 0: gradients" in str(failed.value)


# ---------------------------------------------------------------- plain processes


def test_ranks_learn_their_place_and_their_share_of_the_cores_and_write_to_their_logs(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    body = f"import os, sys; print(*[os.environ[n] for n in {names}], sys.argv[1:]); print('oh', file=sys.stderr)"
    assert launch(body, "$HOME", "$$", "${local_rank}", ranks=3) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    for rank in (1, 2):
        written = Path(f"logs/rank-{rank}.stdout.log").read_text().strip()
        assert written == f"{rank} {rank} 3 127.0.0.1 {threads} ['$HOME', '$$', '${{local_rank}}']"
    assert [Path(f"logs/rank-{rank}.stderr.log").read_text() for rank in range(3)] == ["oh\n"] * 3
    assert not Path("logs/rank-0.stdout.log").exists(), "rank 0 writes to the terminal"


def test_the_environment_of_the_ranks_leaves_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "OMP_NUM_THREADS" not in rank_environment(1000)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert rank_environment(1000)["OMP_NUM_THREADS"] == "1"
    assert "CUBLAS_WORKSPACE_CONFIG" not in rank_environment(2)
    assert rank_environment(2, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_rank_0_has_the_terminal_and_its_errors_are_shown_live_and_logged():
    Path("job.py").write_text("import sys; print('a terminal:', sys.stdout.isatty()); print('a warning', file=sys.stderr)")
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", LAUNCHER, "job.py"], stdin=theirs, stdout=theirs, stderr=theirs, check=False)
    screen = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0
    assert sorted(screen.splitlines()) == ["a terminal: True", "a warning"], "and nothing else"
    assert Path("logs/rank-0.stderr.log").read_text() == "a warning\n"
    assert Path("logs/rank-1.stdout.log").read_text() == "a terminal: False\n"


def test_a_rank_that_ends_early_does_not_stop_the_others():
    body = "import os, time; os.environ['RANK'] == '0' and (time.sleep(1.5), open('late', 'w'))"
    assert launch(body) == 0
    assert Path("late").exists()


def test_a_rank_that_fails_without_a_word_is_shown_with_the_end_of_its_log():
    body = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the disk is gone')\ntime.sleep(60)"
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed) as failed:
        launch(body)
    assert failed.value.rank == 1 and time.monotonic() - begin < AT_ONCE
    assert "with exit code 1" in str(failed.value) and "the disk is gone" in str(failed.value)


def test_a_rank_that_somebody_stops_while_it_starts_is_the_cause_at_once():
    """In the middle of its imports; it has not joined, so the others would wait for it until the time-out."""
    body = """
import os, signal, time
from rankloom.world.leave import leaving_on_signals
with leaving_on_signals(as_killed=True):
    if os.environ['RANK'] == '1':
        signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed, match="SIGTERM") as failed:
        launch(body)
    assert failed.value.rank == 1 and time.monotonic() - begin < AT_ONCE


def test_an_error_that_was_told_counts_although_its_process_does_not_end():
    body = """
import os, time
from rankloom.world.launch import record_failure
if os.environ['RANK'] == '1':
    record_failure(KeyError('lost'))
time.sleep(60)
"""
    with pytest.raises(rl.RankFailed, match="KeyError: 'lost'") as failed:
        launch(body)
    assert failed.value.rank == 1


TOLD = """
import os, sys, time
import rankloom as rl
from rankloom.world.launch import record_failure
rank = os.environ['RANK']
open('here-' + rank, 'w').close()
while not all(os.path.exists(f'here-{other}') for other in range(int(os.environ['WORLD_SIZE']))):   # imports take as long as they like
    time.sleep(0.01)
time.sleep(0.3 * int(rank))
"""


def test_a_rank_that_leaves_too_early_with_exit_code_0_is_the_cause():
    body = TOLD + "if rank == '1': sys.exit(record_failure(rl.RankLost('rank 1: gradients lost its connection')))"
    with pytest.raises(rl.RankFailed, match="rank 0 of 2 failed first") as failed:
        launch(body)
    assert "with exit code 0, while other ranks still needed it" in str(failed.value)
    assert "rank 1   RankLost: rank 1: gradients lost its connection" in str(failed.value)


def test_a_cause_that_takes_longer_to_end_than_its_consequence_is_waited_for():
    body = TOLD + """
if rank == '0':
    sys.exit(record_failure(rl.RankLost('rank 0: gradients lost its connection')))
time.sleep(2)   # longer than SETTLE
sys.exit(3)
"""
    with pytest.raises(rl.RankFailed, match="rank 1 of 2 failed first"):
        launch(body)


def test_a_mistake_of_the_user_that_all_ranks_report_is_raised_as_it_is(monkeypatch):
    monkeypatch.setattr("rankloom.world.agent.SETTLE", AT_ONCE)
    with pytest.raises(rl.ConfigError, match=r"^rank 0: the mistake of the user$"):
        launch(TOLD + """
while rank == '1' and not os.path.exists('told-0'):
    time.sleep(0.01)
is_shown = record_failure(rl.ConfigError(f'rank {rank}: the mistake of the user'))
open('told-' + rank, 'w').close()
sys.exit(is_shown)
""")
    assert "ConfigError: rank 1: the mistake of the user" in Path("logs/rank-1.stderr.log").read_text()


def test_an_error_while_ranks_stop_is_not_lost():
    body = CLEAN.replace("sys.exit(128 + number)", """
    from rankloom.world.launch import record_failure
    sys.exit(record_failure(OSError('the disk is full')))""")
    with pytest.raises(rl.RankFailed, match="OSError: the disk is full"):
        launch(body, str(int(signal.SIGTERM)))


def test_a_rank_that_cannot_write_beside_its_logs_still_tells_why_it_fails():
    """As on a full disk, which may be the very reason."""
    body = TOLD + "import shutil; shutil.rmtree('logs'); sys.exit(record_failure(OSError('the disk is full')))"
    with pytest.raises(rl.RankFailed, match="OSError: the disk is full"):
        launch(body, ranks=1)


def test_an_error_that_names_a_file_of_any_bytes_is_told_and_logged():
    """A name in Latin-1 is no text in UTF-8: Python reads it with half a surrogate pair for each byte that is none."""
    body = TOLD + r"sys.exit(record_failure(rl.DataError('caf\udce9.txt: not UTF-8')))"
    with pytest.raises(rl.DataError, match="^caf\udce9.txt: not UTF-8$"):
        launch(body)
    assert r"caf\udce9.txt" in Path("logs/rank-1.stderr.log").read_text()


def test_where_no_temporary_folder_can_be_made_it_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(rl.ConfigError, match="no temporary folder can be made .* name one in TMPDIR"):
        launch("")


def test_a_command_that_cannot_be_started_is_an_error_with_its_name():
    with pytest.raises(rl.RankFailed, match="cannot start no-such-program: No such file"):
        launch_ranks(2, ["no-such-program"], log_dir=Path("logs"))


def test_helpers_of_a_rank_that_was_killed_end_with_it():
    body = """
import os, subprocess, sys, time
if os.environ['RANK'] == '1':
    helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    open('helper', 'w').write(str(helper.pid))
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    with pytest.raises(rl.RankFailed):
        launch(body)
    wait_until(lambda: gone(int(Path("helper").read_text())))


CLEAN = """
import os, signal, sys, time
def stop(number, frame):
    time.sleep(0.3)
    open('clean-' + os.environ['RANK'], 'w').write(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open('ready-' + os.environ['RANK'], 'w').close()
if os.environ['RANK'] == '0':
    while not os.path.exists('ready-1'):
        time.sleep(0.01)
    os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_is_passed_on_and_the_ranks_end_cleanly(number, code):
    handler = signal.getsignal(number)
    begin = time.monotonic()
    assert launch(CLEAN, str(int(number))) == code
    assert time.monotonic() - begin < AT_ONCE
    passed = signal.SIGTERM if number == signal.SIGHUP else number
    assert [Path(f"clean-{rank}").read_text() for rank in (0, 1)] == [str(int(passed))] * 2
    assert signal.getsignal(number) is handler, "the handler of before is back"


def test_ranks_that_agreed_to_stop_are_no_failure():
    assert launch("import sys; sys.exit(143)") == 143
    assert not list(Path("logs").glob("rank-*")), "nothing was written, so nothing is left"


def test_no_rank_outlives_a_launcher_that_was_interrupted_by_an_exception():
    def interrupt(number, frame):
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(InterruptedError, match="enough"):
            launch("import os, time; os.environ['RANK'] == '0' and os.kill(os.getppid(), 10); time.sleep(60)")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nor_does_one_that_was_being_started_then(monkeypatch):
    """The launcher is interrupted after the processes are there, and before anybody has looked at them."""
    def interrupt(number, frame):
        raise InterruptedError("enough")

    class Late(RankWatch):
        def __init__(self, processes, *args):
            if processes:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.3)
            super().__init__(processes, *args)

    monkeypatch.setattr(agent, "RankWatch", Late)
    before, begin = signal.signal(signal.SIGUSR1, interrupt), time.monotonic()
    try:
        with pytest.raises(InterruptedError, match="enough"):
            launch("import time; time.sleep(60)")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - begin < AT_ONCE


DEAF = """
import os, signal, sys, time
from rankloom.world.leave import ONE_REQUEST
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))   # and that is all
open('ready-' + os.environ['RANK'], 'w').close()
if os.environ['RANK'] == '0':
    while not os.path.exists('ready-1'):
        time.sleep(0.01)
    for signals in range(int(sys.argv[1])):
        time.sleep(signals * (ONE_REQUEST + 0.01))
        os.kill(os.getppid(), signal.SIGTERM)
        while not heard:   # two signals that wait for a launcher that stands still would become one
            time.sleep(0.01)
time.sleep(60)
"""


def test_signals_of_one_second_are_one_request(monkeypatch):
    """A scheduler may signal the processes of a job one by one, and the group that they are in."""
    now, stop = [100.0], StopRequests()
    monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])
    counts = []
    for now[0] in (100.0, 100.1, 101.0, 101.1, 101.2):
        stop.note(signal.SIGTERM, None)
        counts.append(stop.count)
    assert counts == [1, 1, 1, 2, 2] and stop.number == signal.SIGTERM


def test_ranks_that_do_not_listen_are_killed_at_the_second_signal():
    begin = time.monotonic()
    assert launch(DEAF, "2", grace=60.0) == 143
    assert time.monotonic() - begin < AT_ONCE


def test_ranks_that_do_not_listen_are_killed_after_the_grace_and_that_is_told():
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed, match="did not end when asked to"):   # what they would have saved is lost
        launch(DEAF, "1", grace=1.0)
    assert time.monotonic() - begin < AT_ONCE


def test_a_signal_that_the_system_hands_to_another_thread_stops_the_ranks():
    """It does so where the launcher was stopped when the signal came, for one. The main thread's wait does not end by that."""
    def pass_on():
        wait_until(Path("ready-1").exists, STARTED)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    other = threading.Thread(target=pass_on)
    other.start()
    begin = time.monotonic()
    assert launch("import os, time; open('ready-' + os.environ['RANK'], 'w').close(); time.sleep(60)") == 143
    assert time.monotonic() - begin < AT_ONCE
    other.join()


def test_a_rank_that_does_not_listen_after_a_failure_is_killed(monkeypatch):
    monkeypatch.setattr("rankloom.world.agent.FAILURE_GRACE", 0.5)
    body = DEAF.replace("time.sleep(60)", "time.sleep(60 * (os.environ['RANK'] == '0')); os.kill(os.getpid(), 11)")
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed, match="by SIGSEGV") as failed:
        launch(body, "0")
    assert failed.value.rank == 1 and time.monotonic() - begin < AT_ONCE


def test_a_stopped_rank_that_nobody_waits_for_does_not_keep_the_launcher(monkeypatch):
    monkeypatch.setattr("rankloom.world.agent.STOPPED_GRACE", 1.0)
    begin = time.monotonic()
    with pytest.raises(rl.RankFailed, match=r"(?s)rank 1 of 2 failed first.*it was stopped \(SIGSTOP, or Ctrl-Z\)"):
        launch("import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 19)")
    assert 1 < time.monotonic() - begin < AT_ONCE


def test_ranks_that_are_all_stopped_are_left_in_peace(monkeypatch):
    """Whoever stops a whole job wants it to go on later."""
    monkeypatch.setattr("rankloom.world.agent.STOPPED_GRACE", 0.0)
    ranks = {rank: subprocess.Popen(["sleep", "60"], start_new_session=True) for rank in (0, 1)}
    watch = RankWatch(ranks, {rank: Path("none") for rank in ranks}, StopRequests(), 1.0)
    for process in ranks.values():
        process.send_signal(signal.SIGSTOP)
    wait_until(lambda: all(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED for process in ranks.values()))
    assert watch.tick() and watch.tick() and not watch.asked_ranks
    watch.kill()
    assert [process.wait() for process in ranks.values()] == [-9, -9]


def test_ranks_end_when_their_launcher_is_killed():
    Path("job.py").write_text("import os, time; open(os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)")
    scratch = os.environ | {"TMPDIR": os.getcwd()}   # a launcher that is killed leaves its folder
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, "job.py"], env=scratch) as child:
        wait_until(lambda: all(Path(name).exists() and Path(name).read_text() for name in "01"), STARTED)
        pids = [int(Path(name).read_text()) for name in "01"]
        assert not any(map(gone, pids))
        child.kill()
    wait_until(lambda: all(map(gone, pids)))


def test_the_meeting_point_is_on_loopback_only_and_its_port_is_free_afterwards():
    meeting = _Meeting()
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == meeting.port]
    assert set(listening) == {"127.0.0.1"}
    port = meeting.port
    del meeting
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)), "nobody listens"


def test_a_log_folder_that_cannot_be_made_is_an_error_that_names_it():
    Path("file").write_text("")
    with pytest.raises(rl.ConfigError, match="file/logs"):
        launch_ranks(1, ["true"], log_dir=Path("file/logs"))


@pytest.mark.parametrize(("codes", "stop_signal", "code"), [
    ((0, 0), 0, 0), ((143, 143), 0, 143), ((0, 130), 0, 130), ((-15, -15), 15, 143), ((-9, 130), 2, 130), ((0, 0), 15, 143),
])
def test_the_exit_code_of_a_job_that_did_not_fail(codes, stop_signal, code):
    assert conclude([Ending(rank, c, 0.0) for rank, c in enumerate(codes)], stop_signal) == code


def test_a_stopped_rank_that_ctrl_c_woke_up_is_no_failure():
    assert conclude([Ending(0, 130, 0.0, asked=True), Ending(1, 130, 0.0, asked=True, hung="it was stopped")], 2) == 130


@pytest.mark.parametrize(("call", "why"), [("create_server", errno.EADDRNOTAVAIL), ("create_connection", errno.ENETUNREACH)])
def test_a_host_without_a_loopback_is_told_so(monkeypatch, call, why):
    """Another address only; or down: then a port opens that cannot be reached."""
    def refuse(*_):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(agent.socket, call, refuse)
    with pytest.raises(rl.ConfigError, match=f"which cannot be reached .*{os.strerror(why)}.*; is the loopback interface up"):
        _Meeting()
