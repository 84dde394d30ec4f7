"""The example at the root of the repository is a config that can run."""

from pathlib import Path

import pytest

from rankloom.train.run.config import load_config

EXAMPLE = Path(__file__).parents[1] / "train.toml"


def test_the_example_is_a_valid_config_for_two_ranks():
    config = load_config(EXAMPLE)
    assert config.mesh.as_mesh().size == 2
    assert config.data.baseline, "it says whether the trigram model was beaten"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_example_has_the_same_global_batch_on_one_two_and_four_ranks(ranks):
    batch = load_config(EXAMPLE, ["--mesh.replicate", str(ranks)]).batch()
    assert batch.global_ == load_config(EXAMPLE).batch().global_
