"""Connect the ranks of a group over TCP, each with each. Callers must send a secret word, which the called rank left in the store."""

import hmac
import json
import secrets
import socket
import struct
import time
from typing import NamedTuple

import torch.distributed as dist

from rankloom.base.errors import RankLost
from rankloom.world.transport.meet import hear_all

HELLO = struct.Struct("<32si")   # the secret word of the called rank, and the number of the caller
HELLO_SECONDS = 5.0              # for a caller to send it


class Listener(NamedTuple):
    """Where a rank is called, and the word by which it knows the ranks of its group."""

    address: str
    port: int
    word: str


def dial_all(store: dist.Store, rank: int, size: int, address: str, timeout: float) -> dict[int, socket.socket]:
    """A connection to every other rank of the group, by rank. Each rank calls those with lower numbers.

    address: where the others reach this rank
    raises:  RankLost with the rank that this one could not reach, or those that did not come within `timeout` seconds
    """
    deadline, word = time.monotonic() + timeout, secrets.token_hex(16)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=size) as listener:
        texts = hear_all(store, "wire", rank, size, timeout, json.dumps(Listener(address, listener.getsockname()[1], word)))
        lines = {other: _call(Listener(*json.loads(texts[other])), other, rank, deadline) for other in range(rank)}
        while len(lines) < size - 1:
            lines |= _answer(listener, word, rank, [other for other in range(rank + 1, size) if other not in lines], deadline)
    for line in lines.values():
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setblocking(False)
    return lines


def _call(there: Listener, other: int, rank: int, deadline: float) -> socket.socket:
    """Connect to a rank."""
    try:
        line = socket.create_connection((there.address, there.port), timeout=max(deadline - time.monotonic(), 0.001))
        line.sendall(HELLO.pack(there.word.encode(), rank))
    except OSError as error:
        raise RankLost(f"rank {rank}: cannot reach rank {other} at {there.address}, port {there.port}: {error.strerror or error}. If that "
                       "is not its address in the network of the hosts, set GLOO_SOCKET_IFNAME there to the interface that is") from error
    return line


def _answer(listener: socket.socket, word: str, rank: int, missing: list[int], deadline: float) -> dict[int, socket.socket]:
    """Accept the next caller. Returns its connection if it is one of the missing ranks."""
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        line = listener.accept()[0]
    except OSError as error:
        raise RankLost(f"rank {rank}: rank(s) {', '.join(map(str, missing))} did not connect in time; can they reach this host's "
                       f"address {listener.getsockname()[0]}?") from error
    line.settimeout(HELLO_SECONDS)
    try:
        their_word, other = HELLO.unpack(_read(line, HELLO.size))
    except OSError:   # not a rank of ours: it would send its word at once
        line.close()
        return {}
    if other in missing and hmac.compare_digest(their_word, word.encode()):
        return {other: line}
    line.close()
    return {}


def _read(line: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = line.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("closed before it said who it is")
        data += piece
    return data
