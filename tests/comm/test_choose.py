"""The table of all-reduce algorithms, and how a program adds its own."""

import pytest

import rankloom as rl
from rankloom.comm import choose
from rankloom.comm.choose import all_reduce_named


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(choose, "_ALGORITHMS", dict(choose._ALGORITHMS))


def test_backend_means_the_backends_own_and_ring_means_the_ring():
    assert all_reduce_named("backend") is None
    assert all_reduce_named("ring") is rl.ring_all_reduce


def test_a_registered_algorithm_is_found_by_its_name(table):
    mine = lambda x, group: x
    rl.register_all_reduce("mine", mine)
    assert all_reduce_named("mine") is mine


@pytest.mark.parametrize("name", ["backend", "ring"])
def test_a_taken_name_is_refused(table, name):
    with pytest.raises(rl.ConfigError, match=f"already an all-reduce named '{name}'"):
        rl.register_all_reduce(name, lambda x, group: x)


def test_an_unknown_name_is_answered_with_the_nearest_known_one():
    with pytest.raises(rl.ConfigError, match=r"no all-reduce 'rign'. Did you mean 'ring'"):
        all_reduce_named("rign")
