"""An out-of-memory error says what held the memory."""

import re

import pytest
import torch
from torch import nn

import rankloom as rl

NOTE = (r"rank 1 ran out of memory\. For training it held parameters 4 KiB, gathered 0 B, gradients \d.*, "
        r"optimizer (0 B|8 KiB); .* Its peak was \d.* (accumulate)")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), None], ids=["python", "gpu", "cpu"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_rank_that_runs_out_of_memory_says_who_had_it_and_how_to_need_less(error, step):
    def body(world):
        def loss(model, rows):
            if world.rank == 1 and engine.steps_done == step:
                if error:
                    raise error
                torch.empty(1 << 55)
            return model(rows).sum(), len(rows)

        model = nn.Linear(32, 32, bias=False)
        nn.init.ones_(model.weight)
        engine = rl.prepare(model, loss=loss, optimizer=torch.optim.AdamW, world=world)
        for _ in range(2):
            engine.step(torch.randn(4, 32, generator=torch.Generator().manual_seed(world.rank)))

    with pytest.raises((MemoryError, RuntimeError)) as raised:
        rl.simulate(2, body)
    assert any(re.match(NOTE.replace("(accumulate)", r".*\(accumulate\)"), note) for note in raised.value.__notes__), raised.value.__notes__


def test_other_errors_stay_as_they_are():
    def body(world):
        engine = rl.prepare(nn.Linear(2, 2), loss=lambda model, rows: model(rows.double()), optimizer=torch.optim.AdamW, world=world)
        engine.step(torch.ones(2, 2))

    with pytest.raises(RuntimeError) as raised:
        rl.simulate(1, body)
    assert not any("memory" in note for note in raised.value.__notes__)
