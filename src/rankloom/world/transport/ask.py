"""Ask the store of a job, and give up if it does not answer.

torch's own time-out of a store counts what others have yet to write. A store whose process is stopped, or whose host is cut off, takes
the question and says nothing: then torch waits without end, in any of its calls, and no signal interrupts it.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from rankloom.base.errors import ConfigError

SLACK = 2.0   # seconds to wait beyond the time-out of the question itself, whose error says more than this one
T = TypeVar("T")


def ask(question: Callable[[], T], seconds: float) -> T:
    """What `question` returns or raises, in a thread that is left behind if it does not come back. price: 50 us

    raises: TimeoutError when there is no answer within `seconds` and a little more; ConfigError where no thread can be started
    """
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def put_answer() -> None:
        try:
            answers.put((question(), None))
        except BaseException as error:   # raised in the thread that waits
            answers.put((None, error))

    try:
        threading.Thread(target=put_answer, daemon=True, name="rankloom-ask").start()
    except RuntimeError as refusal:   # no other rank, and not the store, is to blame
        raise ConfigError(no_more_threads(refusal)) from refusal
    try:
        answer, error = answers.get(timeout=seconds + SLACK)
    except Empty:
        raise TimeoutError("the store of the job does not answer: the process that keeps it (rank 0, or torchrun's agent) is stopped, "
                           "or its host is cut off") from None
    if error is not None:
        try:
            raise error
        finally:
            del error   # its traceback refers to this frame, and that to what asked
    return answer   # type: ignore[return-value]


def no_more_threads(error: Exception) -> str:
    """What to say where Python, or torch, could not start a thread."""
    return (f"this host starts no more threads ({str(error).splitlines()[0]}): raise the limit of the user (ulimit -u) or of the container "
            "(pids.max), or use fewer ranks")
