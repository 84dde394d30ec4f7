"""Ranks that run another program than the others are told before they connect."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from rankloom.world.program import expect_same_program

TIMEOUT = 20.0


def say(*given: dict) -> list[str | None]:
    """What each rank is told."""
    store = dist.HashStore()

    def one(rank: int) -> str | None:
        try:
            expect_same_program(store, rank, len(given), TIMEOUT, **given[rank])
        except rl.ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(given)) as ranks:
        return list(ranks.map(one, range(len(given))))


def test_one_program_is_no_news():
    assert say(*[{"mesh": rl.Mesh(shard=3)}] * 3) == [None] * 3


def test_another_mesh_or_backend_on_one_rank_is_told_on_all():
    told = ("rank 2 was given another program than rank 0: mesh is {}, on rank 0 {}; backend is gloo, on rank 0 auto; "
            "give all ranks the same")
    one, other = {"mesh": rl.Mesh(shard=3), "backend": "auto"}, {"mesh": rl.Mesh(replicate=3), "backend": "gloo"}
    assert say(one, one, other) == [told.format(rl.Mesh(replicate=3), rl.Mesh(shard=3))] * 3


def test_another_torch_is_told():
    store = dist.HashStore()
    store.set("heard/1", "yes")
    store.set("program/1", '{"torch": "2.9.0", "Python": "3.11", "rankloom": "0.1.0 (00000000)"}')
    with pytest.raises(rl.ConfigError, match=rf"rank 1 was given .* torch is 2\.9\.0, on rank 0 {torch.__version__[:4]}.*; rankloom is 0"):
        expect_same_program(store, 0, 2, TIMEOUT)


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(rl.RankLost, match=r"rank 0: rank\(s\) 1 did not join"):
        expect_same_program(dist.HashStore(), 0, 2, 0.2)


def test_init_tells_processes_of_two_ways_to_start():
    """Under torchrun's variables, as hosts with another environment would be."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    start = lambda rank, **more: subprocess.Popen(
        [sys.executable, "-c", "import rankloom as rl; rl.init(device='cpu', timeout=60)"], stderr=subprocess.PIPE, text=True,
        env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more)
    ranks = [start(0), start(1, RANKLOOM_DEBUG="1")]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert all("rank 1 was given another program than rank 0: RANKLOOM_DEBUG is True, on rank 0 False" in each for each in said)
