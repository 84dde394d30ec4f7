"""Two hosts that are network namespaces of this machine, two ranks on each: real processes, real addresses, no host names.

Run by its own tests as a script too: what one rank does.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from patience import AT_ONCE
from rankloom.transport import register
from rankloom.world import leash

ROOT = Path(__file__).parents[3]
SIZE, PORT = 4, 29561

# ---------------------------------------------------------------- what a rank does


def tell(what: Any) -> None:
    """A line for the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def everything() -> dict[str, Any]:
    """What can be done when all goes well."""
    return {"rankloom": sums("rankloom"), "gloo": sums("gloo"), "apart": torchs_ddp()}


def sums(backend: str) -> dict[str, Any]:
    """Collectives of a world on several hosts, and of its parts."""
    world = rl.init(rl.Mesh(replicate=2, shard=2), backend=backend, timeout=60)
    inside, across = world.group("shard"), world.group("replicate")
    channels = [getattr(group._process_group, "channel", None) for group in (world, inside, across)]
    found = {"channels": [type(channel).__name__ for channel in channels],
             "sum": world.all_reduce(torch.full((1 << 20,), float(world.rank + 1)))[-1].item(),
             "inside": inside.all_gather(torch.tensor([world.rank])).tolist(),
             "across": across.all_gather(torch.tensor([world.rank])).tolist()}
    world.close()
    return found


def torchs_ddp() -> float:
    """Train with torch's own DDP, and the same in one process: how far apart the parameters end, as a part of their size."""
    register()
    dist.init_process_group("rankloom")
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).double()
    spread = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    for step in range(3):
        data = [torch.randn(32, 64, dtype=torch.double, generator=torch.Generator().manual_seed(4 * step + rank)) for rank in range(SIZE)]
        for model, parts in ((alone, data), (spread, [data[dist.get_rank()]])):
            model.zero_grad()
            (sum((model(x) - x.sum(1, keepdim=True)).square().mean() for x in parts) / len(parts)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
    dist.destroy_process_group()
    ends = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (spread, alone)]
    return ((ends[0] - ends[1]).norm() / ends[1].norm()).item()


def until_it_fails() -> dict[str, Any]:
    """Sum for ever, in a world that is built anew; what ended it, and when."""
    world = rl.init(backend="rankloom", timeout=60)
    tell("ready")
    try:
        while True:
            world.all_reduce(torch.ones(1 << 18))
    except rl.RankLost as error:
        return {"when": time.monotonic(), "error": str(error)}


# ---------------------------------------------------------------- the hosts


@pytest.fixture(scope="module")
def two_hosts() -> Any:
    """Names of two namespaces, joined; host names resolve in neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import slow_link
    if reason := slow_link.why_not():
        pytest.skip(reason)
    handler = signal.getsignal(signal.SIGTERM)
    with slow_link.two_hosts():
        names = [slow_link.host(number) for number in (0, 1)]
        for name in names:
            (Path("/etc/netns") / name / "hosts").write_text("127.0.0.1 localhost\n")
            (Path("/etc/netns") / name / "resolv.conf").write_text("")
        yield names, slow_link.ADDRESS.format(1)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def ranks(two_hosts: Any) -> Iterator[list[subprocess.Popen]]:
    """A process for each rank; the same for all tests, since each takes seconds to start."""
    (names, master), started = two_hosts, []
    try:
        for rank in range(SIZE):
            place = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": rank // 2,
                     "MASTER_ADDR": master, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1, "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
            # On a leash: a killed test leaves no ranks behind that would keep the namespaces.
            command = [sys.executable, leash.__file__, str(os.getpid()), "ip", "netns", "exec", names[rank // 2], sys.executable, __file__]
            started.append(subprocess.Popen(command, env=os.environ | {key: str(value) for key, value in place.items()},
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def next_word(rank: subprocess.Popen) -> Any:
    """What it tells next."""
    line = next(line for line in iter(rank.stdout.readline, None) if not line.startswith("[Gloo]"))   # older torch prints such lines
    assert line, rank.communicate()[1]
    return json.loads(line)


@pytest.fixture(scope="module")
def found(ranks: list[subprocess.Popen]) -> list[Any]:
    """What each rank found when all went well."""
    return [next_word(rank) for rank in ranks]


@pytest.mark.parametrize("backend", ["rankloom", "gloo"])
def test_ranks_on_hosts_whose_names_do_not_resolve_meet_and_sum(found, backend):
    for rank, mine in enumerate(found):
        assert mine[backend]["sum"] == 10.0
        assert mine[backend]["inside"] == [rank // 2 * 2, rank // 2 * 2 + 1] and mine[backend]["across"] == [rank % 2, rank % 2 + 2]


def test_groups_on_one_host_stay_in_memory_and_others_take_both(found):
    assert all(mine["rankloom"]["channels"] == ["HostsChannel", "Channel", "HostsChannel"] for mine in found)


def test_torchs_own_ddp_trains_as_one_process_does(found):
    """Four gradients in another order, three steps in fp64."""
    assert all(mine["apart"] < 1e-13 for mine in found)


def test_ranks_on_both_hosts_are_told_at_once_which_rank_was_killed_even_if_it_held_the_store(ranks, found):
    assert [next_word(rank) for rank in ranks] == ["ready"] * SIZE
    time.sleep(0.3)
    ranks[0].kill()
    ranks[0].wait()
    killed = time.monotonic()
    for rank in ranks[1:]:
        mine = next_word(rank)
        assert "lost rank 0: its process has ended" in mine["error"]
        assert mine["when"] - killed < AT_ONCE


if __name__ == "__main__":
    torch.set_num_threads(1)
    tell(everything())
    tell(until_it_fails())
