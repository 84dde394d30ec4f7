"""Values that go from all ranks to rank 0, and from it to each: no other rank gets them, and the bytes are those of the docstrings."""

import json

import pytest

import rankloom as rl
from rankloom.world.objects import gather_object, scatter_object

RANKS = [1, 2, 3, 4]
VALUES = [None, {"rank": 1, "text": "\u00e4\u20ac" * 50}, [1.5, True], "x" * 10_000]
BACKENDS = ["gloo", "rankloom"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", RANKS)
def test_rank_0_gets_any_json_value_of_every_rank_in_order_and_the_others_get_nothing(p, backend):
    assert rl.simulate(p, lambda w: gather_object(w, VALUES[w.rank]), backend=backend) == [VALUES[:p], *[[]] * (p - 1)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", RANKS)
def test_every_rank_gets_the_value_that_rank_0_has_for_it(p, backend):
    assert rl.simulate(p, lambda w: scatter_object(w, [] if w.rank else VALUES[:p]), backend=backend) == VALUES[:p]


@pytest.mark.parametrize("p", [2, 16])
def test_a_value_is_sent_once_and_its_length_to_every_rank(p):
    """Not to all ranks: with 1,024 of them a checkpoint's list of boxes had taken 64 MB on each."""
    texts = [json.dumps("x" * (1000 + rank)) for rank in range(p)]

    def body(world):
        gather_object(world, json.loads(texts[world.rank]))
        gathered = world.ledger.messages, world.ledger.bytes
        scatter_object(world, [json.loads(text) for text in texts])
        return gathered, world.ledger.bytes - gathered[1]

    for rank, (gathered, scattered) in enumerate(rl.simulate(p, body)):
        assert gathered == (2 * (p - 1), 8 * (p - 1) + (len(texts[rank]) if rank else 0))
        assert scattered == 8 * (p - 1) + (0 if rank else sum(map(len, texts[1:])))


def test_debug_mode_takes_both_and_refuses_a_rank_that_gathers_to_all(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")

    def body(world):
        assert scatter_object(world, gather_object(world, world.rank)) == world.rank
        with pytest.raises(rl.CollectiveMismatch, match="is not the same on all ranks"):
            world.all_gather_object("x", label="it") if world.rank else gather_object(world, "x", label="it")

    rl.simulate(2, body)
