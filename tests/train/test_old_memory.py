"""Memory that parameters leave while a GPU still reads it: torch is told which stream does, or that memory could be given to another.

CUDA is pretended: tensors stay in host memory, and `record_stream` notes the memory that it is called for.
"""

import copy

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.tensors import keep_until_read, overwrite
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT, Summing
from rankloom.models.config import MoEConfig
from rankloom.models.moe import Experts
from rankloom.parallel.gradients.bucket import Bucket
from rankloom.parallel.replicas.equal_start import _lie_as_on_rank_0, make_replicas_equal
from rankloom.train.precision import cast_floats
from streams import NOW, pretend


def prepared(model, world, **options):
    before = [param.data for param in model.parameters()]
    rl.prepare(model, loss=lambda model, batch: (model(batch).sum(), 1), optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
               world=world, **options)
    return before


def frozen(model):
    model.weight.requires_grad = False
    return model


def transposed(model):
    model.weight.data = model.weight.data.t()
    return model


def cast(model, world):
    before = [param.data for param in model.parameters()]
    cast_floats(model, torch.bfloat16)
    return before


def give_gradients(model, world):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.grad for param in model.parameters()]
    Bucket(dict(model.named_parameters()), world, Summing(BACKEND, EXACT))
    return before


def take_values(model, world):
    before = [param.data for param in model.parameters()]
    make_replicas_equal(model, world)
    return before


def take_strides(model, world):
    before = [model.weight.data] if world.rank else []
    _lie_as_on_rank_0(transposed(model) if world.rank else model, world)
    return before


def widen(model, world):
    model.weight.data = torch.ones(1, 4).expand(4, 4)
    before = [model.weight.data]
    overwrite(model.weight, torch.ones(4, 4))
    return before


def cut(model, world):
    before = [param.data for param in model.parameters()]
    rl.tensor_parallel(nn.Sequential(model), {"0": "colwise_gather_output"}, world)
    return before


def keep_one_expert(model, world):
    experts = Experts(MoEConfig(experts=2, top_k=1, ffn=4), 4)
    before = [param.data for param in experts.parameters()]
    experts.keep(0, 1)
    return before


LEAVES = {   # what a model's parameters leave their memory for, and on how many ranks; each returns the memory that they leave
    "units": (1, lambda model, world: prepared(model, world, stage=3)),
    "masters": (1, lambda model, world: prepared(model, world, precision="bf16")),
    "the format of what is frozen, in no unit": (1, lambda model, world: prepared(frozen(model), world, stage=2, precision="bf16")),
    "strides to compute alike": (1, lambda model, world: prepared(transposed(model), world, deterministic=True)),
    "another dtype": (1, cast),
    "a bucket of gradients": (1, give_gradients),
    "rank 0's values": (2, take_values),
    "rank 0's strides": (2, take_strides),
    "memory of its own for each element": (1, widen),
    "a part of it": (2, cut),
    "an expert of many": (1, keep_one_expert),
}


@pytest.fixture
def kept(monkeypatch):
    """Addresses of the memory that is kept until it is read."""
    pretend(monkeypatch)
    found = set()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: found.add((x.data_ptr(), stream)))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(("p", "leave"), LEAVES.values(), ids=LEAVES.keys())
def test_memory_that_is_left_is_kept_until_the_current_stream_has_read_it(p, leave, kept):
    plain = nn.Linear(4, 4)
    alike = rl.simulate(p, lambda world: [(x.data_ptr(), NOW[-1]) in kept for x in leave(copy.deepcopy(plain), world)])
    assert all(map(all, alike)) and any(alike)


def test_what_is_sparse_has_no_memory_that_torch_could_keep(kept):
    keep_until_read(torch.ones(3).to_sparse())
    assert not kept
