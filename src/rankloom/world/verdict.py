"""Decide which rank failed first, and draw the box that says so.

A rank that fails takes the others with it: they lose a connection, wait until a time-out, or are ended by the launcher.
So the first process that ends is often not the cause. Each rank that raises writes its error and the time into a small
file (world/failure.py); the launcher adds how every process ended, and `pick_cause` decides. All are on one host, so
they share the monotonic clock. Read world/agent.py for who calls this, and when.
"""

import io
import itertools
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankloom.base import errors
from rankloom.base.errors import RankFailed, RankloomError
from rankloom.base.text import printable
from rankloom.world.failure import Failure, shorter_path, signal_name

CLEAN_CODES = {0, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}   # success, or ended on request as train/run/stop.py does
END = 1 << 14    # bytes of a log that are read for its last words: in a long run it may grow to gigabytes
MAX_LINES = 20   # of a message in the box; the log has all lines


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rank ended, as the launcher saw it."""

    rank: int
    code: int                        # exit code; -N if signal N killed it
    time: float                      # of its exception, or else when it was last seen alive
    asked: bool = False              # it failed or ended after the launcher had asked it to end
    hung: str = ""                   # how it failed to end when asked
    failure: Failure | None = None
    log: str = ""                    # a file with its output

    @property
    def part(self) -> str:
        """Its role: "cause", "hung", "left" (ended as if all were done), "collateral" (failed because of another rank) or "stopped"."""
        if self.failure and not self.asked:
            return "collateral" if self.failure.is_collateral else "cause"
        if self.hung:
            return "hung"
        if self.asked:
            return "stopped"
        return "left" if self.code in CLEAN_CODES else "cause"

    @property
    def lost_another(self) -> bool:
        """Whether a connection closed under it, and that is why it failed."""
        return self.part == "collateral" and self.failure is not None and self.failure.lost_another


def pick_cause(endings: Sequence[Ending]) -> Ending:
    """The rank that failed first by itself; the others only lost it, waited for it, or were stopped.

    A rank with an error of its own comes first, the earliest of several. Without one: when ranks lost a connection, a rank that
    ended as if all were done; else a rank that does not respond. Then one that waited in vain: it closes its connections before it
    can tell why.
    """
    collateral = [ending for ending in endings if ending.part == "collateral"]
    first = min(collateral, key=lambda ending: ending.time, default=None)
    silent = ["left", "hung"] if first and first.lost_another else ["hung", "left"]
    order = ["cause", *silent, "collateral", "stopped"]
    return min(endings, key=lambda ending: (order.index(ending.part), ending.lost_another, ending.time, ending.rank))


def explain(endings: Sequence[Ending], width: int = 100) -> RankloomError:
    """The error to raise for a job that failed.

    An error that the user can fix, and that all ranks raised alike, is raised again unchanged. Any other failure becomes
    `RankFailed` with a headline and the box.
    """
    cause = pick_cause(endings)
    failure = cause.failure
    told = [e.failure for e in endings if e.part in ("cause", "collateral", "hung")]
    kind = getattr(errors, failure.type, None) if failure else None
    if failure and isinstance(kind, type) and issubclass(kind, RankloomError) and issubclass(kind, ValueError) \
            and all(other is not None and other.same_as(failure) for other in told):
        return kind(failure.message)
    headline = f"rank {cause.rank} of {len(endings)} failed first"
    return RankFailed(f"{headline}\n{render(endings, cause, width)}", rank=cause.rank)


def render(endings: Sequence[Ending], cause: Ending, width: int = 100) -> str:
    """The box, as text without colours: which rank failed, where, why, and which ranks were stopped because of it."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for label, text in [*_what(cause), *_waited(endings, cause), *_others(endings, cause)]:
        rows.add_row(Text(label), Text(printable(text)))
    host = cause.failure.host if cause.failure else socket.gethostname()
    title = Text(f"rank {cause.rank} of {len(endings)} on host {printable(host)}")
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(Panel(rows, title=title, title_align="left", box=box.ROUNDED, expand=True))
    return capture.get().rstrip()


def _what(cause: Ending) -> list[tuple[str, str]]:
    """What happened to the rank that failed first, and where to read more."""
    log = [("log", shorter_path(cause.log))]
    if cause.hung:
        return [("silent", cause.hung), *log]
    if cause.failure:
        failure = cause.failure
        at = [("at", f"{failure.place}\n    {failure.source}")] if failure.place else []
        return [("error", _error(failure)), *at, *log]
    if cause.code < 0:
        return [("killed", _signal_text(-cause.code)), *log]
    if cause.part == "left":
        return [("ended", f"with exit code {cause.code}, while other ranks still needed it"), *log]
    return [("ended", f"with exit code {cause.code}{_last_words(cause.log)}"), *log]


def _error(failure: Failure, limit: int = MAX_LINES) -> str:
    return ": ".join(filter(None, (failure.type, _first_lines(failure.message, limit))))   # Python's own MemoryError has no text


def _signal_text(number: int) -> str:
    name = signal_name(number)
    hints = {
        "SIGKILL": "Nothing here sent it: the kernel does that when memory runs out (see dmesg), and so do job limits",
        "SIGTERM": "Somebody else sent it, to this rank only",
        "SIGHUP": "The terminal was closed, or whoever read its output has gone",
        "SIGSEGV": "It crashed in compiled code", "SIGABRT": "Compiled code gave up", "SIGBUS": "It crashed in compiled "
        "code, or this host had no memory left for what its ranks share",
    }
    return f"by {name}. {hints[name]}." if name in hints else f"by {name}"


def _last_words(log: str) -> str:
    """The end of a log, for a rank that did not report why it failed."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - END))
        lines = file.read().decode(errors="replace").strip().splitlines()[-6:]
        return "".join(f"\n    {line}" for line in lines)
    return ""


def _waited(endings: Sequence[Ending], cause: Ending) -> list[tuple[str, str]]:
    """If the failed rank reported nothing: the first error of another rank that missed it."""
    missed = [e for e in endings if e.part == "collateral"]
    if cause.failure or not missed:
        return []
    first = min(missed, key=lambda ending: ending.time)
    return [(f"rank {first.rank}", _error(first.failure))] if first.failure else []


def _others(endings: Sequence[Ending], cause: Ending) -> list[tuple[str, str]]:
    others = [e for e in endings if e is not cause]
    alike = [e for e in others if e.failure and cause.failure and e.failure.same_as(cause.failure)]
    also = [e for e in others if e.part == "cause" and e not in alike]
    stopped = [e.rank for e in others if e not in alike and e not in also and e.part != "left"]
    rows = [("the same", f"on {rank_list([e.rank for e in alike])}")] if alike else []
    rows += [("also failed", f"{rank_list([e.rank])}: {_short(e)}") for e in also]
    return rows + ([("stopped", f"because of it: {rank_list(stopped)}")] if stopped else [])


def _short(ending: Ending) -> str:
    if ending.failure:
        return _error(ending.failure, 1)
    return _what(ending)[0][1].splitlines()[0]


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks, in short form.

    >>> rank_list([3])
    'rank 3'
    >>> rank_list([5, 0, 1, 2])
    'ranks 0-2, 5'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return "ranks " + ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _first_lines(text: str, limit: int = MAX_LINES) -> str:
    lines = text.strip().split("\n")
    return "\n".join(lines[:limit]) + (" ..." if len(lines) > limit else "")
