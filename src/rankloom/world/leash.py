"""Run a command that cannot outlive its launcher: `python leash.py LAUNCHER_PID COMMAND...`

The launcher may be killed without a chance to end its ranks (SIGKILL, out of memory). So each rank asks the kernel to
be killed with it, before the command starts; the request survives exec. Imports neither torch nor rankloom: it
runs in front of every rank, in about 20 ms.
"""

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to the launcher, then become the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        die_with(launcher)
    else:
        watch(launcher)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


def die_with(launcher: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:   # it ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


def watch(launcher: int, every: float = 1.0) -> None:
    """Where the kernel has no such request: leave a child behind that looks, and kills this process."""
    rank = os.getpid()
    if os.fork():
        return
    while os.getppid() == rank:
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            os.kill(rank, signal.SIGKILL)
        time.sleep(every)
    os._exit(0)


if __name__ == "__main__":
    main()
