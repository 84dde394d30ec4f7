"""Delayed scaling: what a step knows, what it leaves behind, and that ranks agree."""

import pytest
import torch

import rankloom as rl
from rankloom.base.errors import ConfigError
from rankloom.train.amax import AmaxHistory

NAMES = ["a.input", "a.gradient", "b.input"]


def history(length: int = 3, names=NAMES) -> AmaxHistory:
    return AmaxHistory(names, length, torch.device("cpu"))


def run(h: AmaxHistory, group, *steps: list[float]) -> None:
    for step in steps:
        for at, value in enumerate(step):
            if value:
                see(h, at, value)
        h.close_step(group)


def see(h: AmaxHistory, at: int, value: float) -> None:
    list(h.meters.values())[at].read(torch.tensor([[value]]))


def known(h: AmaxHistory) -> list[float]:
    return [meter.known.item() for meter in h.meters.values()]


def seen(h: AmaxHistory) -> list[float]:
    return [meter.seen.item() for meter in h.meters.values()]


def reference(h: AmaxHistory, at: int) -> float | None:
    meter = list(h.meters.values())[at]
    found = meter.read(meter.seen)
    return None if found is None else found.item()


def alone(body):
    return rl.simulate(1, lambda world: body(world.group("replicate")))[0]


def test_a_step_scales_by_the_largest_of_the_last_steps_and_then_forgets_it():
    def body(group):
        h, found = history(length=2), []
        for value in (4.0, 1.0, 2.0, 3.0):
            run(h, group, [value] * 3)
            found.append(reference(h, 1))
        return found

    assert alone(body) == [4.0, 4.0, 2.0, 3.0]


def test_a_step_reads_only_what_was_known_when_it_began():
    def body(group):
        h = history()
        run(h, group, [1.0, 2.0, 3.0])
        see(h, 0, 9.0)
        return reference(h, 0), seen(h)

    assert alone(body) == (1.0, [9.0, 0.0, 0.0])


def test_seeing_a_tensor_again_changes_nothing():
    h = history()
    for value in (2.0, 5.0, 2.0, 5.0):
        see(h, 2, value)
    assert seen(h) == [0.0, 0.0, 5.0]


def test_a_tensor_is_known_once_it_has_been_seen_whoever_else_never_is():
    """One frozen layer at the bottom, to which no gradient comes, kept all others from it."""
    def body(group):
        h = history()
        found = [reference(h, 0)]
        run(h, group, [1.0, 0.0, 2.0])     # a branch of the model that this batch did not take
        found += [reference(h, at) for at in range(3)]
        run(h, group, [0.0, 3.0, 0.0])
        return found, [reference(h, at) for at in range(3)]

    assert alone(body) == ([None, 1.0, None, 2.0], [1.0, 3.0, 2.0])


def test_a_tensor_that_is_not_seen_or_not_finite_keeps_its_magnitude():
    def body(group):
        h = history(length=1)
        run(h, group, [1.0, 2.0, 3.0], [0.0, torch.nan, torch.inf], [0.0, torch.nan, torch.inf])
        return known(h), seen(h)

    assert alone(body) == ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_ranks_agree_on_the_largest_in_one_message(p):
    def body(world):
        group, h = world.group("replicate"), history()
        before = group.ledger.calls
        run(h, group, [1.0 + world.rank, 10.0 - world.rank, 5.0 if world.rank == p - 1 else 0.0])
        return known(h), group.ledger.calls - before

    assert all(found == ([float(p), 10.0, 5.0], int(p > 1)) for found in rl.simulate(p, body))


def test_a_step_that_was_given_up_leaves_nothing():
    def body(group):
        h = history()
        run(h, group, [1.0, 1.0, 1.0])
        see(h, 0, 100.0)
        h.abandon_step()
        run(h, group, [2.0, 2.0, 2.0])
        return known(h)

    assert alone(body) == [2.0, 2.0, 2.0]


def test_a_saved_history_goes_on_where_it_was():
    def body(group):
        first, second, longer, shorter = history(), history(names=NAMES[::-1]), history(length=5), history(length=2)
        run(first, group, [1.0, 8.0, 3.0], [2.0, 1.0, 4.0])
        second.load_state_dict(first.state_dict())
        longer.load_state_dict(first.state_dict())
        shorter.load_state_dict(first.state_dict() | {name: torch.tensor([1.0, 2.0, 9.0]) for name in NAMES[:1]})
        assert known(shorter) == [2.0, 8.0, 4.0], "the oldest step is the one that it has no room for"
        for h, order in ((first, 1), (second, -1), (longer, 1), (shorter, 1)):
            run(h, group, [1.0, 1.0, 1.0][::order], [1.0, 1.0, 1.5][::order])
        return first.state_dict(), second.state_dict(), [reference(h, 0) for h in (first, second)], known(longer), known(shorter)

    first, second, (a, b), longer, shorter = alone(body)
    assert {name: v.tolist() for name, v in first.items()} == {name: v.tolist() for name, v in second.items()}
    assert first["a.input"].tolist() == [1.0, 1.0, 2.0] and (a, b) == (2.0, 4.0) and longer == [2.0, 8.0, 4.0]
    assert shorter == [1.0, 1.0, 1.5], "it has forgotten what came before its two steps"


def test_a_history_that_is_set_back_to_a_new_run_scales_by_each_tensors_own_magnitude_again():
    def body(group):
        h = history()
        run(h, group, [1.0, 2.0, 3.0])
        h.load_state_dict({})
        return [reference(h, at) for at in range(3)]

    assert alone(body) == [None] * 3


def test_a_history_of_other_layers_is_refused():
    with pytest.raises(ConfigError, match=r"has 2 tensors, this model casts 3; only one of the two knows 'a.gradient'"):
        history().load_state_dict(history(names=["a.input", "b.input"]).state_dict())
