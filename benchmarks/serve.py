"""The other end of a `Pool` (pool.py): a rank that answers questions. Needs Python alone, for ranks that live in other environments."""

import json
import socket
import traceback
from collections.abc import Callable
from typing import Any


def serve(address: str, rank: int, answer: Callable[[dict], Any]) -> None:
    """Answer questions until the other side closes. An exception is an answer too: the other side shows it and ends all."""
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(address)
        lines = wire.makefile("rw")
        print(json.dumps(rank), file=lines, flush=True)
        for line in lines:
            try:
                said = {"answer": answer(json.loads(line))}
            except Exception:
                said = {"error": traceback.format_exc()}
            print(json.dumps(said), file=lines, flush=True)
