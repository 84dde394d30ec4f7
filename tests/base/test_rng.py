"""Random streams are functions of their key: of nothing else, and of all of it."""

import itertools
import subprocess
import sys

import torch

from rankloom.base.rng import key_to_seed, stream

KEYS = [(), ("a",), ("b",), ("a", 1), ("a", "1"), (1, "a"), ("a", 1, 2), ("a", 12), ("a1",), ("",), (0,), (-1,)]


def test_equal_keys_give_equal_draws_whatever_was_drawn_before():
    first = torch.rand(5, generator=stream(3, "dropout", 7))
    torch.rand(100)
    stream(3, "dropout", 7)
    assert torch.equal(first, torch.rand(5, generator=stream(3, "dropout", 7)))


def test_every_part_of_the_key_and_its_type_and_order_matter():
    seeds = [key_to_seed(seed, *key) for seed in (0, 1) for key in KEYS]
    assert len(set(seeds)) == len(seeds)


def test_seeds_fit_a_generator_and_spread_over_its_range():
    seeds = [key_to_seed(0, "x", n) for n in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 400 < sum(seed >> 62 for seed in seeds) < 600


def test_streams_of_neighbouring_keys_are_not_shifted_copies_of_each_other():
    draws = [torch.rand(64, generator=stream(0, "x", n)) for n in range(6)]
    for a, b in itertools.combinations(draws, 2):
        assert not torch.isin(a, b).any()


def test_a_stream_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    torch.rand(5, generator=stream(0, "x"))
    assert torch.equal(before, torch.get_rng_state())


def test_another_process_with_another_hash_seed_gets_the_same_seed():
    code = "from rankloom.base.rng import key_to_seed; print(key_to_seed(5, 'weights', 'a.b', 2))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"})
    assert int(said.stdout) == key_to_seed(5, "weights", "a.b", 2)
