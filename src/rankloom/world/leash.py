"""Run a command that cannot outlive its launcher: `python leash.py LAUNCHER_PID COMMAND...`

The launcher may be killed without a chance to end its ranks (SIGKILL, out of memory). So before the command starts, each rank
asks the kernel to kill it when the launcher ends; the request survives exec. Imports neither torch nor rankloom, as it
runs before every rank starts, in about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to the launcher, then replace it by the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    die_with(launcher)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


def die_with(launcher: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:   # the launcher ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
