"""Stopping early: what a signal does to one rank, and how all ranks learn of it."""

import os
import signal
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from patience import AT_ONCE, wait_until
from rankloom.train.run.stop import Agreement, StopSignal
from rankloom.world.leave import ONE_REQUEST
from rankloom.world.simulate import simulate


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_a_flag_and_nothing_else(number):
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        assert stop.number == number


def test_the_same_signal_again_a_second_later_ends_the_process_at_once_with_its_exit_code():
    with pytest.raises(SystemExit) as caught, StopSignal():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ONE_REQUEST + 0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 143


def test_a_signal_that_comes_from_a_scheduler_and_from_the_launcher_is_one_request():
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM


def test_the_first_signal_is_acknowledged_at_once_and_once_and_not_in_the_code_that_it_interrupts():
    """A step may take minutes, and the handler may interrupt what writes to the same terminal."""
    told = SimpleQueue()
    with StopSignal(lambda number: told.put((number, threading.current_thread().name))) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert told.get(timeout=AT_ONCE) == (signal.SIGINT, "rankloom-stop") and stop.number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGTERM)
    assert told.empty()
    wait_until(lambda: "rankloom-stop" not in {thread.name for thread in threading.enumerate()})


def test_what_is_never_stopped_is_never_acknowledged_and_leaves_no_thread():
    told = []
    with StopSignal(told.append):
        assert "rankloom-stop" in {thread.name for thread in threading.enumerate()}
    assert not told
    wait_until(lambda: "rankloom-stop" not in {thread.name for thread in threading.enumerate()})


def test_an_acknowledgement_is_waited_for_at_the_end():
    told = []
    with StopSignal(lambda number: (time.sleep(0.05), told.append(number))):
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM]


def test_work_that_may_stay_unfinished_is_interrupted_once_and_nothing_after_it_is():
    done = []

    def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("never")
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            done.append("cleared up")

    with StopSignal() as stop:
        stop.run_unless_stopped(lambda: done.append("before"))
        stop.run_unless_stopped(work)
        stop.run_unless_stopped(lambda: done.append("after a signal"))
    assert done == ["before", "cleared up"] and stop.number == signal.SIGTERM
    with StopSignal() as stop:
        stop.run_unless_stopped(lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.number == signal.SIGTERM


def test_another_signal_after_the_first_is_not_a_repetition():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)   # a launcher passes SIGTERM on after Ctrl-C
        assert stop.number == signal.SIGINT


def test_a_terminal_that_is_closed_twice_is_one_that_is_closed():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)   # the kernel says it, and so may progress.py
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == signal.SIGHUP


def test_a_signal_that_was_ignored_before_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)   # as nohup does
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_handlers_from_before_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_stop_after_the_same_step_whichever_rank_was_signalled(ranks):
    signalled, at = ranks - 1, 5

    def body(world):
        agreement = Agreement(world)
        for step in range(20):
            time.sleep(0.001 * ((world.rank * 7 + step) % 3))   # ranks arrive in any order
            here = 15 if world.rank == signalled and step >= at else 0
            if agreement.exchange(here, problem=False)[0]:
                break
        return step, agreement.last()[0]

    assert simulate(ranks, body) == [(at + 1, 15)] * ranks


def test_a_problem_on_one_rank_is_known_on_all():
    def body(world):
        agreement = Agreement(world)
        assert agreement.exchange(0, problem=False) == (0, False)
        assert agreement.exchange(0, problem=world.rank == 1) == (0, False)
        return agreement.last()

    assert simulate(3, body) == [(0, True)] * 3


def test_the_last_word_is_told_once():
    def body(world):
        agreement = Agreement(world)
        agreement.exchange(2, problem=False)
        return agreement.last(), agreement.last()

    assert simulate(1, body) == [((2, False), (0, False))]


def test_an_exchange_asks_nothing_of_the_device():
    """A GPU's queue would have to be empty first; a tensor on the meta device could not even be read."""
    world = SimpleNamespace(device=torch.device("meta"), all_reduce=lambda x, **_: SimpleNamespace(wait=lambda: x))
    agreement = Agreement(world)
    agreement.exchange(2, problem=False)
    assert agreement.last() == (2, False)


def test_an_exchange_costs_one_all_reduce_of_two_numbers():
    def body(world):
        agreement = Agreement(world)
        for _ in range(3):
            agreement.exchange(0, problem=False)
        agreement.last()
        return world.ledger.calls, world.ledger.bytes

    assert simulate(2, body) == [(3, 3 * 8)] * 2
