"""How ranks are connected: what gloo's thread may interrupt."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import rankloom as rl
from rankloom.world.connect import NO_PRIORITY, starting_threads_that_wait_for_their_turn


def policy_of_a_new_thread():
    """The scheduling policy of a thread that this one starts."""
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found[0]


def policies_of_gloo_and_of_others(world):
    """In a process of its own: in this one, other tests may have left threads of gloo that torch has started."""
    world.all_reduce(torch.ones(1))
    of_gloo = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):   # of a thread that has ended meanwhile
            of_gloo += [os.sched_getscheduler(int(task.name))] if (task / "comm").read_text() == "gloo_tcp_loop\n" else []
    return of_gloo, os.sched_getscheduler(0), policy_of_a_new_thread()


def test_gloos_thread_interrupts_no_rank_that_it_might_then_wait_for():
    expected = [os.SCHED_BATCH], os.SCHED_OTHER, os.SCHED_OTHER   # and only that one
    assert rl.spawn(2, policies_of_gloo_and_of_others, backend="gloo") == [expected] * 2


def test_a_policy_that_the_user_has_chosen_stays():
    def chosen():
        os.sched_setscheduler(0, os.SCHED_IDLE, NO_PRIORITY)
        with starting_threads_that_wait_for_their_turn():
            policies.append(policy_of_a_new_thread())
        policies.append(os.sched_getscheduler(0))

    policies = []
    thread = threading.Thread(target=chosen)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_IDLE, os.SCHED_IDLE]


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_where_the_system_permits_no_other_policy_ranks_connect_all_the_same(call, monkeypatch):
    def refuse(*_):
        monkeypatch.undo()
        raise PermissionError

    monkeypatch.setattr(os, call, refuse)
    with starting_threads_that_wait_for_their_turn():
        assert policy_of_a_new_thread() == os.SCHED_OTHER


def test_an_error_inside_leaves_the_thread_as_it_was():
    with pytest.raises(KeyError), starting_threads_that_wait_for_their_turn():
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
