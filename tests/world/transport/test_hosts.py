"""Groups on several hosts, pretended by threads: each bit, what travels between hosts, and life. test_namespaces.py has real ones."""

import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bell import Bell, bell_once_inside
from conformance.cases import Case, random_case
from conformance.faults import KINDS, Injection, Pool, inject
from conformance.ranks import Ranks, seconds
from conformance.test_collectives import run_and_check
from patience import AT_ONCE, wait_until
from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, RankLost, ShapeMismatch
from rankloom.world.group import Group
from rankloom.world.transport import buffers, dial, levels, position, wire
from rankloom.world.transport.codes import ANYONE, LEFT
from rankloom.world.transport.dial import dial_all
from rankloom.world.transport.hosts import HostsChannel
from rankloom.world.transport.lines import HEAD, Mailbox, Message
from rankloom.world.transport.position import Position
from rankloom.world.transport.turns import Turns
from rankloom.world.transport.wire import LEAVING, NEWS, PART, Wire
from world.transport.test_kernel import in_child

EVEN, UNEVEN = ["ab", "abab", "aabbcc", "abcd", "aaabbb"], ["aab", "abbcb", "aaab", "abbbcc"]   # a letter for the host of each rank
LARGE = 3 << 18   # floats: more than one window


@pytest.fixture
def ranks():
    """`ranks(hosts)`: a rank for each letter."""
    made = []
    yield lambda hosts, timeout=60.0: made.append(Ranks(len(hosts), timeout, hosts=hosts)) or made[-1]
    for each in made:
        each.close()


@pytest.fixture
def small_windows(monkeypatch):
    """So that some KiB are several windows, and not small."""
    monkeypatch.setattr(levels, "WINDOW", 1 << 12)
    monkeypatch.setattr(levels, "SMALL", 1 << 8)


@pytest.fixture
def sent(monkeypatch):
    """Counts the bytes that each rank sends to each other: [from, to]."""
    counted, send = Counter(), Wire.send

    def count(self, kind, peer, tag, data):
        counted[self.rank, peer] += data.nbytes * (kind == PART)
        return send(self, kind, peer, tag, data)

    monkeypatch.setattr(Wire, "send", count)
    return counted


def nodes_of(hosts):
    return [[rank for rank, host in enumerate(hosts) if host == one] for one in dict.fromkeys(hosts)]


def position_of(hosts, rank):
    return Position(nodes_of(hosts), rank)


def on_every_rank(world, body):
    """body(group, rank) on all ranks."""
    return world.run(lambda rank: body(world.groups[rank], rank))


def all_reduce(group, x):
    group.allreduce([x]).wait()
    return x


# ---------------------------------------------------------------- who carries what


@pytest.mark.parametrize("hosts", EVEN + UNEVEN)
def test_every_lane_is_carried_on_every_host_by_exactly_one_rank_and_at_home_by_its_own(hosts):
    for node in nodes_of(hosts):
        carried = [rank for row in position_of(hosts, node[0]).rounds for rank in row if rank is not None]
        assert sorted(carried) == list(range(len(hosts)))
        assert list(position_of(hosts, node[0]).rounds[0]) == node


@pytest.mark.parametrize("hosts", EVEN + UNEVEN)
def test_ranks_of_one_host_agree_on_who_carries_what_and_deputies_carry_it(hosts):
    for node in nodes_of(hosts):
        rounds = position_of(hosts, node[0]).rounds
        assert all(position_of(hosts, rank).rounds == rounds for rank in node)
        for rank in range(len(hosts)):
            deputy = position_of(hosts, rank).deputies[nodes_of(hosts).index(node)]
            assert any(row[node.index(deputy)] == rank for row in rounds)


def test_who_carries_what_is_known_before_the_first_call(ranks, monkeypatch):
    """It does not change, and takes as long as there are ranks."""
    world = ranks("abab")
    monkeypatch.setattr(position, "_rounds", None)
    assert world.run(lambda rank: Group(world.groups[rank]).all_gather(torch.tensor([rank])).tolist()) == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("hosts", EVEN)
def test_where_hosts_are_equal_every_rank_is_in_one_team_that_has_one_rank_of_each_host(hosts):
    teams = {tuple(position_of(hosts, rank).team) for rank in range(len(hosts))}
    assert sorted(rank for team in teams for rank in team) == list(range(len(hosts)))
    assert all(len({hosts[rank] for rank in team}) == len(set(hosts)) == len(team) for team in teams)


@pytest.mark.parametrize("hosts", UNEVEN)
def test_where_hosts_differ_in_size_their_first_ranks_are_the_only_team(hosts):
    firsts = [node[0] for node in nodes_of(hosts)]
    assert [position_of(hosts, rank).team for rank in range(len(hosts))] == [firsts if rank in firsts else [] for rank in range(len(hosts))]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("hosts", EVEN + UNEVEN)
def test_random_programs_give_every_rank_every_bit(ranks, small_windows, hosts):
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(st.lists(random_case(len(hosts)), min_size=1, max_size=24))
    def run(cases):
        run_and_check(world, cases)

    world = ranks(hosts)
    run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hosts", ["abab", "abc", "aab"])
def test_sums_of_any_length_are_right_in_windows(ranks, small_windows, hosts, dtype):
    world = ranks(hosts)
    run_and_check(world, [Case("allreduce", dtype, "sum", (n,), seed=n) for n in (*range(1, 9), 63, 65, 127, 1023, 1025, 3001, 10007)])


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abcd"])
def test_sums_of_16_bit_floats_are_rounded_once(ranks, hosts):
    """1 + four times 2^-9: rounded after each addition, or after those of a host, it stays 1."""
    bits = {0: 1.0}
    world = ranks(hosts)
    brought = [bits.get(rank, 2.0**-9) for rank in range(len(hosts))]
    exact = torch.tensor(sum(brought)).bfloat16()
    for x in on_every_rank(world, lambda group, rank: all_reduce(group, torch.full((5,), brought[rank], dtype=torch.bfloat16))):
        assert torch.equal(x, exact.expand(5))
    assert exact > 1 or len(hosts) < 4


@pytest.mark.filterwarnings("error")
def test_a_sum_over_hosts_that_is_too_large_is_infinite_without_a_warning(ranks):
    assert on_every_rank(ranks("ab"), lambda group, rank: all_reduce(group, torch.tensor([3e38])).item()) == [float("inf")] * 2


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_a_group_works_as_torchs_and_as_ours(ranks, hosts):
    world = ranks(hosts)

    def body(group, rank):
        ours = Group(group, rank, range(len(hosts)))
        everyone = ours.all_gather(torch.tensor([float(rank)]))
        ours.send(torch.tensor([rank]), (rank + 1) % len(hosts), async_op=True)
        left = ours.recv(torch.tensor([-1]), (rank - 1) % len(hosts))
        ours.barrier()
        return everyone.tolist(), left.item(), ours.all_gather_object({"rank": rank})[-1]

    everyone = list(map(float, range(len(hosts))))
    assert on_every_rank(world, body) == [(everyone, (rank - 1) % len(hosts), {"rank": len(hosts) - 1}) for rank in range(len(hosts))]


def test_a_part_of_a_group_whose_ranks_share_a_host_talks_in_memory_only(ranks, sent):
    world = ranks("aabb")
    pair = world.group([0, 1])
    assert not any(isinstance(group.channel, HostsChannel) for group in pair) and isinstance(world.groups[0].channel, HostsChannel)
    sent.clear()
    sums = world.run(lambda rank: all_reduce(pair[rank], torch.ones(LARGE)), 2)
    assert all((x == 2).all() for x in sums) and not sent.total()


def test_a_buffer_may_be_summed_where_it_lies(ranks):
    def body(group, rank):
        memory = group.buffer((LARGE,))
        assert not memory.any()
        return all_reduce(group, memory.fill_(rank + 1))

    assert all((x == 10).all() for x in on_every_rank(ranks("aabb"), body))


def test_ranks_of_all_hosts_are_refused_a_buffer_when_one_asks_for_another(ranks):
    world = ranks("aab")
    errors = world.errors(lambda rank: world.groups[rank].buffer((4 + (rank == 2),)))
    assert [type(error) for error in errors] == [ShapeMismatch] * 3 and "[4, 'torch.float32']" in str(errors[0])


def test_ranks_of_all_hosts_are_refused_a_buffer_when_one_may_open_no_more_files(ranks, monkeypatch):
    world, calls = ranks("aabb", 5.0), count()

    def refuse_the_first(files, what):
        if next(calls) == 0:
            raise ConfigError(f"{what} needs {files} files")

    monkeypatch.setattr(buffers, "make_room", refuse_the_first)
    errors = world.errors(lambda rank: world.groups[rank].buffer((4,)))
    assert [type(error) for error in errors] == [ConfigError] * 4 and "a tensor in shared memory needs 4 files" in str(errors[3])


# ---------------------------------------------------------------- what travels between hosts


def between_hosts(sent, hosts):
    """Bytes that went from one host to another, by sender; and whether any went inside a host."""
    assert not any(n for (frm, to), n in sent.items() if hosts[frm] == hosts[to]), "inside a host nothing takes the network"
    return [sum(n for (frm, _), n in sent.items() if frm == rank) for rank in range(len(hosts))]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbb"])
def test_an_all_reduce_sends_the_tensor_once_from_a_host_in_equal_shares(ranks, sent, hosts):
    world, n = ranks(hosts), 6 * LARGE
    sent.clear()
    on_every_rank(world, lambda group, rank: all_reduce(group, torch.ones(n)))
    assert between_hosts(sent, hosts) == [4 * n * 2 // len(hosts)] * len(hosts)


def test_with_more_hosts_an_all_reduce_sends_what_a_ring_over_them_would(ranks, sent):
    world, n = ranks("abcd"), 4 * LARGE
    sent.clear()
    on_every_rank(world, lambda group, rank: all_reduce(group, torch.ones(n)))
    assert between_hosts(sent, "abcd") == [4 * n * 2 * 3 // 4] * 4


def test_16_bit_sums_travel_in_fp32_one_way_and_in_16_bits_back(ranks, sent):
    world, n = ranks("aabb"), 4 * LARGE
    sent.clear()
    on_every_rank(world, lambda group, rank: all_reduce(group, torch.ones(n, dtype=torch.bfloat16)))
    assert between_hosts(sent, "aabb") == [(4 + 2) * n // 4] * 4


def test_where_hosts_differ_only_the_first_ranks_send(ranks, sent):
    world, n = ranks("aab"), LARGE
    sent.clear()
    on_every_rank(world, lambda group, rank: all_reduce(group, torch.ones(n)))
    assert between_hosts(sent, "aab") == [4 * n, 0, 4 * n]


def test_small_sums_take_one_step_between_hosts(ranks, sent):
    world = ranks("abcd")
    sent.clear()
    on_every_rank(world, lambda group, rank: all_reduce(group, torch.ones(100)))
    assert between_hosts(sent, "abcd") == [3 * 400] * 4


@pytest.mark.parametrize("hosts", ["aabb", "aab", "aabbcc"])
def test_what_is_gathered_goes_to_each_other_host_once(ranks, sent, hosts):
    world, p, n = ranks(hosts), len(hosts), 1000
    sent.clear()
    on_every_rank(world, lambda group, rank: group._allgather_base(torch.empty(p * n), torch.ones(n)).wait())
    assert between_hosts(sent, hosts) == [4 * n * (len(set(hosts)) - 1)] * p


@pytest.mark.parametrize("hosts", ["aabb", "aab", "aabbcc"])
def test_what_is_scattered_and_summed_leaves_a_host_as_one_sum_for_each_rank_elsewhere(ranks, sent, hosts):
    world, p, n = ranks(hosts), len(hosts), 1000
    sent.clear()
    on_every_rank(world, lambda group, rank: group._reduce_scatter_base(torch.empty(n), torch.ones(p * n)).wait())
    leaving = between_hosts(sent, hosts)
    for node in nodes_of(hosts):
        assert sum(leaving[rank] for rank in node) == 4 * n * (p - len(node))


def test_a_broadcast_leaves_the_roots_host_once_in_shares_and_the_other_hosts_trade_their_parts(ranks, sent):
    world, n, options = ranks("aabbcc"), 12 * LARGE, dist.BroadcastOptions()
    options.rootRank = 1
    sent.clear()
    got = on_every_rank(world, lambda group, rank: group.broadcast([x := torch.full((n,), float(rank))], options).wait() and x)
    assert all((x == 1).all() for x in got)
    assert between_hosts(sent, "aabbcc") == [2 * n, 2 * n] + [n] * 4


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_messages_to_all_go_straight(ranks, sent, hosts):
    world, p, n = ranks(hosts), len(hosts), 10
    sent.clear()
    on_every_rank(world, lambda group, rank: group.alltoall_base(torch.empty(p * n), torch.ones(p * n), [], []).wait())
    assert between_hosts(sent, hosts) == [4 * n * sum(other != host for other in hosts) for host in hosts]


# ---------------------------------------------------------------- ranks that do not agree, and that go


def test_no_rank_goes_on_when_one_pair_on_other_hosts_disagrees_about_a_length(ranks):
    """Ranks 0 and 1 have nothing to do with it, and could have been done."""
    world = ranks("abcd")
    rows = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 3], [1, 1, 1, 1]]   # [from][to]; rank 3 expects 1 of rank 2

    def deal(rank):
        group, x = world.groups[rank], torch.ones(sum(rows[rank]))
        group.alltoall_base(torch.empty(4), x, [1] * 4, rows[rank]).wait()

    assert [type(error) for error in world.errors(deal)] == [CollectiveMismatch] * 4


def gather(group, rank, root):
    options = dist.GatherOptions()
    options.rootRank = root
    group.gather([[torch.empty(1) for _ in range(4)]] if rank == root else [], [torch.ones(1)], options).wait()


def test_no_rank_goes_on_when_roots_differ_between_hosts(ranks):
    """Every host waits for the other: nothing would ever be sent."""
    world = ranks("aabb")
    begin = time.monotonic()
    errors = world.errors(lambda rank: gather(world.groups[rank], rank, rank // 2 * 2))
    assert [type(error) for error in errors] == [CollectiveMismatch] * 4 and time.monotonic() - begin < AT_ONCE
    assert "gather(root rank 0)" in str(errors[3]) and "gather(root rank 2)" in str(errors[0])


def test_calls_of_different_kinds_within_a_host_are_shown_whatever_lengths_they_tell_of(ranks):
    world = ranks("aabb")
    calls = [lambda group, x: all_reduce(group, x), lambda group, x: group.allgather([[*torch.zeros(4, 4)]], [x]).wait()]
    for error in world.errors(lambda rank: calls[rank == 1](world.groups[rank], torch.ones(4))):
        assert "rank 0: all_reduce(sum), 16 bytes" in str(error) and "rank 1: all_gather, lengths" in str(error)


def test_a_rank_that_has_not_come_when_others_differ_is_said_not_to_have_come(ranks):
    """Its last call was shown, which is another."""
    world, told = ranks("aabb"), threading.Barrier(4, timeout=AT_ONCE)

    def body(rank):
        if rank == 3:
            told.wait()
        try:
            gather(world.groups[rank], rank, rank // 2 * 2)
        finally:
            told.wait() if rank != 3 else None

    errors = world.errors(body)
    assert "rank 2: gather(root rank 2)" in str(errors[0]) and "rank 3: has not come to this call" in str(errors[0])


def test_a_time_out_names_the_rank_on_another_host_and_not_those_that_wait_for_it(ranks):
    world = ranks("aabb", timeout=2.0)
    errors = world.errors(lambda rank: rank == 3 or all_reduce(world.groups[rank], torch.ones(LARGE)))
    for rank in range(3):
        assert "rank 3 (slow, or it skipped this call) did not come" in str(errors[rank])
        assert "rank 0 (" not in str(errors[rank]) and "rank 2 (" not in str(errors[rank])


def test_several_threads_of_a_rank_may_ask_at_once_what_the_others_do(ranks, monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 20.0)   # it is asked whether answers come, not how soon
    link = ranks("aabbc").groups[0].channel.link
    begin, told = time.monotonic(), []
    asking = [threading.Thread(target=lambda: told.append(link.status()[3])) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert told == [["S"] * 5] * 8 and time.monotonic() - begin < AT_ONCE


def test_a_call_that_is_interrupted_while_it_waits_for_its_turn_is_never_made(ranks):
    """Its memory may be another's by then."""
    world = ranks("ab")
    first = world.groups[0].allreduce([torch.ones(4)])   # in the background, and rank 1 is late
    with pytest.raises(Bell), bell_once_inside(Turns.wait):
        Group(world.groups[0]).all_reduce(torch.ones(4))
    wait_until(lambda: world.groups[1].channel.link.status()[0])   # rank 1 has heard; else it may end what it has all parts of
    for wait in (first.wait, world.groups[1].allreduce([torch.ones(4)]).wait):
        with pytest.raises(RankLost, match="lost rank 0: it was interrupted"):
            wait()


def test_a_forked_child_that_waits_for_what_its_parent_has_begun_is_told_that_it_is_no_rank(ranks):
    def in_vain():
        with pytest.raises(ConfigError, match="forked"):
            work.wait()
        return 7

    world = ranks("ab")
    work = world.groups[0].allreduce([x := torch.ones(4)])
    assert in_child(in_vain) == 7
    world.groups[1].allreduce([torch.ones(4)]).wait()
    assert work.wait() and x.tolist() == [2.0] * 4


def test_a_forked_child_holds_no_connection_of_its_parent(ranks):
    """While it lived, nobody could see that its parent has died."""
    wire = ranks("ab").groups[0].channel.link._wire
    assert in_child(lambda: sum(line.sock.fileno() >= 0 for line in wire._lines.values())) == 0 != wire._lines[1].sock.fileno()


def test_a_child_that_is_forked_after_its_group_has_ended_closes_none_of_the_files_opened_since(ranks):
    """The group's objects may live on, as in a model that holds them; a worker of a DataLoader died of it."""
    world = ranks("ab")
    for group in world.groups:
        group.shutdown()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]   # they take the numbers that the group has given back
    try:
        assert in_child(lambda: sum(not os.path.exists(f"/proc/self/fd/{file}") for file in files)) == 0
    finally:
        for file in files:
            os.close(file)


def test_a_rank_that_has_left_is_told_from_one_that_lives_without_asking_it(ranks):
    world = ranks("aab")
    channel = world.groups[0].channel
    assert channel.gone() == [] and channel.link.status()[3] == ["S"] * 3
    world.groups[2].shutdown()
    wait_until(lambda: channel.gone() == [2])
    assert channel.link.status()[3] == ["S", "S", "L"]


@pytest.fixture(scope="module")
def pool():
    """Processes to strike."""
    made = Pool()
    yield made
    made.end()


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abbca"])
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_on_all_hosts_are_told_who_is_gone_and_nothing_is_left_behind(pool, kind, hosts):
    outcome = inject(pool, Injection.draw(len(hosts), kind, hosts))
    assert not outcome.problems and outcome.late < AT_ONCE, outcome


def test_memory_of_a_message_that_was_given_up_is_not_touched_any_more(ranks):
    world = ranks("ab", timeout=0.2)
    sender, receiver = (group.channel.link for group in world.groups)
    target, given = torch.zeros(LARGE), torch.ones(LARGE)
    assert receiver.message(0, target.data_ptr(), target.nbytes, 0, 5, 0.05) < 0, "nothing came"
    handle = sender.post(1, given.data_ptr(), given.nbytes, 1, 5)
    time.sleep(0.2)
    assert not target.any()
    sender.drop(handle)


def test_memory_of_a_collective_that_has_failed_is_not_touched_any_more(ranks):
    """What was on its way may still come."""
    world, x, options = ranks("ab", timeout=0.2), torch.zeros(4), dist.BroadcastOptions()
    options.rootRank, options.asyncOp = 1, False
    here, there = (group.channel.link._wire for group in world.groups)
    with pytest.raises(CollectiveTimeout):
        world.groups[0].broadcast([x], options)
    late, last = (there.send(PART, 0, tag, memoryview(b"late" * 4)) for tag in (here.call_number, 7))
    wait_until(lambda: any(m.tag == last.tag and m.done for m in here._mailbox.aside))
    assert late.done and not x.any()


def test_a_message_that_its_sender_forgets_arrives_as_it_was_then(ranks):
    world = ranks("ab")
    sender, receiver = (group.channel.link for group in world.groups)
    given, target = torch.ones(16 * LARGE), torch.zeros(16 * LARGE)
    handle = sender.post(1, given.data_ptr(), given.nbytes, 1, 5)
    assert not sender.settled(handle)
    sender.drop(handle)
    given.fill_(2.0)   # the memory may be another's by now
    assert receiver.message(0, target.data_ptr(), target.nbytes, 0, 5, 20.0) == 0
    assert target.eq(1.0).all()


def test_a_message_to_oneself_is_received_and_then_awaited_no_more_and_one_of_another_length_is_refused(ranks):
    group = ranks("ab").groups[0]
    work = group.recv([x := torch.zeros(4)], 0, 5)
    assert group.send([torch.ones(4)], 0, 5).wait() and work.wait() and x.all()
    assert not group.channel.link._wire._mailbox.awaited
    work = group.recv([x], 0, 5)
    group.send([torch.ones(2)], 0, 5)
    with pytest.raises(CollectiveMismatch, match="another number of bytes"):
        work.wait()


def test_a_rank_that_leaves_sends_first_what_it_has_promised(ranks, monkeypatch):
    monkeypatch.setattr(wire, "LINGER", AT_ONCE)
    world = ranks("ab")
    sent = world.groups[0].send([torch.ones(16 * LARGE).view(torch.uint8)], 1)   # more than a connection holds: most is still to be sent
    world.groups[0].shutdown()
    assert receive(world.groups[1], 64 * LARGE, 0).view(torch.float32).eq(1).all()
    assert sent.is_completed()


def test_a_rank_that_said_goodbye_has_left_also_where_its_connection_ends_in_the_same_moment():
    mine, theirs = socket.socketpair()
    theirs.sendall(HEAD.pack(NEWS, LEAVING, 0))
    theirs.close()
    mine.setblocking(False)
    alone = Wire(0, {1: mine}, bool)
    m = alone.receive(PART, 1, 0, memoryview(bytearray(4)))
    assert alone.wait([m], time.monotonic() + AT_ONCE) == LEFT
    alone.leave()


def test_of_two_threads_that_leave_at_once_only_one_closes(monkeypatch):
    """Files that are opened afterwards may have the numbers of those that it has closed."""
    monkeypatch.setattr(wire, "LINGER", 0.3)
    mine, silent = socket.socketpair()
    mine.setblocking(False)
    alone, woken = Wire(0, {1: mine}, bool), []
    wake = alone._watch.wake
    monkeypatch.setattr(alone._watch, "wake", lambda: woken.append(wake()))
    message = alone.send(PART, 1, 0, memoryview(bytearray(8 << 20)))   # more than the connection holds
    leaving = [threading.Thread(target=alone.leave) for _ in range(2)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    assert len(woken) == 1 and not message.done
    silent.close()


def test_a_connection_that_has_ended_is_not_read_again():
    """A thread that did so without end took a core."""
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    alone, served = Wire(0, {1: mine}, bool), []
    serve = alone._serve
    alone._serve = lambda *args: served.append(serve(*args))
    theirs.close()
    wait_until(lambda: alone.why_gone(1))
    time.sleep(0.05)   # it would be read some thousand times
    assert len(served) < 5
    alone.leave()


def test_a_rank_that_leaves_does_not_linger_for_what_one_that_has_died_can_no_longer_get(monkeypatch):
    monkeypatch.setattr(wire, "LINGER", 2 * AT_ONCE)
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    theirs.close()
    alone, begin = Wire(0, {1: mine}, bool), time.monotonic()
    alone.send(PART, 1, 0, memoryview(bytearray(8)))
    alone.leave()
    assert time.monotonic() - begin < AT_ONCE


def test_a_message_of_anyone_is_waited_for_until_all_others_have_left(ranks):
    world = ranks("abc")
    world.groups[1].shutdown()
    work = world.groups[0].recv_anysource([torch.zeros(4)])
    with pytest.raises(CollectiveTimeout):
        work.wait(seconds(0.2))
    world.groups[2].shutdown()
    with pytest.raises(RankLost, match="it has left the group"):
        work.wait()


def test_a_message_of_anyone_may_have_come_before_it_is_asked_for_and_comes_with_its_sender(ranks):
    world, given, got = ranks("abc"), torch.ones(4), torch.zeros(4)
    sender, receiver = (world.groups[rank].channel.link for rank in (2, 0))
    handle = sender.post(1, given.data_ptr(), given.nbytes, 0, 5)
    wait_until(lambda: receiver._wire._mailbox.aside)
    assert receiver.message(0, got.data_ptr(), got.nbytes, ANYONE, 5, 1.0) == 2 and got.all()
    sender.drop(handle)


def test_a_rank_that_has_died_ends_the_wait_for_a_message_of_another(ranks):
    world = ranks("abc")
    work = world.groups[0].recv([torch.zeros(4)], 2, 0)
    for line in world.groups[1].channel.link._wire._lines.values():
        line.sock.shutdown(socket.SHUT_RDWR)   # without a word, as when its process is killed
    with pytest.raises(RankLost, match="lost rank 1: its process has ended"):
        work.wait()


# ---------------------------------------------------------------- messages that nobody has asked for yet


def put_aside(group, more_than=-1):
    """Bytes put aside, once there are more than so many and no more come."""
    mailbox, before = group.channel.link._wire._mailbox, -1
    wait_until(lambda: sum(m.data.nbytes for m in mailbox.aside) > more_than)
    for _ in range(100):
        if before == (now := sum(m.data.nbytes for m in mailbox.aside)):
            return now
        before = now
        time.sleep(0.1)
    raise AssertionError("it never ends")


def test_a_message_that_is_still_being_put_aside_is_for_the_first_of_two_receives():
    mailbox, first, second = Mailbox(), *(Message(PART, 1, 5, memoryview(bytearray(4)), 4) for _ in range(2))
    early = mailbox.open(PART, 1, 5, 4)
    assert mailbox.ask(first) is early and mailbox.ask(second) is None
    early.data[:], early.done = b"here", True
    assert mailbox.hand_over(early) and first.done and first.data == b"here"
    assert mailbox.awaited == {second} and not second.done and not mailbox.unasked


@pytest.fixture(params=[1 << 18, 1 << 20], ids=["256 KiB", "1 MiB"])
def full(ranks, monkeypatch, request):
    """Two ranks, the works of many messages from the first that the second has not asked for, and how long each is."""
    monkeypatch.setattr(wire, "ASIDE", 1 << 20)
    n, world = request.param, ranks("ab")
    count = (60 << 20) // n   # 60 MiB, far more than what two kernels hold for a connection
    works = [world.groups[0].send([torch.full((n,), k % 251, dtype=torch.uint8)], 1, k % 2) for k in range(count)]
    aside = put_aside(world.groups[1], more_than=wire.ASIDE)
    assert wire.ASIDE < aside <= wire.ASIDE + wire.AT_ONCE * n and not works[-1].is_completed(), "the sender waits"
    yield world, works, n
    assert all(work.wait() for work in works)


def receive(group, n, tag):
    group.recv([x := torch.zeros(n, dtype=torch.uint8)], 0, tag).wait()
    return x


def test_a_receive_that_was_given_up_is_not_read_for(ranks, monkeypatch):
    monkeypatch.setattr(wire, "ASIDE", 1 << 20)
    world, n = ranks("ab"), 1 << 20
    link = world.groups[1].channel.link
    link.drop(link.post(0, (x := torch.zeros(4)).data_ptr(), x.nbytes, 0, 7))
    works = [world.groups[0].send([torch.zeros(n, dtype=torch.uint8)], 1) for _ in range(60)]
    assert put_aside(world.groups[1]) <= wire.ASIDE + wire.AT_ONCE * n and not works[-1].is_completed()


def test_a_receiver_that_waits_for_nothing_stops_reading_and_loses_nothing(full):
    world, works, n = full
    for k in range(len(works)):
        assert (receive(world.groups[1], n, k % 2) == k % 251).all(), k
    assert put_aside(world.groups[1]) == world.groups[1].channel.link._wire._mailbox.unasked == 0


def test_a_message_behind_more_than_is_put_aside_is_reached(full):
    world, works, n = full
    for k in [*range(1, len(works), 2), *range(0, len(works), 2)]:
        assert (receive(world.groups[1], n, k % 2) == k % 251).all(), k


def test_a_receive_that_is_only_looked_at_comes_too(full):
    world, works, n = full
    xs = [torch.zeros(n, dtype=torch.uint8) for _ in works]
    coming = [world.groups[1].recv([x], 0, k % 2) for k, x in enumerate(xs)]
    for _ in range(400):
        if all(work.is_completed() for work in coming):
            break
        time.sleep(0.05)
    assert all((x == k % 251).all() for k, x in enumerate(xs))


def test_a_rank_that_has_asked_for_a_message_reads_on_though_it_does_not_wait(full):
    """What it has asked for may be behind all that."""
    world, works, _ = full
    link = world.groups[1].channel.link
    handle = link.post(0, (x := torch.zeros(4)).data_ptr(), x.nbytes, 0, 7)
    assert all(work.wait() for work in works)
    link.drop(handle)


def test_collectives_and_questions_pass_by_what_nobody_has_asked_for(full, monkeypatch):
    world, works, n = full
    monkeypatch.setattr(wire, "PATIENCE", 20.0)   # it is asked whether an answer comes, not how soon
    assert world.groups[1].channel.link.status()[3] == ["S", "S"]
    sums = on_every_rank(world, lambda group, rank: [group.barrier().wait(), all_reduce(group, torch.ones(LARGE))][1])
    assert all((x == 2).all() for x in sums)
    for k in range(len(works)):
        assert (receive(world.groups[1], n, k % 2) == k % 251).all(), k


def test_a_rank_that_waits_inside_its_host_hears_what_happens_on_another(ranks, monkeypatch):
    """Rank 0 waits in shared memory, for rank 1; the news is behind what it has not asked for."""
    monkeypatch.setattr(wire, "ASIDE", 1 << 20)
    world, n = ranks("aab"), 1 << 20
    works = [world.groups[2].send([torch.zeros(n, dtype=torch.uint8)], 0, 0) for _ in range(60)]
    assert put_aside(world.groups[0], more_than=wire.ASIDE) > wire.ASIDE and not works[-1].is_completed()
    begin = time.monotonic()

    def body(rank):
        if rank == 0:
            all_reduce(world.groups[0], torch.ones(4))
        elif rank == 2:
            time.sleep(0.5)
            world.groups[2].abort()

    error, *_ = world.errors(body)
    assert isinstance(error, RankLost) and "rank 2: it aborted" in str(error) and time.monotonic() - begin < AT_ONCE


# ---------------------------------------------------------------- how they meet


def test_a_stranger_is_turned_away_and_the_group_forms(monkeypatch):
    """Somebody who found the port calls first, says the wrong word, or nothing."""
    monkeypatch.setattr(dial, "HELLO_SECONDS", 0.2)
    store, calls = dist.HashStore(), []

    def pester():
        _, port, word = dial.json.loads(store.get("wire/0"))
        for hello in (dial.HELLO.pack(b"0" * 32, 1), b"", dial.HELLO.pack(word.encode(), 7)):
            calls.append(socket.create_connection(("127.0.0.1", port)))
            calls[-1].sendall(hello)
        lines[1] = dial_all(store, 1, 2, "127.0.0.1", 10)

    lines: dict = {}
    threading.Thread(target=pester, daemon=True).start()
    store.set("wire/1", "")   # rank 0 waits for it, and calls nobody
    lines[0] = dial_all(store, 0, 2, "127.0.0.1", 10)
    for _ in range(100):
        if 1 in lines:
            break
        time.sleep(0.05)
    lines[0][1].setblocking(True)
    lines[1][0].sendall(b"us")
    assert lines[0][1].recv(2) == b"us"
    for line in (*calls, lines[0][1], lines[1][0]):
        line.close()


def test_a_rank_that_cannot_be_reached_is_named_with_its_address():
    store = dist.HashStore()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there = dial.json.dumps(["127.0.0.1", closed.getsockname()[1], "0" * 32])
        store.set("wire, of all", dial.json.dumps([there, ""]))
        with pytest.raises(RankLost, match=r"rank 1: cannot reach rank 0 at 127\.0\.0\.1, port \d+: .*GLOO_SOCKET_IFNAME"):
            dial_all(store, 1, 2, "127.0.0.1", 2)


def test_a_caller_whose_word_comes_in_pieces_is_heard():
    mine, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)   # one read gives one piece, however many have come
    with mine, theirs:
        for piece in (b"se", b"cret"):
            theirs.sendall(piece)
        assert dial._read(mine, 6) == b"secret"


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ranks_that_have_only_ipv6_reach_each_other():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        lines = [*ranks.map(lambda rank: dial_all(store, rank, 2, "::1", AT_ONCE), range(2))]
    with lines[0][1] as mine, lines[1][0] as theirs:
        assert mine.family == socket.AF_INET6 and mine.getpeername() == theirs.getsockname()


def test_whoever_does_not_call_is_named_and_none_that_has(monkeypatch):
    called = []

    def be_called_by_rank_2(store, what, rank, size, timeout, mine):
        called.append(dial._call(dial.Listener(*dial.json.loads(mine)), 0, 2, time.monotonic() + AT_ONCE))
        return [mine] * size

    monkeypatch.setattr(dial, "hear_all", be_called_by_rank_2)
    with pytest.raises(RankLost, match="rank 0: rank\\(s\\) 1 did not connect in time"):
        dial_all(dist.HashStore(), 0, 3, "127.0.0.1", 0.2)
    called[0].close()


def test_a_new_time_out_counts_inside_each_host_too(ranks):
    world = ranks("aab")
    for group in world.groups:
        group.set_timeout(seconds(3.0))
    assert [(group.channel.timeout, group.channel.inside.timeout) for group in world.groups] == [(3.0, 3.0)] * 3
