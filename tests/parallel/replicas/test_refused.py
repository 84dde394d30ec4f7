"""Batch norm over the rows of all ranks is refused by name, where it would silently be one over each rank's own."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.parallel.replicas import refused


def made():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))).double()
    draw = torch.Generator().manual_seed(0)   # ranks are threads: torch's own would be a race
    for param in model.parameters():
        nn.init.normal_(param, generator=draw)
    return model


def prepared(world, **options):
    return rl.prepare(made(), loss=lambda model, x: (model(x).square().sum(), len(x)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                      world=world, **options)


WAYS = {"prepare": prepared, "prepare, stage 3": lambda world: prepared(world, stage=3),
        "data_parallel": lambda world: rl.data_parallel(made(), world), "fully_shard": lambda world: rl.fully_shard(made(), world)}


@pytest.mark.parametrize("way", WAYS)
def test_sync_batch_norm_is_refused_by_name_on_several_ranks_and_is_a_plain_one_on_one(way):
    with pytest.raises(rl.ConfigError, match=r"1 is a SyncBatchNorm.*on 2 ranks each would normalise by its own rows"):
        rl.simulate(2, WAYS[way])
    rl.simulate(1, WAYS[way])


def test_ranks_that_share_their_rows_need_no_sums():
    rows, plan = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), {"0": "colwise_rep"}
    (alone,) = rl.simulate(1, lambda world: prepared(world).step(rows).loss)
    assert rl.simulate(rl.Mesh(tensor=2), lambda world: prepared(world, tensor_plan=plan).step(rows).loss) == pytest.approx([alone] * 2)


def test_it_is_torch_s_business_where_the_program_has_made_the_default_process_group(monkeypatch):
    monkeypatch.setattr(refused, "has_default_group", lambda: True)
    rl.simulate(2, prepared)
