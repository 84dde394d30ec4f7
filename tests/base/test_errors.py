"""The family of errors: who is whose child, what survives a journey between processes, and the hints."""

import inspect
import pickle

import pytest

import rankloom as rl
from rankloom.base import errors
from rankloom.base.errors import did_you_mean

FAMILY = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, rl.RankloomError)]


@pytest.mark.parametrize("kind", FAMILY)
def test_every_error_is_of_the_family_and_public_and_says_what_it_is_for(kind):
    assert getattr(rl, kind.__name__) is kind
    assert kind.__doc__


@pytest.mark.parametrize("kind", [kind for kind in FAMILY if kind is not rl.RankloomError])
def test_an_error_is_either_the_users_to_mend_or_of_the_running_job(kind):
    assert issubclass(kind, ValueError) != issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_survives_the_journey_between_processes(kind):
    error = kind("what went wrong", rank=3) if kind is rl.RankFailed else kind("what went wrong")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == "what went wrong"
    assert getattr(back, "rank", None) == getattr(error, "rank", None)


def test_a_hint_names_the_nearest_word_or_all_of_them():
    assert did_you_mean("shrad", ["shard", "tensor"]) == "Did you mean 'shard'?"
    assert did_you_mean("zzz", iter(["tensor", "shard"])) == "Known: shard, tensor."
