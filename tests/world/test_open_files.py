"""A process that may have few open files gets more where the system allows it, and is told where not: gloo would end it."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

import rankloom as rl

FEW = 256   # open files

WORLDS = """
import resource
import torch
import rankloom as rl
def body(world):
    groups = [world.group("replicate"), world.group("shard")]
    return sum(group.all_reduce(torch.ones(1)).item() for group in (world, *groups))
print(rl.simulate(rl.Mesh(replicate=2, shard=4), body, timeout=60), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


PIECES = """
import rankloom as rl
import torch
def body(world):
    kept = [world.buffer((2,), torch.float64) for _ in range(25)]
    kept += [world.common_buffer(2, torch.float64)[0] for _ in range(25)]
    for x in kept:
        x += 1
    return sum(x.sum().item() for x in kept[:25])
print(rl.simulate(2, body, backend="rankloom", timeout=30))
"""

SPAWNED = """
import operator
import rankloom as rl
print(rl.spawn(8, operator.attrgetter("rank"), timeout=60))
"""


def run(command: list[str], soft: int, hard: int, folder=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))


def test_groups_ask_for_as_many_open_files_as_they_need():
    """Eight ranks in one process have a hundred connections."""
    done = run([sys.executable, "-c", WORLDS], 30, 5000)
    assert done.stdout.split("] ") == [f"[{', '.join(['14.0'] * 8)}", "(5000, 5000)\n"], done.stderr


def test_room_that_is_there_is_left_as_it_is():
    done = run([sys.executable, "-c", WORLDS], 300, 5000)
    assert done.stdout.endswith("(300, 5000)\n"), done.stderr


@pytest.mark.parametrize(("before", "after"), [(2000, 2100), (100, 1000)])
def test_the_limit_becomes_what_is_enough_or_what_is_needed_if_that_is_more(before, after):
    command = f"""
import os, resource
from rankloom.world import open_files
open_files.ENOUGH = 1000
open_files.make_room({after} - len(os.listdir("/dev/fd")), "a group")
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run([sys.executable, "-c", command], before, 5000).stdout == f"({after}, 5000)\n"


def test_ranks_of_one_process_get_room_for_the_connections_of_all_however_much_is_enough():
    done = run([sys.executable, "-c", f"from rankloom.world import open_files; open_files.ENOUGH = 30\n{WORLDS}"], 30, 5000)
    assert done.stdout.startswith(f"[{', '.join(['14.0'] * 8)}] ("), done.stderr


def test_ranks_of_one_process_that_may_not_have_all_their_connections_are_refused_and_none_connects():
    """Each may have its own: gloo would end the process."""
    done = run([sys.executable, "-c", WORLDS], 60, 60)
    assert done.returncode == 1
    assert "ConfigError: a group of 8 ranks in one process needs 80 open files beside the " in done.stderr


def test_a_group_that_the_system_allows_no_connections_is_refused():
    done = run([sys.executable, "-c", WORLDS], 20, 20)
    assert done.returncode == 1
    assert "ConfigError: a group of 8 ranks needs 24 open files beside the " in done.stderr
    assert "the system lets it have 20: raise the hard limit" in done.stderr


def test_pieces_of_shared_memory_get_room_for_their_files_or_say_what_is_missing():
    assert run([sys.executable, "-c", PIECES], 40, 5000).stdout == "[50.0, 50.0]\n"
    refused = run([sys.executable, "-c", PIECES], 40, 60)
    assert refused.returncode == 1
    assert re.search(r"ConfigError: rank .: buffer in .*, said rank 0: a tensor in shared memory needs 4 open files", refused.stderr)


def allow_more_files(files: int) -> None:
    """So many beside those that this process has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + files,) * 2)


def take_two_tensors(world: rl.World) -> float:
    """The first is still one open file when the second needs two."""
    allow_more_files(3)
    first, (second, _) = world.buffer((2,), torch.float64), world.common_buffer(world.size, torch.float64)
    world.all_reduce(first.fill_(1.0))
    return first.sum().item() + second.sum().item()


def open_all_files(hard: int) -> None:
    """From here on this process may not even open one to see how many it has. hard: how many it may have if it asks"""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, hard))
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def take_a_tensor_with_all_files_open(world: rl.World) -> float:
    open_all_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return world.all_reduce(world.buffer((2,), torch.float64).fill_(1.0)).sum().item()


def take_a_tensor_where_rank_1_may_open_nothing(world: rl.World, limit: Callable[[], None]) -> tuple[str, float]:
    """Afterwards they still can talk."""
    if world.rank == 1:
        limit()
    with pytest.raises(rl.ConfigError) as refused:
        world.buffer((2,), torch.float64)
    return str(refused.value), world.all_reduce(torch.ones(1)).item()


def test_a_process_needs_room_for_its_own_files_of_a_piece_and_not_for_those_of_other_ranks():
    assert rl.spawn(3, take_two_tensors, backend="rankloom") == [6.0] * 3


def test_a_process_that_has_all_files_open_that_it_may_gets_room_for_more():
    assert rl.spawn(2, take_a_tensor_with_all_files_open, backend="rankloom") == [4.0] * 2


@pytest.mark.parametrize("limit", [partial(allow_more_files, 1), partial(open_all_files, FEW)])
def test_where_one_rank_may_open_no_more_files_all_are_told_of_it(limit):
    body = partial(take_a_tensor_where_rank_1_may_open_nothing, limit=limit)
    for rank, (said, ranks) in enumerate(rl.spawn(2, body, backend="rankloom")):
        assert ranks == 2.0
        assert said.startswith(f"rank {rank}: buffer in group 'world', said rank 1: a tensor in shared memory needs 2 open files beside")
        assert said.endswith("or use fewer ranks")


def test_spawned_ranks_get_room_for_their_pipes_and_connections_or_none_is_started():
    assert run([sys.executable, "-c", SPAWNED], 30, 5000).stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\n"
    refused = run([sys.executable, "-c", SPAWNED], 30, 40)
    assert refused.returncode == 1
    assert "ConfigError: spawn of 8 ranks needs 48 open files beside the " in refused.stderr


@pytest.mark.parametrize(("ranks", "said"), [(2, "a launcher of 2 ranks needs 24 open files"), (50, "a launcher of 50 ranks needs 216")])
def test_a_launcher_that_could_not_serve_its_ranks_starts_none(ranks, said, tmp_path):
    """torch's store leaves them waiting for an answer."""
    command = f"""
from pathlib import Path
from rankloom.world.agent import launch_ranks
launch_ranks({ranks}, ["python", "-c", "open('started', 'w')"], log_dir=Path("logs"))
"""
    done = run([sys.executable, "-c", command], 22, 22, tmp_path)
    assert done.returncode == 1 and f"ConfigError: {said}" in done.stderr, done.stderr
    assert not os.listdir(tmp_path)
