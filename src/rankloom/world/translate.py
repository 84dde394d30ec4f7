"""A backend's failure in words: an error of ours that names rank, group and label."""

import re
from collections.abc import Callable

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, RankloomError, RankLost, ShapeMismatch
from rankloom.world.debug import Inspector


class TranslatedErrors:
    """A context that raises a backend's failure as an error of ours. A class: a generator context costs more than the call it guards.

    where: how messages begin, for a label     inspector: who may know where the other ranks are
    """

    __slots__ = ("_inspector", "_label", "_timeout", "_where")

    def __init__(self, where: Callable[[str], str], label: str, timeout: float, inspector: Inspector | None):
        self._where, self._label, self._timeout, self._inspector = where, label, timeout, inspector

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RankLost | CollectiveMismatch) and self._label not in str(error):   # shared memory's own words
            raise type(error)(str(error).replace(": ", f": {self._label}: ", 1)) from error.with_traceback(None)
        if isinstance(error, RuntimeError) and not isinstance(error, RankloomError):
            raise self._explain(error) from error.with_traceback(None)   # its frames hold the connection

    def _explain(self, error: Exception) -> RankloomError:
        text, where = str(error).splitlines()[0], self._where(self._label)
        if "imeout" in text or "imed out" in text:
            who = f" Who is where:\n{self._inspector.where_is_everyone()}" if self._inspector else (
                " RANKLOOM_DEBUG=1 says which rank was where.")
            return CollectiveTimeout(f"{where} did not finish within its timeout of {self._timeout:g} s: "
                                     f"a rank is slow, stopped, or skipped this call.{who}")
        if "scalar type" in text or "complex" in text:
            return ShapeMismatch(f"{where}: the backend cannot carry this dtype ({text}); send x.view(torch.uint8), or convert it")
        plain = re.sub(r"^\[\S+\] ", "", text).split(". ")[0]   # gloo puts its source file before it, and advice behind
        return RankLost(f"{where} lost its connection to another rank, which has ended or failed: {plain}")
