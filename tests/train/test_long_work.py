"""Some ranks work, the others wait, and what goes wrong is raised on all."""

import time

import pytest

from patience import AT_ONCE, wait_until
from rankloom.base.errors import ConfigError, RankLost
from rankloom.train.long_work import while_others_wait
from rankloom.world.simulate import simulate


def test_the_others_return_when_the_work_is_done():
    done = []

    def work():
        time.sleep(0.2)
        done.append(True)

    def body(world):
        while_others_wait(world, work if world.rank == 0 else None, label="work")
        return list(done)

    assert simulate(3, body) == [[True]] * 3


def test_work_may_take_longer_than_the_time_out_of_a_collective():
    def body(world):
        while_others_wait(world, (lambda: time.sleep(8.0)) if world.rank == 0 else None, label="work")
        return True

    assert simulate(2, body, timeout=5.0) == [True, True]


def test_while_one_works_the_others_exchange_signs_of_life_with_it():
    """So none of their collectives lasts as long as the work."""
    signs = {}

    def body(world):
        plain, signs[world.rank] = world.all_reduce, 0

        def counted(*args, **named):
            result = plain(*args, **named)
            signs[world.rank] += 1
            return result

        world.all_reduce = counted
        work = lambda: wait_until(lambda: signs.get(1, 0) >= 5)
        while_others_wait(world, work if world.rank == 0 else None, label="work")
        return signs[world.rank]

    assert all(each > 5 for each in simulate(2, body))


def test_what_the_work_raised_is_raised_on_every_rank():
    def body(world):
        def work():
            raise ConfigError("no such thing")

        try:
            while_others_wait(world, work if world.rank == 1 else None, label="work")
        except ConfigError as error:
            return type(error).__name__, str(error)

    assert simulate(3, body) == [
        ("ConfigError", "no such thing"), ("ConfigError", "no such thing"), ("ConfigError", "no such thing")
    ]


def test_an_error_that_is_not_the_user_s_is_raised_where_it_was_and_the_others_lost_that_rank():
    """Else the launcher would take one that only heard of it for the cause, and the line of the error would be lost."""
    def body(world):
        try:
            while_others_wait(world, (lambda: 1 / 0) if world.rank == 1 else None, label="tokenise")
        except (ZeroDivisionError, RankLost) as error:
            return f"{type(error).__name__}: {error}"

    assert simulate(3, body) == ["RankLost: rank 0: tokenise: rank 1, which did it, failed: ZeroDivisionError: division by zero",
                                 "ZeroDivisionError: division by zero",
                                 "RankLost: rank 2: tokenise: rank 1, which did it, failed: ZeroDivisionError: division by zero"]


def test_an_error_without_a_text_is_not_taken_for_success():
    def work():
        raise KeyError

    def body(world):
        while_others_wait(world, work, label="work")

    with pytest.raises(KeyError):
        simulate(1, body)


def test_a_rank_that_dies_meanwhile_frees_the_others():
    def body(world):
        if world.rank == 1:
            raise ZeroDivisionError
        try:
            while_others_wait(world, lambda: time.sleep(30), label="work")
        except RankLost:
            return "freed"

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        simulate(2, body)
    assert time.monotonic() - begin < AT_ONCE
