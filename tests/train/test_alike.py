"""What only some ranks were given is an error on all of them, before anything is trained."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.train.alike import expect_alike
from rankloom.train.config import make_config, shared_settings


def start(world: rl.World, rate: float = 0.1, **settings) -> rl.Engine:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), world=world, **settings,
                      optimizer=lambda p: torch.optim.SGD([{"params": p[:1], "lr": rate}, {"params": p[1:]}], lr=1.0))


@pytest.mark.parametrize(("settings", "message"), [
    ({"clip": 1}, "way to train than rank 0: clip is 1.0, on rank 0 None"),
    ({"stage": 2}, "way to train than rank 0: stage is 2, on rank 0 0"),
    ({"seed": 3}, "way to train than rank 0: seed is 3, on rank 0 0"),
    ({"precision": "bf16"}, "way to train than rank 0: precision is .*bf16"),
    ({"deterministic": 4}, "way to train than rank 0: deterministic is 4, on rank 0 0"),
    ({"compress": "int8"}, "way to train than rank 0: compress is 'int8', on rank 0 'none'"),
    ({"rate": 0.5}, "optimizer than rank 0: lr of group 0 is 0.5, on rank 0 0.1"),
])
def test_a_rank_that_would_train_in_another_way_is_named_on_all_ranks_with_what_differs(settings, message):
    """Its parameters went ways of their own, and nothing said so."""
    def body(world):
        with pytest.raises(rl.ConfigError, match=f"rank 1 was given another {message}.*; give all ranks the same"):
            start(world, **settings if world.rank == 1 else {})

    rl.simulate(3, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_rates_are_compared_at_every_stage(stage):
    with pytest.raises(rl.ConfigError, match="rank 2 was given another optimizer than rank 0: lr of group 0 is 0.2, on rank 0 0.1"):
        rl.simulate(3, lambda world: start(world, rate=0.2 if world.rank == 2 else 0.1, stage=stage))


def test_a_rate_that_is_a_tensor_is_compared_by_its_value():
    """It may lie on the device of its rank."""
    rate = lambda rank: torch.tensor(0.5, dtype=torch.float32 if rank else torch.float64)
    rl.simulate(2, lambda world: start(world, rate=rate(world.rank)))
    with pytest.raises(rl.ConfigError, match="rank 1 was given another optimizer than rank 0: lr of group 0 is 1.5, on rank 0 0.5"):
        rl.simulate(2, lambda world: start(world, rate=rate(world.rank) + world.rank))


def test_ranks_may_cut_their_rows_in_other_numbers_of_micro_batches():
    """One may have less memory than another: sums do not tell."""
    steps = rl.simulate(2, lambda world: start(world, accumulate=1 + world.rank).step(torch.ones(2, 2)).count)
    assert steps == [4, 4]


def model_with(constant, names):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class Alike(Own):
        def forward(self, x):
            return x * self.weight * 2 if "a" in {"a", "b", "c"} else x

    class Other(Own):
        def forward(self, x):
            return x * self.weight * 3 if "a" in {"a", "b", "c"} else x

    kind = Alike if constant == 2 else Other
    kind.__qualname__ = names
    return kind()


def test_a_rank_whose_model_computes_something_else_under_the_same_name_is_told_on_all_ranks():
    """A host with an older checkout: tensors of the same names and shapes."""
    def body(world, constants):
        prepared = rl.prepare(model_with(constants[world.rank], "Own"), loss=lambda m, x: (m(x).sum(), len(x)), world=world,
                              optimizer=torch.optim.AdamW)
        return prepared.step(torch.ones(2, 3)).count

    assert rl.simulate(3, lambda world: body(world, [2, 2, 2])) == [6, 6, 6]
    with pytest.raises(rl.ConfigError, match="rank 2 was given another model than rank 0: the code of Own is '[0-9a-f]{8}', on rank 0 '"):
        rl.simulate(3, lambda world: body(world, [2, 2, 3]))


def test_the_hash_of_a_models_code_does_not_depend_on_the_process():
    """The order in a set of strings does; it is written out by three processes of their own."""
    program = """
import rankloom.train.alike as alike
from torch import nn
class Own(nn.Module):
    def forward(self, x, kind):
        inner = lambda: kind in {"one", "two", "three", "four"}
        return x if inner() or kind in {"five", "six", "seven"} else -x
print(alike.code_of(nn.Sequential(nn.Linear(2, 2), Own())))
"""
    said = {subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True,
                           check=True).stdout for seed in (1, 2, 3)}
    assert len(said) == 1 and "the code of Own" in said.pop()


def test_configs_are_compared_but_for_what_is_of_a_host():
    train = {"global_batch_size": 2, "threads": 1}
    config = lambda rank, **other: make_config({"train": train | other, "data": {"source": f"/host{rank}/texts"}}, "test")
    rl.simulate(2, lambda world: expect_alike(world, "config", shared_settings(config(world.rank, threads=1 + world.rank))))
    with pytest.raises(rl.ConfigError, match="rank 1 was given another config than rank 0: train.steps is 8, on rank 0 7"):
        rl.simulate(2, lambda world: expect_alike(world, "config", shared_settings(config(world.rank, steps=7 + world.rank))))
