"""`spawn(n, body)`: run ranks as processes of this host, which end together.

A fork-server that has imported torch once starts the processes: after the first call, a rank starts in tens of milliseconds.
`body` and its result are pickled, so define `body` at the top of a module.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from rankloom.base.errors import ConfigError, RankFailed
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import seconds
from rankloom.world.connect import AUTO, LOOPBACK, device_for, expect_room_here
from rankloom.world.failure import bare_failure, raisable, signal_name, text_of
from rankloom.world.launch import debug_mode
from rankloom.world.open_files import make_room
from rankloom.world.world import World, as_mesh

T = TypeVar("T")
SETTLE = 1.0  # seconds to wait for the cause, after a rank has reported that it lost another
OR = "or use rl.simulate, which runs ranks as threads"
GRACE = 5.0   # seconds for a rank to end, before SIGKILL
TICK = 1.0    # how often Python may run signal handlers: a signal that the system gives to another thread does not wake the main thread


def spawn(ranks: int | Mesh, body: Callable[[World], T], *, timeout: float = 300.0, backend: str = AUTO,
          device: str = "cpu") -> list[T]:
    """Run `body(world)` in processes of this host, one for each rank. Returns their results in rank order.

    The processes import the program: call this under `if __name__ == "__main__":`.
    When a rank raises, the others are ended, and its exception is raised here with its traceback as a note. If a rank dies
    without an exception (a signal, os._exit), by sys.exit, or after it has sent its result, this raises RankFailed.
    timeout: seconds after which a silent peer counts as lost
    backend: "gloo", "rankloom" (shared memory), or "auto": shared memory, except where each rank has a GPU of its own
    device:  "cpu" or "cuda"; with more ranks than GPUs, several share one
    raises:  ConfigError if `body` cannot be pickled, if the processes cannot find it, or for more ranks than the backend has room for, or
             this process may have open files
    """
    mesh, patience = as_mesh(ranks), seconds(timeout)
    if multiprocessing.current_process().daemon:
        raise ConfigError(f"spawn: this process is a rank that spawn has started, and cannot start others; start all at once, {OR}")
    expect_room_here(mesh.size, backend)
    work = _pickled(body)
    make_room(16 + 4 * mesh.size, f"spawn of {mesh.size} ranks")   # the store, and of each rank its connection to it and three pipes
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # A store listens on every interface unless it is given a socket. This one is bound to loopback; the store owns it from here on.
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=patience,
                          master_listen_fd=listener.detach())
    join = partial(_join, port, ranks, timeout=timeout, backend=backend, device=device, debug=debug_mode())
    children: list[Child] = []
    try:
        for rank in range(mesh.size):
            children.append(_start(rank, work, join))
        results = _collect(children, mesh.size)
    except BaseException:
        for process, _ in children:
            if process.is_alive():
                process.terminate()
        raise
    finally:
        codes = _end(children)
        del store
    for rank, code in enumerate(codes):
        if code:
            raise RankFailed(f"rank {rank} of {mesh.size} gave its result, and did not end well: {_how_it_ended(code)}", rank=rank)
    return results


def _pickled(body: Callable[[World], T]) -> bytes:
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise ConfigError(f"spawn: its processes read the program again, and this one came from standard input; save it as a file, {OR}")
    try:
        return pickle.dumps(body)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"spawn: {body!r} cannot be sent to another process ({error}); define it at the top of a module, {OR}") from error


class Answer(NamedTuple):
    """What a rank sends when its body has ended, pickled."""

    ok: bool
    value: Any   # what the body returned, or raised
    trace: str   # of what it raised


class Child(NamedTuple):
    """A rank, as its parent knows it."""

    process: Any
    pipe: multiprocessing.connection.Connection


Join = Callable[[int], World]


def _start(rank: int, work: bytes, join: Join) -> Child:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rankloom.world.preload"])
    ours, theirs = context.Pipe(duplex=True)
    with theirs:
        process = context.Process(target=_child, args=(theirs, work, join, rank), daemon=True, name=f"rank-{rank}")
        try:
            process.start()
        except RuntimeError as error:   # multiprocessing's own message is half a page long
            if "bootstrapping" not in str(error):
                raise
            raise ConfigError("spawn: every spawned process reads the program's file, and would spawn others there; put the call under "
                              "`if __name__ == \"__main__\":`") from None
    return Child(process, ours)


def _child(pipe: multiprocessing.connection.Connection, work: bytes, join: Join, rank: int) -> None:
    """Run in a spawned process: join the world, run the body, send an `Answer`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)   # Ctrl-C reaches the parent, which ends its children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    world = None
    try:
        body = _found(work)
        world = join(rank)
        answer = _pickled_result(rank, body(world))
        world.leave()
    except BaseException as error:   # sent to the parent, which raises it
        answer = _pickled_failure(rank, error)
    pipe.send_bytes(answer)
    # A slower rank may still read from this one: stay until the parent says that all ranks are done.
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()
    if world is not None:
        world.close()


def _found(work: bytes) -> Callable[[World], Any]:
    try:
        return pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise ConfigError(f"spawn: a spawned process does not find what it is to run ({error}): it cannot look into a notebook or an "
                          f"interactive session; put the function into a module, {OR}") from error


def _end_with_parent() -> None:
    """End this process when the parent has ended: the parent may be killed without a chance to end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a child"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _join(port: int, ranks: int | Mesh, rank: int, *, timeout: float, backend: str, device: str, debug: bool) -> World:
    """The world of one spawned process. The ranks meet in the parent's store.

    debug: as set in the parent now; children have the environment of the moment when the fork-server started
    """
    torch.set_num_threads(1)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=seconds(timeout))
    return World(dist.PrefixStore("rankloom", store), rank, ranks, device_for(device, rank), timeout=timeout,
                 local_rank=rank, local_size=as_mesh(ranks).size, debug=debug, backend=backend)


def _pickled_result(rank: int, result: Any) -> bytes:
    try:
        return pickle.dumps(Answer(True, result, ""))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"spawn: what the body returned on rank {rank}, a {type(result).__name__}, cannot be sent back ({error}); return "
                          "tensors, numbers, texts, or lists and dicts of these") from error


def _pickled_failure(rank: int, error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps(Answer(False, error, trace))
        pickle.loads(answer)   # some exceptions can be pickled, but not unpickled
        return answer
    except Exception:   # not hidden: the text of the error is sent instead
        told = RankFailed(f"rank {rank} failed: {type(error).__name__}: {text_of(error)}", rank=rank)
        return pickle.dumps(Answer(False, told, trace))


def _collect(children: list[Child], size: int) -> list[Any]:
    """Wait for all ranks; the first one that fails decides. If it failed because of another, wait a moment for the error of that one."""
    results: list[Any] = [None] * size
    failed: list[Exception] = []   # in the order in which the ranks told of it
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(children)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), SETTLE if failed else TICK)
        for rank in [waiting.pop(pipe) for pipe in ready]:   # type: ignore[call-overload]
            try:
                results[rank] = _receive(children[rank], rank, size)
            except Exception as error:
                failed.append(error)
        if failed and not (ready and all(bare_failure(error).is_collateral for error in failed)):
            break
    if failed:
        raise min(failed, key=lambda error: (bare_failure(error).is_collateral, bare_failure(error).lost_another))
    for _, pipe in children:
        with contextlib.suppress(BrokenPipeError):   # the rank has ended; its exit code says how
            pipe.send_bytes(b"all ranks are done")
    return results


def _receive(child: Child, rank: int, size: int) -> Any:
    process, pipe = child
    try:
        data = pipe.recv_bytes()
    except (EOFError, OSError):   # before it sent its answer, or while it sent it
        process.join(GRACE)
        raise RankFailed(f"rank {rank} of {size} ended without a word: {_how_it_ended(process.exitcode)}; "
                         "the others were stopped because of it", rank=rank) from None
    try:
        answer: Answer = pickle.loads(data)
    except Exception as error:
        raise RankFailed(f"rank {rank} of {size}: what it returned does not come back from pickle: {type(error).__name__}: {error}",
                         rank=rank) from error
    if answer.ok:
        return answer.value
    raise raisable(answer.value, rank, size, answer.trace)


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal_name(-code)}"
    return f"exit code {code}; what it printed stands above"


def _end(children: list[Child]) -> list[int | None]:
    """Wait until all processes have ended; SIGKILL after a grace period. Ends only our own children, by their process objects.

    Returns their exit codes; None for a process that was killed here.
    """
    deadline, codes = time.monotonic() + GRACE, []
    for process, pipe in children:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()
        process.close()
    return codes
