"""Calls one after the other, whoever makes them and from whichever thread."""

import threading
import time

import pytest

from no_threads import no_thread_starts
from patience import AT_ONCE
from rankloom.world.transport.codes import FINE, INTERRUPTED, LEFT, LOST, TIMED_OUT
from rankloom.world.transport.turns import Turns


@pytest.fixture
def gate():
    """Calls wait here until it is open."""
    return threading.Event()


@pytest.fixture
def turns(gate):
    """A call is (number, reason); `made` tells which were made, in order."""
    def perform(call):
        begun.set()
        assert gate.wait(60)
        made.append(call[0])
        if call[1] == "raise":
            raise ZeroDivisionError
        return call[1]

    made, begun = [], threading.Event()
    queue = Turns(perform)
    queue.made, queue.begun = made, begun
    yield queue
    gate.set()
    queue.close()


def test_a_call_is_made_in_the_callers_thread_when_none_is_before(turns, gate):
    gate.set()
    assert turns.run((1, FINE)) == FINE and turns.made == [1]
    assert turns._worker is None, "no thread for callers who wait anyway"


def test_calls_are_made_in_the_order_of_their_tickets_and_a_blocking_one_comes_last(turns, gate):
    tickets = [turns.submit((n, FINE)) for n in range(5)]
    assert tickets == [1, 2, 3, 4, 5] and turns.finished == 0
    threading.Timer(0.05, gate.set).start()
    assert turns.run((5, FINE)) == FINE
    assert turns.made == list(range(6)) and turns.wait(tickets[0], 0) == FINE


def test_a_call_for_which_no_thread_starts_is_an_error_and_the_next_one_is_made(turns, gate):
    gate.set()
    with no_thread_starts(), pytest.raises(RuntimeError, match="start new thread"):
        turns.submit((1, FINE))
    assert turns.wait(turns.submit((2, FINE)), AT_ONCE) == FINE and turns.made == [2]


def test_a_wait_that_is_over_leaves_the_call_going(turns, gate):
    ticket = turns.submit((1, FINE))
    begin = time.monotonic()
    assert turns.wait(ticket, 0.05) == TIMED_OUT and time.monotonic() - begin < AT_ONCE
    gate.set()
    assert turns.wait(ticket, 60) == FINE


def test_the_first_failure_is_that_of_all_calls_behind_it_and_of_none_before(turns, gate):
    gate.set()
    tickets = [turns.submit((n, why)) for n, why in enumerate((FINE, LOST, LEFT))]
    assert [turns.wait(ticket, 60) for ticket in tickets] == [FINE, LOST, LOST]


def test_calls_of_many_threads_never_overlap():
    inside, most, lock = 0, 0, threading.Lock()

    def perform(call):
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.001)
        with lock:
            inside -= 1
        return FINE

    turns = Turns(perform)
    threads = [threading.Thread(target=lambda: [turns.run(n) for n in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    turns.close()


def test_a_bug_in_a_background_call_ends_the_waits_for_it_and_for_all_behind(turns, gate, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: shown.append(arguments.exc_type))
    first, second = turns.submit((1, "raise")), turns.submit((2, FINE))
    gate.set()
    assert turns.wait(first, 10) == turns.wait(second, 10) == INTERRUPTED
    assert shown == [ZeroDivisionError] and turns.run((3, FINE)) == INTERRUPTED


def test_a_queue_that_is_closed_makes_no_more_calls(turns, gate):
    first, second = turns.submit((1, FINE)), turns.submit((2, FINE))
    assert turns.begun.wait(AT_ONCE)
    threading.Timer(0.05, gate.set).start()
    turns.close()
    assert turns.made == [1] and turns.wait(first, 0) == FINE and turns.wait(second, 10) == LEFT
