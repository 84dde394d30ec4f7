"""Tensor ranks inside data ranks, in a loop of one's own: the plain model on the whole batch."""

import pytest
import torch

import rankloom as rl
from rankloom.parallel.tensor.holding import gather_whole, holdings
from split_model import RTOL, error

from .test_gpt import make, tokens


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    total, count = model(rows, targets=rows.roll(-1, 1))
    return total / count


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize(("replicate", "tensor"), [(2, 1), (1, 2), (2, 2), (3, 2), (2, 3)])
def test_two_data_ranks_of_split_models_are_one_model_with_the_whole_batch(replicate, tensor, plan, overlap):
    batch = tokens(40, rows=2 * replicate)
    plain = make(kv_heads=1, layers=1)
    loss_of(plain, batch).backward()

    def body(world):
        split = world.group("tensor")
        model = rl.tensor_parallel(make(kv_heads=1, layers=1), getattr(plain, plan), split, overlap=overlap)
        wrapped = rl.data_parallel(model, world.group("replicate"))
        for _ in range(2):   # the second goes through the buckets that the first has laid out
            model.zero_grad(set_to_none=True)
            loss_of(wrapped, batch.chunk(replicate)[world.mesh.coords(world.rank)["replicate"]]).backward()
        return gather_whole({name: p.grad for name, p in model.named_parameters()}, holdings(model), split)

    for grads in rl.simulate(rl.Mesh(replicate=replicate, tensor=tensor), body):
        for name, param in plain.named_parameters():
            assert error(grads[name], param.grad) < RTOL, name
