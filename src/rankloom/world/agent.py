"""`launch_ranks`: start the ranks of a job on this host, watch them, end them together, and report which one failed first.

torch's elastic agent starts the processes and gives each its rank and a store to meet in. This file adds:

- Every rank is on a leash (leash.py): it cannot outlive this process, however this process ends.
- Sockets listen on loopback only, on a port that the system chose.
- When a rank fails, the others have some seconds to notice and to end by themselves, which tells cause from consequence;
  then they get SIGTERM, and SIGKILL after a grace period. torch's agent sends SIGTERM at once, and SIGKILL after 30 seconds.
- SIGINT and SIGTERM are forwarded to the ranks once, so that they can end cleanly; a second signal, a second later or more, kills them.
- When all ranks have ended, verdict.py picks the cause; the agent's own log messages go to launcher.log.

The agent runs in a thread, so that only this file handles signals. Read verdict.py for the causes.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rankloom.base.errors import ConfigError
from rankloom.world.connect import LOOPBACK
from rankloom.world.failure import read_failure
from rankloom.world.launch import rank_environment
from rankloom.world.leave import ONE_REQUEST, handling_stop_signals
from rankloom.world.open_files import make_room
from rankloom.world.rank_logs import RankLogs, chatter_in
from rankloom.world.verdict import CLEAN_CODES, Ending, explain

LEASH = Path(__file__).with_name("leash.py")
TICK = 0.05            # seconds between two checks of the ranks
SETTLE = 1.0           # seconds for the other ranks to end by themselves when the cause is known
PATIENCE = 5.0         # the same when it is only known that a rank lost another: the failing process may take long to end
FAILURE_GRACE = 5.0    # seconds from SIGTERM to SIGKILL when a rank failed: there is nothing left to save
GRACE = 60.0           # the same when the user asked to stop: the ranks finish their step, save the weights and draw the loss
STOPPED_GRACE = 300.0  # seconds for a stopped rank to continue when all others are done: the time that ranks wait for each other


def launch_ranks(ranks: int, command: list[str], *, log_dir: Path, deterministic: bool = False, grace: float = GRACE) -> int:
    """Run `command` as `ranks` processes of this host, which find each other as under torchrun; wait for all of them.

    Rank 0 uses this process's terminal; its stderr is also written to `log_dir`/rank-0.stderr.log. The output of the other
    ranks goes to files beside that one. `command` reports why it fails with launch.record_failure.

    grace:   seconds for the ranks to end cleanly after Ctrl-C or SIGTERM
    returns: 0 when all ranks succeeded; 128 + the number of the signal that stopped them
    raises:  RankFailed with a box that names the cause; or the error itself, if the user can fix it and all ranks raised it alike
    """
    if ranks < 1:
        raise ConfigError(f"the number of ranks is {ranks}, expected 1 or more")
    make_room(16 + 4 * ranks, f"a launcher of {ranks} ranks")   # the store with a connection from each rank, and the logs
    with _scratch() as failures:
        return _run_ranks(ranks, command, RankLogs(log_dir, failures, rank_environment(ranks, deterministic=deterministic)), grace)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for the failure files. Not beside the logs: a rank may fail because that disk is full."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="rankloom-")
    except OSError as error:
        raise ConfigError(f"no temporary folder can be made ({error.strerror}); name one in TMPDIR") from None
    with folder as name:
        yield Path(name)


def _run_ranks(ranks: int, command: list[str], logs: RankLogs, grace: float) -> int:
    words = ["-I", "-S", str(LEASH), str(os.getpid()), *command]
    spec = WorkerSpec(
        role="", local_world_size=ranks, entrypoint=sys.executable, args=tuple(word.replace("$", "$$") for word in words),
        rdzv_handler=_Meeting(), max_restarts=0, monitor_interval=TICK, master_addr=LOOPBACK,
    )
    stop = StopRequests()
    with chatter_in(logs.folder / "launcher.log"), handling_stop_signals(stop.note), futures.ThreadPoolExecutor(1) as thread:
        agent = _Agent(spec, logs, stop, grace)
        running = thread.submit(agent.run)
        try:
            while not futures.wait([running], TICK).done:   # a signal that the system hands to another thread does not end a wait here
                pass
            running.result()
        finally:
            agent.give_up()   # no rank is left then, unless waiting for them was interrupted
    code = conclude(agent.watch.endings(logs), stop.number)
    logs.tidy()
    return code


def conclude(endings: list[Ending], stop_signal: int = 0) -> int:
    """The exit code of a job whose ranks ended like this; raises the error of `verdict.explain` if it failed.

    stop_signal: the signal that asked the launcher to stop, or 0. After one, only an error counts that a rank reported as its own.
    """
    errors = [e for e in endings if e.failure and not (stop_signal and e.failure.is_collateral)]
    codes, hung = {ending.code for ending in endings}, any(ending.hung for ending in endings)
    if not errors and stop_signal and not hung:
        return 128 + stop_signal
    if not errors and codes <= CLEAN_CODES and (stop_signal or not hung):
        return max(codes)   # the ranks may have agreed to stop because one of them got a signal
    raise explain(endings, width=min(shutil.get_terminal_size((100, 24)).columns, 120))


class StopRequests:
    """How often this process was asked to stop (world/leave.py); `number` is the first signal that did."""

    def __init__(self) -> None:
        self.number, self.count = 0, 0
        self._until = 0.0   # signals up to then belong to the last request

    def note(self, number: int, frame: FrameType | None) -> None:
        """One more signal."""
        if (now := time.monotonic()) > self._until:
            self.count, self._until = self.count + 1, now + ONE_REQUEST
        self.number = self.number or number


class Limit(NamedTuple):
    """What makes the ranks' time run out: this moment, or more requests to stop than so many."""

    until: float
    requests: int


class RankWatch:
    """The processes of the ranks: which still run, how the others ended, and how to end them all.

    The ranks work -> they are asked to end (SIGTERM, or the user's signal) -> they are killed. `tick` moves from one state to the next.
    """

    def __init__(self, processes: dict[int, subprocess.Popen], files: dict[int, Path], stop: StopRequests, grace: float):
        self.running, self.files = dict(processes), files
        self.stop, self.grace = stop, grace
        self.alive_at = dict.fromkeys(processes, time.monotonic())   # when each was last seen alive
        self.codes: dict[int, int] = {}
        self.end_after = float("inf")              # when to ask them to end, once a failure was seen
        self.asked_ranks: set[int] = set()         # those that still ran when they were asked to end
        self.ended_for_failure_at = float("inf")   # when they were asked, if a failure was the reason
        self.limit = Limit(float("inf"), 0)        # past it they are killed
        self.hung: dict[int, str] = {}
        self.last_active = time.monotonic()        # when a rank ran that was not stopped, or no rank had ended; see `_waits_in_vain`

    def tick(self) -> bool:
        """Check every process, and end those that should have ended; returns whether any still runs."""
        now = time.monotonic()
        for rank, process in list(self.running.items()):
            self._look(rank, process, now)
        if not self.running:
            return False
        is_late = now > self.limit.until
        if self.asked_ranks and (is_late or self.stop.count > self.limit.requests):
            self.kill("did not end when asked to: it hangs in a call that does not return" if is_late else "")
        elif not self.asked_ranks and self.stop.count:
            self._ask(self.stop.number, now + self.grace)
        elif not self.asked_ranks and (now > self.end_after or self._waits_in_vain(now)):
            self.ended_for_failure_at = now
            self._ask(signal.SIGTERM, now + FAILURE_GRACE)
        return True

    def kill(self, reason: str = "") -> None:
        """Send SIGKILL to all ranks that still run. reason: what each of them did wrong, if anything."""
        for rank, process in self.running.items():
            if reason:
                self.hung.setdefault(rank, reason)
            _kill_group(process)

    def endings(self, logs: RankLogs) -> list[Ending]:
        """How every rank ended, with its failure and its log."""
        return [self._ending(rank, logs) for rank in sorted(self.codes)]

    def _look(self, rank: int, process: subprocess.Popen, now: float) -> None:
        code = process.poll()
        if code is None:
            self.alive_at[rank] = now
        else:
            self.codes[rank] = code
            del self.running[rank]
        failure = read_failure(self.files[rank])
        if failure or code not in CLEAN_CODES | {None}:
            self.end_after = min(self.end_after, now + (PATIENCE if failure and failure.is_collateral else SETTLE))
            if code is not None:
                _kill_group(process)   # the helper processes that it left behind

    def _waits_in_vain(self, now: float) -> bool:
        """Whether all ranks that still run are stopped, and a rank has failed, or all others were done long ago. Else it notes the time."""
        failed = self.end_after < float("inf")
        if (failed or self.codes) and all(_is_stopped(process.pid) for process in self.running.values()):
            return failed or now - self.last_active > STOPPED_GRACE
        self.last_active = now
        return False

    def _ask(self, number: int, until: float) -> None:
        self.asked_ranks, self.limit = set(self.running), Limit(until, self.stop.count)
        for rank, process in self.running.items():
            if _is_stopped(process.pid):
                self.hung[rank] = "it was stopped (SIGSTOP, or Ctrl-Z) and did not go on"
            process.send_signal(number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGTERM)
            process.send_signal(signal.SIGCONT)   # a stopped process does not handle the first signal

    def _ending(self, rank: int, logs: RankLogs) -> Ending:
        failure = read_failure(self.files[rank])
        if failure:
            logs.add_traceback(rank, failure.traceback)
        late = failure.time > self.ended_for_failure_at if failure else rank in self.asked_ranks
        return Ending(rank, self.codes[rank], failure.time if failure else self.alive_at[rank], asked=late,
                      hung=self.hung.get(rank, ""), failure=failure, log=logs.worth_reading(rank))


def _kill_group(process: subprocess.Popen) -> None:
    """Send SIGKILL to a rank and the processes that it started: every rank leads a process group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()   # does nothing if it has ended


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


# ---------------------------------------------------------------- what torch's agent needs from us


class _Agent(LocalElasticAgent):
    """torch's agent, but RankWatch ends the ranks."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, stop: StopRequests, grace: float):
        # The template is empty, so that rank 0's stderr reaches the terminal unchanged.
        super().__init__(spec, logs, log_line_prefix_template="${role_name}")
        self.logs, self.stop, self.grace = logs, stop, grace
        self.watch = RankWatch({}, {}, stop, grace)
        self.given_up = False

    def give_up(self) -> None:
        """Send SIGKILL to all ranks that run, and to those that are being started."""
        self.given_up = True
        self.watch.kill()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        handlers = self._pcontext.subprocess_handlers   # type: ignore[union-attr]
        processes = {rank: handler.proc for rank, handler in handlers.items()}
        files = {rank: self.logs.failure(rank) for rank in processes}
        self.watch = RankWatch(processes, files, self.stop, self.grace)
        if self.given_up:
            self.watch.kill()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.watch.tick():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        self.watch.kill()   # every way out of run() calls this; normally no rank is left
        super()._shutdown(*args, **kwargs)


class _Meeting(RendezvousHandler):
    """The rendezvous of a single agent, and the store for its ranks."""

    def __init__(self) -> None:
        try:
            listener = socket.create_server((LOOPBACK, 0))
            socket.create_connection(listener.getsockname(), SETTLE).close()   # where it is down, a port opens and cannot be reached
        except OSError as error:
            raise ConfigError(f"ranks of this host meet at {LOOPBACK}, which cannot be reached ({error}); is the loopback interface up, "
                              "and has it this address (ip addr show lo)?") from error
        self.port, self.job = listener.getsockname()[1], uuid.uuid4().hex
        # A TCPStore listens on every interface unless it is given a socket. The store owns the socket from here on.
        self.store = dist.TCPStore(LOOPBACK, self.port, is_master=True, wait_for_workers=False,
                                   master_listen_fd=listener.detach())

    def next_rendezvous(self) -> RendezvousInfo:
        """This is agent 0 of 1."""
        return RendezvousInfo(dist.PrefixStore("agent", self.store), 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too."""
        return True

    def get_backend(self) -> str:
        """A name for torch's records."""
        return "rankloom"

    def get_run_id(self) -> str:
        """A unique name for the job."""
        return self.job

    def is_closed(self) -> bool:
        """Never: it stays open as long as the agent lives."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Always 0: no other agent joins."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with this object."""
        return True
