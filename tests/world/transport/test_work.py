"""Work on its way: when it has ended, and who is told what of it."""

import datetime
import threading
import time

import pytest
import torch

from conformance.ranks import Ranks
from patience import AT_ONCE
from rankloom.base.errors import CollectiveTimeout
from rankloom.world.transport.through_host import HostWork
from rankloom.world.transport.work import DONE


@pytest.fixture
def ranks():
    made = Ranks(2)
    yield made
    made.close()


def test_work_has_ended_for_every_thread_only_when_its_results_are_home(ranks):
    def bring():
        began.set()
        time.sleep(0.2)
        home.append(True)

    began, home, x = threading.Event(), [], torch.ones(4)
    work = ranks.groups[0].allreduce([x])
    work.stand_for([], [x], bring)
    future = work.get_future()   # its thread brings them
    ranks.groups[1].allreduce([torch.ones(4)])
    assert began.wait(AT_ONCE)
    work.wait()
    assert home == [True] and future.wait() == [x]


def test_everyone_who_asks_hears_what_went_wrong_as_results_were_brought_home(ranks):
    def fail():
        raise ValueError("no room at home")

    work = ranks.groups[0].allreduce([x := torch.ones(4)])
    work.stand_for([], [x], fail)
    ranks.groups[1].allreduce([torch.ones(4)]).wait()
    ranks.groups[0].allreduce([torch.ones(4)])   # looks which have ended, and is not told of another's failure
    ranks.groups[1].allreduce([torch.ones(4)])
    for _ in range(2):
        with pytest.raises(ValueError, match="no room at home"):
            work.wait()
    assert work.is_completed() and not work.is_success()


def test_a_message_waited_for_by_cpp_which_says_zero_for_no_time_out_has_that_of_the_group():
    world = Ranks(2, 0.3)
    with pytest.raises(CollectiveTimeout, match="recv .*within its timeout of 0.3 s: rank 1"):
        world.groups[0].recv([torch.ones(4)], 1).wait(datetime.timedelta(0))
    world.close()


def test_what_came_through_the_host_is_brought_once_whoever_waits_again():
    there, here = torch.zeros(3), torch.ones(3)
    work = HostWork(DONE, [(there, here)])
    assert work.is_completed() and there.tolist() == [1.0] * 3
    there.fill_(2.0)   # by its owner, who has it now
    assert work.wait() and there.tolist() == [2.0] * 3
