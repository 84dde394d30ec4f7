"""A process group made elsewhere that carries tensors of a GPU only, as torch makes for "nccl": here of gloo, registered for "cuda"."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankloom as rl
from patience import AT_ONCE
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.world.connect import connect, expect_cpu_backend

GLOO, CPU = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")


def group_of(world: rl.World, *kinds: str) -> rl.Group:
    """The world's ranks, whose tensors on devices of these kinds its gloo carries."""
    made = dist.ProcessGroup(world._store, world.rank, world.size)
    made._set_default_backend(GLOO)
    for kind in kinds:
        made._register_backend(torch.device(kind), GLOO, world._process_group._get_backend(CPU))
    return rl.Group(made)


WRAPPERS = {"data_parallel": rl.data_parallel, "fully_shard": rl.fully_shard,
            "its replicas": lambda model, group: rl.fully_shard(model, group.alone(), replicas=group)}


@pytest.mark.gloo
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_group_of_the_gpu_only_is_refused_at_once_with_the_remedy(wrap):
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: a backend for the CPU in group 'world': .* on cuda only, .*"
                                                 r'init_process_group\("cpu:gloo,cuda:nccl"\)'):
            wrap(nn.Linear(2, 2), group_of(world, "cuda"))

    rl.simulate(2, body)


@pytest.mark.gloo
def test_a_pipeline_whose_stages_share_a_parameter_needs_one_for_the_cpu_too():
    def body(world):
        model = rl.GPT(rl.GPTConfig(vocab_size=8, width=4, layers=2, heads=1, kv_heads=1, ffn=4, seq_len=4, tie=True))
        with pytest.raises(rl.ConfigError, match="a backend for the CPU"):
            rl.pipeline(gpt_pieces(model), gpt_answer(model), group_of(world, "cuda"), microbatches=2)

    rl.simulate(2, body)


@pytest.mark.gloo
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_one_of_both_trains(wrap):
    models = [nn.Linear(2, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def body(world):
        model = wrap(models[world.rank], group_of(world, "cpu", "cuda"))
        model(torch.ones(1, 2)).sum().backward()
        return model(torch.ones(1, 2)).tolist()

    first, second = rl.simulate(2, body)
    assert first == second


def test_a_process_group_that_is_written_in_python_takes_what_it_is_given():
    class Backend(dist.ProcessGroup):
        pass

    expect_cpu_backend(rl.Group(Backend(0, 2)))


def test_a_rank_alone_needs_no_backend():
    alone = dist.ProcessGroup(dist.HashStore(), 0, 1)
    gloo = connect(dist.HashStore(), 0, 1, CPU, timeout=AT_ONCE, loopback=True, own_gpu=False)._get_backend(CPU)
    alone._register_backend(torch.device("cuda"), GLOO, gloo)
    for group in (rl.Group(alone), rl.Group(None)):
        expect_cpu_backend(group)
