"""The failure file that a rank leaves for its launcher: which error, when, and where in the user's code.

A small file in the format of torchrun's own error file. Imports neither torch nor rich, as every training process imports this.
world/verdict.py reads the files of all ranks, and decides which rank was the cause.
"""

import json
import linecache
import re
import signal
import socket
import sysconfig
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rankloom.base.errors import RankFailed
from rankloom.base.files import replacing

# Errors that a rank raises because another is gone. Also raw torch errors, for code that does not use Group.
COLLATERAL = {"RankLost", "CollectiveTimeout", "DistNetworkError", "DistStoreError", "DistBackendError"}
LOST_CONNECTION = ("onnection closed by peer", "onnection reset by peer")
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a rank, as the rank itself wrote it down. Times are of the monotonic clock."""

    type: str
    message: str
    place: str        # file:line in function
    source: str       # the text of that line
    host: str
    time: float
    traceback: str

    @property
    def is_collateral(self) -> bool:
        """Whether a rank raises this because of another rank."""
        lost = self.type == "RuntimeError" and any(text in self.message for text in LOST_CONNECTION)
        return lost or self.type in COLLATERAL

    @property
    def lost_another(self) -> bool:
        """Whether a connection closed under it. The rank that closed it may tell why a moment later: gloo closes the connections of a call
        that times out before the call itself returns to its thread."""
        return self.is_collateral and self.type != "CollectiveTimeout"

    def same_as(self, other: "Failure") -> bool:
        """Whether two ranks raised the same error; `rank 3: ` at the beginning of a message does not count."""
        texts = [(f.type, re.sub(r"^rank \d+: ", "", f.message)) for f in (self, other)]
        return texts[0] == texts[1]


def bare_failure(error: BaseException) -> Failure:
    """The type and the text of an exception, without place and traceback: enough to tell whether another rank has caused it."""
    return Failure(type(error).__name__, text_of(error), "", "", "", 0.0, "")


def text_of(error: BaseException) -> str:
    """The text of an exception; for a user's own whose `__str__` fails, what Python shows in a traceback."""
    with suppress(Exception):
        return str(error)
    return "<exception str() failed>"


def raisable(error: BaseException, rank: int, size: int, trace: str = "") -> BaseException:
    """What a rank raised, to be raised in the caller, with a note that names the rank; for `sys.exit`, which would end the caller without
    a word, RankFailed. trace: its traceback, if it comes from another process"""
    if isinstance(error, SystemExit):
        failed = RankFailed(f"rank {rank} called sys.exit({'' if error.code is None else repr(error.code)}), which would end its caller "
                            "without a word; a body ends with `return`, or with an error", rank=rank)
        failed.__cause__, error = error, failed
    error.add_note(f"(rank {rank} of {size} failed first; the others were stopped because of it)" + (trace and f"\n{trace}"))
    return error


def signal_name(number: int) -> str:
    """SIGTERM for 15; "signal 40" for one that has no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def write_failure(error: BaseException, file: Path) -> bool:
    """Write `error` to `file` for the launcher, completely or not at all; the first error that a rank writes stays.

    The file is torchrun's own error file, with one more key. Returns whether the file exists: a full disk must not
    hide the error that is being reported.
    """
    with suppress(OSError):
        if not file.exists():
            with replacing(file, keep_old=True) as new:
                new.write_text(json.dumps(_torchrun_format(describe(error))))
        return True
    return False


def describe(error: BaseException) -> Failure:
    """The facts about an exception that the launcher needs."""
    message = "\n".join([text_of(error), *getattr(error, "__notes__", ())])
    place, source = user_frame(error.__traceback__)
    trace = "".join(traceback.format_exception(error))
    return Failure(type(error).__name__, message, place, source, socket.gethostname(), time.monotonic(), trace)


def _torchrun_format(failure: Failure) -> dict:
    # torchrun takes the earliest error for the cause, in whole seconds, and notices a killed rank only after the ranks that lost it.
    # So errors of ranks that lost another are dated two seconds later.
    told_at = int(time.time()) + (2 if failure.is_collateral else 0)
    extra = {"py_callstack": failure.traceback, "timestamp": str(told_at)}
    message = {"message": f"{failure.type}: {failure.message}", "extraInfo": extra}
    return {"message": message, "rankloom": asdict(failure)}


def read_failure(file: Path) -> Failure | None:
    """The failure that `write_failure` wrote, or None when there is no file or it has another format."""
    try:
        return Failure(**json.loads(file.read_text())["rankloom"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def user_frame(trace: TracebackType | None) -> tuple[str, str]:
    """(file:line in function, text of the line) of the last frame in the user's code; else the last one in rankloom."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(trace)]
    users = [frame for frame in frames if _is_users(frame[0])]
    ours = [frame for frame in frames if Path(frame[0]).is_relative_to(PACKAGE)]
    for file, line, function in (users or ours or frames)[-1:]:
        return f"{shorter_path(file)}:{line} in {function}", linecache.getline(file, line).strip()
    return "", ""


def _is_users(file: str) -> bool:
    """Whether a frame is in the user's code: not rankloom's, an installed library's, or Python's own."""
    own = (PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("scripts"))
    libraries = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return not (libraries or file.startswith("<frozen") or any(Path(file).is_relative_to(path) for path in own))


def shorter_path(file: str) -> str:
    """The path relative to the current folder, if it is inside: shorter, and terminals can still open it."""
    with suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file
