"""Who meets in a store that others have used before."""

import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from patience import AT_ONCE, STARTED
from rankloom.base.errors import RankLost
from rankloom.world import world as worlds
from rankloom.world.transport import meet, process_group
from rankloom.world.transport.meet import Reunion, hear_all, name_of, start_afresh, unset_keys
from rankloom.world.transport.memory import map_together
from rankloom.world.transport.process_group import SharedMemoryGroup
from rankloom.world.world import World

P = 3


@pytest.mark.parametrize("late", range(P))
def test_ranks_that_start_again_meet_each_other_and_not_those_of_before(late):
    store = dist.HashStore()

    def start(rank, life):
        time.sleep(0.05 * (rank == late))   # the others find what was left
        part = start_afresh(store, rank, P, 20.0)
        assert not part.check([f"life/{rank}"])
        part.set(f"life/{rank}", str(life))
        part.wait([f"life/{other}" for other in range(P)])
        return [int(said) for said in part.multi_get([f"life/{other}" for other in range(P)])]

    with ThreadPoolExecutor(P) as ranks:
        for life in range(3):
            assert [*ranks.map(start, range(P), [life] * P)] == [[life] * P] * P


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (2, "0")])
def test_those_that_do_not_start_are_named(rank, missing):
    with pytest.raises(RankLost, match=rf"rank {rank}: rank\(s\) {missing} did not join the group within 0.2 s"):
        start_afresh(dist.HashStore(), rank, P, 0.2)


@pytest.mark.parametrize(("missing", "questions"), [([], 1), ([700], 1 + 2 * 10), ([0, 1023], 1 + 2 * 19)])
def test_who_is_missing_among_many_is_found_with_few_questions(missing, questions):
    """A store that a thousand ranks ask at once has no time to be asked for each of a thousand."""
    asked = []
    store = SimpleNamespace(check=lambda keys: asked.append(keys) or not {f"came/{rank}" for rank in missing} & {*keys})
    assert unset_keys(store, [f"came/{rank}" for rank in range(1024)]) == [f"came/{rank}" for rank in missing]
    assert len(asked) == questions


def test_ranks_that_count_each_other_differently_are_all_told_so():
    store = dist.HashStore()

    def start(rank, size, after):
        time.sleep(after)   # rank 0 knows of the first by then
        return start_afresh(store, rank, size, 20.0)

    begin = time.monotonic()
    with ThreadPoolExecutor(3) as ranks:
        started = [ranks.submit(start, *which) for which in ((0, 3, 0), (1, 4, 0), (2, 3, 0.3))]
        for rank in started:
            with pytest.raises(rl.ConfigError, match="rank 1 was started as one of 4 ranks, rank 0 as one of 3: give all the same WORLD"):
                rank.result()
    assert time.monotonic() - begin < meet.SECONDS_TO_TELL   # nobody waits longer than until the last has come


def test_a_rank_that_counts_differently_is_told_though_another_never_comes(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(meet, "SECONDS_TO_TELL", 0.1)
    with ThreadPoolExecutor(2) as ranks:
        for rank in [ranks.submit(start_afresh, store, rank, size, 20.0) for rank, size in ((0, 3), (1, 4))]:
            with pytest.raises(rl.ConfigError, match="rank 1 was started as one of 4 ranks, rank 0 as one of 3"):
                rank.result()


def test_a_store_that_is_gone_is_a_rank_that_is_lost_whatever_is_asked():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    for _ in range(2):   # the second time the connection is known to be broken
        with pytest.raises(RankLost, match="rank 1: the store in which ranks meet closed"):
            hear_all(client, "it", 1, 2, 1.0, "this")


class Counted:
    """A store that notes, by the last key of each wait, for how many keys it was."""

    def __init__(self):
        self._store, self.awaited = dist.HashStore(), defaultdict(list)

    def wait(self, keys, *timeout):
        self.awaited[keys[-1]].append(len(keys))
        self._store.wait(keys, *timeout)

    def __getattr__(self, name):
        return getattr(self._store, name)


def mapped_by(store, names):
    """What `map_together` does on each rank, which has the kernel of its name; the descriptors are closed by it."""
    kernels = [{name: SimpleNamespace(segment_size=lambda size: 4096)} for name in names]
    with ThreadPoolExecutor(len(names)) as ranks:
        return [ranks.submit(map_together, store, rank, len(names), held, AT_ONCE) for rank, held in enumerate(kernels)]


@pytest.mark.parametrize("p", [2, 33])
def test_the_ranks_of_a_host_map_memory_with_one_wait_for_all_and_two_for_each(p):
    """If each waits for each, the store holds p^2 waits."""
    store = Counted()
    memories = [rank.result() for rank in mapped_by(store, ["C"] * p)]
    memories[-1][0][:3] = b"abc"
    assert all(memory[:3] == b"abc" and kernel == "C" and cores == len(os.sched_getaffinity(0)) for memory, kernel, cores in memories)
    assert store.awaited == {"memory/0": [1] * (p - 1), f"mapped/{p - 1}": [p], "mapped, of all": [1] * (p - 1)}


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_rank_that_cannot_map_the_memory_tells_all_others_why(lacking):
    for rank, made in enumerate(mapped_by(dist.HashStore(), ["Python" if rank == lacking else "C" for rank in range(3)])):
        said = f"rank {lacking}: rank 0 uses the part of rankloom written in C, which this installation lacks"
        assert type(made.exception()) is (rl.ConfigError if rank == lacking else RankLost) and said in str(made.exception())
        assert rank == lacking or str(made.exception()).startswith(f"rank {rank}: rank {lacking} could not share memory: ")


MANY = 4096   # ranks, whose numbers in a row are 19 KiB


def one_of_many(store):
    return SimpleNamespace(rank=lambda: 0, channel=SimpleNamespace(timeout=1.0, ranks=range(MANY)), _store=store)


@pytest.mark.parametrize("build", [lambda store: World(store, 0, MANY, torch.device("cpu"), timeout=1.0, backend="rankloom"),
                                   lambda store: SharedMemoryGroup.split_group(one_of_many(store), [*range(MANY)])], ids=["world", "split"])
def test_a_group_of_thousands_of_ranks_has_keys_that_the_store_takes(build, monkeypatch):
    class Told(Exception):
        pass

    def tell(store, *rank_and_more, **options):
        store.set("key", "value")
        assert store.get("key") == b"value"
        raise Told

    for module in (worlds, process_group):
        monkeypatch.setattr(module, "build", tell)
    with pytest.raises(Told):
        build(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))


@pytest.mark.parametrize(("call", "of"), [("getuid", ()), ("readlink", ("/proc/self/ns/pid",)), ("readlink", ("/proc/self/ns/net",))])
def test_processes_of_another_user_or_namespace_are_taken_for_those_of_another_host(call, of, monkeypatch):
    """They cannot open each other's memory, or do not see each other."""
    here, real = meet.this_host(), getattr(os, call)
    monkeypatch.setattr(os, call, lambda *args: "another" if args == of else real(*args))
    assert meet.this_host.__wrapped__() != here


def test_groups_of_other_ranks_have_other_names():
    groups = [range(12), range(11), (1, 2), (12,), (2, 1), ()]
    assert len({name_of(ranks) for ranks in groups}) == len(groups) and name_of(range(12)) == name_of([*range(12)])


@pytest.mark.parametrize(("rank", "when"), [(0, ""), (1, r" after \d.\d s")])   # rank 0 looks again and again who has come
def test_a_store_that_ends_with_its_rank_is_no_time_out(rank, when):
    """Rank 0 of a group need not be the rank that serves the store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with ThreadPoolExecutor(1) as one:
        waiting = one.submit(start_afresh, client, rank, 2, AT_ONCE)
        time.sleep(0.2)
        del server
        with pytest.raises(RankLost, match=rf"rank {rank}: the store in which ranks meet closed{when}"):
            waiting.result()


def test_a_store_that_ends_shortly_before_the_time_out_is_no_time_out_either():
    def end(*_):
        time.sleep(0.1)
        raise RuntimeError("closed")

    with pytest.raises(RankLost, match=r"rank 1: the store in which ranks meet closed after \d.\d s"):
        meet.wait_for(SimpleNamespace(wait=end, check=end), {"it/0": 0, "it/1": 1}, 1, 0.15)


def test_those_that_do_not_come_to_make_another_group_are_named_in_time():
    reunion = Reunion("again", dist.HashStore(), [0, 1], list)
    with pytest.raises(RankLost, match=r"rank 0: rank\(s\) 1 did not join the group within 0.1 s"):
        hear_all(reunion, "it", 0, 2, 0.1, "")


def test_errors_of_a_group_number_its_ranks_as_the_world_does():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        meeting = [ranks.submit(start_afresh, store, rank, 3, seconds, ranks=[4, 5, 7]) for rank, seconds in ((0, 2.0), (1, 0.5))]
        for name, waiting in zip([4, 5], meeting):
            with pytest.raises(RankLost, match=rf"rank {name}: rank\(s\) 7 did not join the group"):
                waiting.result()
    with pytest.raises(RankLost, match=r"rank 5: rank\(s\) 4 did not join the group"):
        start_afresh(dist.HashStore(), 1, 3, 0.2, ranks=[4, 5, 7])
    with pytest.raises(RankLost, match=r"rank 5: rank\(s\) 7 did not join the group"):
        store.set("it/0", "")
        hear_all(store, "it", 1, 3, 0.2, "", ranks=[4, 5, 7])
    with pytest.raises(RankLost, match=r"rank 5: rank\(s\) 4 did not join the group"):
        map_together(store, 1, 3, {"C": SimpleNamespace()}, 0.2, ranks=[4, 5, 7])


def use_torchs_groups_twice(world):
    """At the top of the module, for processes: torch numbers its groups anew, and rank 0, which serves the memory, comes late."""
    store, sums = dist.PrefixStore("torch", world._store), []
    for _ in range(2):
        time.sleep(0.3 * (world.rank == 0))
        dist.init_process_group("rankloom", store=store, rank=world.rank, world_size=world.size)
        for group in (None, dist.new_group([0, 1])):
            dist.all_reduce(x := torch.ones(1), group=group)
            sums.append(x.item())
        dist.destroy_process_group()
    return sums


def test_torchs_groups_may_be_built_anew_over_one_store():
    assert rl.spawn(2, use_torchs_groups_twice) == [[2.0] * 4] * 2


def make_a_group(world):
    """At the top of the module, for processes. Rank 1 has left its world when the others make groups, two of them with it."""
    if world.rank == 1:
        world.close()
        return None
    begin = time.monotonic()
    try:
        world.group("shard")
    except RankLost as error:
        assert time.monotonic() - begin < AT_ONCE
        return str(error)
    return "made"


def test_ranks_in_shared_memory_do_not_wait_in_the_store_for_one_that_has_left():
    told = rl.spawn(rl.Mesh(replicate=2, shard=3), make_a_group, timeout=STARTED, backend="rankloom")
    assert told[1] is None and told[3:] == ["made"] * 3
    for rank in (0, 2):   # the one that is told first ends, too
        assert re.fullmatch(rf"rank {rank}: rank\(s\) (0, )?1(, 2)? ended, or left, before all ranks came to make a group", told[rank])


def make_a_group_of_torch(world):
    """At the top of the module, for processes."""
    dist.init_process_group("rankloom", store=dist.PrefixStore("torch", world._store), rank=world.rank, world_size=world.size)
    if world.rank == 1:
        dist.destroy_process_group()
        return None
    begin = time.monotonic()
    with pytest.raises(RankLost) as caught:
        dist.new_group([0, 1])
    assert time.monotonic() - begin < AT_ONCE
    return str(caught.value)


def test_nor_do_ranks_that_make_a_group_of_torch():
    told = rl.spawn(2, make_a_group_of_torch, timeout=STARTED)
    assert told == ["rank 0: rank(s) 1 ended, or left, before all ranks came to make a group", None]


@pytest.mark.parametrize("rank", range(P))
def test_those_that_are_gone_are_named_at_once_in_parts_of_the_part_too(rank):
    reunion = Reunion("again", dist.HashStore(), [2, 3, 4], lambda: [3, 9])
    store = dist.PrefixStore("part", dist.PrefixStore("of a part", reunion))
    said = rf"rank {rank + 2}: rank\(s\) 3 ended, or left, before all ranks came to make a group"
    for meeting in (start_afresh, partial(hear_all, what="it", mine="this")):
        with pytest.raises(RankLost, match=said):
            meeting(store, rank=rank, size=P, timeout=STARTED, ranks=[2, 3, 4])


FILES_OF_A_PAGE = """
import resource
from rankloom.world.transport.memory import create_memory
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    create_memory(8192)
except MemoryError as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files_is_named_where_it_limits_memory():
    """Python ignores the signal that the kernel sends first."""
    said = subprocess.run([sys.executable, "-c", FILES_OF_A_PAGE], capture_output=True, text=True, check=True, timeout=STARTED).stdout
    assert said.startswith("8,192 bytes of shared memory are more than this process may write to a file: raise the limit (ulimit -f)")
