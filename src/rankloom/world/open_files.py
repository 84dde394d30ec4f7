"""Raise the limit of open files (ulimit -n): each connection is an open file.

At the limit, gloo ends the process, and torch's store does not answer new connections. The limit is often 256 on a laptop and 1024 on
a server, and both allow more on request.
"""

import errno
import os
import resource

from rankloom.base.errors import ConfigError

ENOUGH = 10240   # macOS allows this many, too


def make_room(files: int, what: str) -> None:
    """Let this process open `files` more files than it has open.

    what: what needs the files, for the message
    raises: ConfigError if the system does not allow so many
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = _open_now(allowed)
    if _within(now + files, allowed):
        return
    if not _within(now + files, most):
        raise ConfigError(f"{what} needs {files} open files beside the {now} that this process has, and the system lets it have {most}: "
                          "raise the hard limit (ulimit -Hn, or nofile in limits.conf), or use fewer ranks")
    asked = max(ENOUGH, now + files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (asked if _within(asked, most) else most, most))


def _open_now(allowed: int) -> int:
    """How many files this process has open. To look takes one more: where it may open none, it has as many as it may."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return allowed


def _within(files: int, limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or files <= limit
