"""Turn a backend's failure into an error of ours that names rank, group and label."""

import re
from collections.abc import Callable

import torch.distributed as dist

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, RankloomError, RankLost, ShapeMismatch
from rankloom.base.text import printable
from rankloom.world.debug import Inspector

GLOO = re.compile(r"\[\S+:\d+\] ")   # file and line of gloo's source, at the start of all its errors about connections


class TranslatedErrors:
    """A context that raises a backend's failure as an error of ours. A class: a generator context costs more than the call inside.

    where: the beginning of error messages, for a label     inspector: that of debug mode, which may know where the other ranks are
    """

    __slots__ = ("_inspector", "_label", "_timeout", "_where")

    def __init__(self, where: Callable[[str], str], label: str, timeout: float, inspector: Inspector | None):
        self._where, self._label, self._timeout, self._inspector = where, label, timeout, inspector

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        del trace   # its frames refer to the connection, and this frame will be part of another traceback
        if isinstance(error, RankLost | CollectiveMismatch) and self._label not in str(error):   # raised by the shared-memory backend
            raise type(error)(str(error).replace(": ", f": {self._label}: ", 1)) from error.with_traceback(None)
        if isinstance(error, RuntimeError) and not isinstance(error, RankloomError):
            error.with_traceback(None)   # its frames refer to the connection
            if known := self._explain(error):
                raise known from error
            error.add_note(f"({self._where(self._label)})")
            raise error

    def _explain(self, error: Exception) -> RankloomError | None:
        """Our error, or None if neither another rank nor the data is to blame: no memory is left, or a device has failed."""
        text, where = printable(str(error).splitlines()[0]), self._where(self._label)   # gloo names an operation by a control character
        if "imeout" in text or "imed out" in text:
            who = f" Who is where:\n{self._inspector.board.where_is_everyone()}" if self._inspector else (
                " RANKLOOM_DEBUG=1 says which rank was where.")
            return CollectiveTimeout(f"{where} did not finish within its timeout of {self._timeout:g} s: "
                                     f"a rank is slow, stopped, or skipped this call.{who}")
        if "scalar type" in text or "complex" in text or "not implemented for" in text:
            return ShapeMismatch(f"{where}: the backend cannot add or compare this dtype ({text}); convert it, as by x.float() or "
                                 "x.int(), or gather, then combine")
        if GLOO.match(text) or isinstance(error, dist.DistError):
            plain = GLOO.sub("", text).split(". ")[0]   # without advice that may follow
            return RankLost(f"{where} lost its connection to another rank, which has ended or failed: {plain}")
        return None
