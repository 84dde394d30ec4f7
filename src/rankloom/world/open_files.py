"""Room for connections: each is an open file, and a process may have so many (ulimit -n).

Where none is left, gloo ends the process, and torch's store says nothing to whoever comes. A laptop often allows 256, a server 1024,
and both allow more when asked.
"""

import os
import resource

from rankloom.base.errors import ConfigError

ENOUGH = 10240   # what macOS gives, too


def make_room(files: int, what: str, *, wished: int = 0) -> None:
    """Let this process open `files` more, if possible `wished`, beside those that it has open.

    what: that needs them, for the message
    raises: ConfigError, where the system does not allow so many
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/dev/fd"))
    if _within(now + max(files, wished), allowed):
        return
    if not _within(now + files, most):
        raise ConfigError(f"{what} needs {files} open files beside the {now} that this process has, and the system lets it have {most}: "
                          "raise the hard limit (ulimit -Hn, or nofile in limits.conf), or use fewer ranks")
    asked = max(ENOUGH, now + files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (asked if _within(asked, most) else most, most))


def _within(files: int, limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or files <= limit
