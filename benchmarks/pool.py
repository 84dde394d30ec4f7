"""Rank processes that sleep in a read until they are asked something, so that several libraries can take turns on the same cores.

The one who measures makes a `Pool` for each library and asks; a rank calls `serve` (serve.py) with a function that answers. Questions and
answers are JSON, one line each.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankloom.world.agent import LEASH

Answer = Any


class Pool:
    """`ranks` processes of one host, each of which runs `command SOCKET`: started as by torchrun, asleep between questions.

    launcher: the command that starts all of them, such as mpiexec; left out, each is started here
    """

    def __init__(self, name: str, ranks: int, folder: Path, command: Sequence[str], env: dict[str, str] | None = None,
                 launcher: Sequence[str] = ()):
        self.name, self._log = name, folder / f"{name}.log"
        address = str(folder / f"{name}.socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(ranks)
            one_core = {"OMP_NUM_THREADS": "1"} | (env or {})
            self._processes = ([self._start([*launcher, *command, address], one_core)] if launcher else
                               [self._start([*command, address], one_core | place) for place in self._places(ranks)])
            self._wires = [wire for _, wire in sorted((self._accept(listener) for _ in range(ranks)), key=lambda ranked: ranked[0])]

    @property
    def pids(self) -> list[int]:
        """The numbers of its processes."""
        return [process.pid for process in self._processes]

    def ask(self, **question: object) -> list[Answer]:
        """Put a question to all ranks at once; their answers in rank order."""
        for wire in self._wires:
            print(json.dumps(question), file=wire, flush=True)
        answers = [json.loads(wire.readline() or json.dumps({"error": self._log.read_text()})) for wire in self._wires]
        for answer in answers:
            if "error" in answer:
                raise SystemExit(f"{self.name}: {question} failed:\n{answer['error']}")
        return [answer["answer"] for answer in answers]

    def end(self) -> None:
        """Close the wires, which ends the ranks."""
        for wire in self._wires:
            wire.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _places(self, ranks: int) -> list[dict[str, str]]:
        """What torchrun tells each rank. The store belongs to who starts them."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                  "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
        return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen:
        on_a_leash = [sys.executable, str(LEASH), str(os.getpid()), *command]   # nothing is left behind by one who is killed
        with self._log.open("a") as log:
            return subprocess.Popen(on_a_leash, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _accept(self, listener: socket.socket) -> tuple[int, Any]:
        listener.settimeout(1.0)
        give_up = time.monotonic() + 600   # a first start may compile an extension
        while time.monotonic() < give_up and not any(process.poll() for process in self._processes):
            try:
                wire = listener.accept()[0]
            except TimeoutError:
                continue
            wire.settimeout(600.0)
            lines = wire.makefile("rw")
            return int(lines.readline()), lines
        for process in self._processes:
            process.kill()
        raise SystemExit(f"{self.name}: its ranks did not start:\n{self._log.read_text()}")
