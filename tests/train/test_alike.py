"""What only some ranks were given is an error on all of them, before anything is trained."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.models.loss import language_model_loss
from rankloom.parallel.replicas.equal_start import expect_same_values
from rankloom.train.fingerprints import OptimizerMark
from rankloom.train.run.config import make_config, shared_settings


def line() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def start(world: rl.World, rate: float = 0.1, **settings) -> rl.Engine:
    return rl.prepare(line(), loss=lambda m, x: (m(x).sum(), len(x)), world=world, **settings,
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


def called(name, module):
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(("common", "rank_1", "message"), [
    ({"stage": 2}, {"accumulate": 4}, "accumulate is 4, on rank 0 1"),
    ({"stage": 3}, {"accumulate": 4}, "accumulate is 4, on rank 0 1"),
    ({"stage": 3}, {"reshard_after_forward": False}, "reshard_after_forward is False, on rank 0 True"),
    ({"stage": 3}, {"ahead": 2}, "ahead is 2, on rank 0 1"),
    ({"stage": 2, "mesh": rl.Mesh(replicate=2)}, {"offload": True}, "offload is True, on rank 0 False"),
    ({"stage": 2}, {"gradient_memory": 9}, "gradient_memory is 9, on rank 0 0"),
    ({"stage": 1}, {"units": 9}, "units is 9, on rank 0 'auto'"),
    ({"stage": 3}, {"units": called}, "units is 'a function', on rank 0 'auto'"),
    ({"mesh": rl.Mesh(pipe=2), "pipe": "1f1b"}, {"accumulate": 4}, "accumulate is 4, on rank 0 1"),
    ({"mesh": rl.Mesh(tensor=2)}, {"accumulate": 4}, "accumulate is 4, on rank 0 1"),
    ({"mesh": rl.Mesh(tensor=2)}, {"recompute": "full"}, "recompute is 'full', on rank 0 'none'"),
    ({"mesh": rl.Mesh(tensor=2)}, {"tensor_overlap": 2}, "tensor_overlap is 2, on rank 0 1"),
    ({"mesh": rl.Mesh(tensor=2)}, {"tensor_plan": {"head": "column"}}, "tensor_plan is {'head': 'column'}, on rank 0 None"),
    ({}, {"recompute": "1 MiB"}, "recompute is 'a number of bytes', on rank 0 'none, selective or full'"),
    ({"mesh": rl.Mesh(context=2)}, {"context": "all_to_all"}, "context is 'all_to_all', on rank 0 'ring'"),
])
def test_an_option_that_decides_which_collectives_run_is_an_error_on_all_ranks_where_one_has_another(common, rank_1, message):
    """One rank waited for a message that no other one sent, or a backend ended the process."""
    mesh, options = common.get("mesh", 2), {name: value for name, value in common.items() if name != "mesh"}

    def body(world):
        with pytest.raises(rl.ConfigError, match=f"rank 1 was given another way to train than rank 0: {message}; give all ranks the same"):
            rl.prepare(rl.GPT(SHAPE, seed=0), loss=language_model_loss, world=world, optimizer=adams, **options,
                       **rank_1 if world.rank else {})

    rl.simulate(mesh, body)


def test_functions_that_say_what_is_a_unit_are_not_compared():
    """Each process has its own."""
    rl.simulate(2, lambda world: start(world, stage=3, units=lambda name, module: isinstance(module, nn.Linear)))


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


SHAPE = rl.GPTConfig(vocab_size=16, width=16, layers=2, heads=2, kv_heads=2, ffn=16, seq_len=4)


def train_gpt(world, **options):
    engine = rl.prepare(rl.GPT(SHAPE, seed=0), loss=language_model_loss, world=world, optimizer=adams, accumulate=2, **options)
    text = torch.arange(20).view(4, 5) % 16
    return [engine.step((text[:, :-1], text[:, 1:])).loss for _ in range(2)]


@pytest.mark.parametrize(("mesh", "options", "rank_1"), [
    (rl.Mesh(pipe=2), {"pipe": "1f1b", "recompute": "selective"}, {"recompute": "full"}),
    (rl.Mesh(pipe=2), {"pipe": "1f1b", "stage": 1}, {"offload": True}),
    (rl.Mesh(shard=2), {"stage": 3}, {"recompute": "full"})])
def test_stages_may_recompute_and_offload_in_their_own_ways_and_ranks_whose_blocks_exchange_nothing_recompute_so(mesh, options, rank_1):
    """The first stage of a pipeline holds the most micro-batches."""
    alike = rl.simulate(mesh, lambda world: train_gpt(world, **options))
    assert rl.simulate(mesh, lambda world: train_gpt(world, **options | (rank_1 if world.rank else {}))) == alike


def test_where_ranks_of_one_stage_recompute_in_other_ways_all_ranks_are_told():
    def body(world):
        with pytest.raises(rl.ConfigError, match="rank 3 was given another way .* than rank 2: recompute is 'full', on rank 2 'none'"):
            train_gpt(world, pipe="1f1b", recompute="full" if world.rank == 3 else "none")

    rl.simulate(rl.Mesh(pipe=2, tensor=2), body)


def test_a_plan_of_another_type_is_refused_in_words():
    def body(world):
        with pytest.raises(rl.ConfigError, match=r"plan='colwise' is of type str, expected name patterns and their words"):
            train_gpt(world, tensor_plan="colwise")

    rl.simulate(rl.Mesh(tensor=2), body)


def test_at_stage_1_a_rank_may_offload_alone():
    assert rl.simulate(2, lambda world: start(world, stage=1, offload=world.rank == 1).step(torch.ones(2, 2)).count) == [4, 4]


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
import rankloom.train.fingerprints as fingerprints
from torch import nn
class Own(nn.Module):
    def forward(self, x, kind):
        inner = lambda: kind in {"one", "two", "three", "four"}
        return x if inner() or kind in {"five", "six", "seven"} else -x
print(fingerprints.code_of(nn.Sequential(nn.Linear(2, 2), Own())))
"""
    said = {subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True,
                           check=True).stdout for seed in (1, 2, 3)}
    assert len(said) == 1 and "the code of Own" in said.pop()


def test_configs_are_compared_but_for_what_is_of_a_host():
    train = {"global_batch_size": 2, "threads": 1}
    config = lambda rank, **other: make_config({"train": train | other, "data": {"source": f"/host{rank}/texts"}}, "test")
    rl.simulate(2, lambda world: expect_same_values(world, "config", shared_settings(config(world.rank, threads=1 + world.rank))))
    with pytest.raises(rl.ConfigError, match="rank 1 was given another config than rank 0: train.steps is 8, on rank 0 7"):
        rl.simulate(2, lambda world: expect_same_values(world, "config", shared_settings(config(world.rank, steps=7 + world.rank))))


def plateau(engine: rl.Engine, rank: int) -> None:
    """Feeds a scheduler this rank's own metric: rank 1's gets worse, so its rate falls."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0)
    for metric in (0.0, 1.0 if rank == 1 else -1.0):
        scheduler.step(metric)


def another_decay(engine: rl.Engine, rank: int) -> None:
    engine.optimizer.param_groups[1]["weight_decay"] = 0.25 if rank == 1 else 0.0


def another_beta(engine: rl.Engine, rank: int) -> None:
    engine.optimizer.param_groups[0]["betas"] = (0.9, 0.95 if rank == 1 else 0.99)


def another_tensor(engine: rl.Engine, rank: int) -> None:
    """A rate that is a tensor, changed in place."""
    rate = engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    engine.optimizer.param_groups[1]["lr"] = torch.tensor(0.1)
    engine._optimizer_mark.of(engine.optimizer)
    rate.fill_(0.5 if rank == 1 else 0.1)


WAYS_TO_TRAIN = [{"stage": 0}, {"stage": 1}, {"stage": 3}, {"deterministic": 4}, {"stage": 2, "deterministic": 4}, {"compress": "int8"}]


def adams(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=1.0, weight_decay=0.0, foreach=False)


@pytest.mark.parametrize("options", WAYS_TO_TRAIN, ids=str)
@pytest.mark.parametrize(("change", "says"), [
    (plateau, r"lr of group 0 is 0\.01\d*, on rank 0 0\.1"), (another_decay, r"weight_decay of group 1 is 0\.25, on rank 0 0\.0"),
    (another_beta, r"betas of group 0 is \(0\.9, 0\.95\), on rank 0 \(0\.9, 0\.99\)"),
    (another_tensor, r"lr of group 0 is 0\.5, on rank 0 0\.1"),
])
def test_numbers_of_an_optimizer_that_come_to_differ_are_an_error_on_all_ranks_before_the_update(options, change, says):
    """Ranks diverged, and nothing said so. Once they are alike again, training goes on."""
    def body(world):
        engine = rl.prepare(line(), loss=lambda m, x: (m(x).sum(), len(x)), world=world, optimizer=adams, **options)
        engine.step(torch.ones(2, 2))
        before, groups = engine.full_state_dict(), [dict(group) for group in engine.optimizer.param_groups]
        change(engine, world.rank)
        with pytest.raises(rl.ConfigError, match=f"rank 1 was given another optimizer in this step than rank 0: {says}.*A scheduler"):
            engine.step(torch.ones(2, 2))
        after = engine.full_state_dict()
        for group, was in zip(engine.optimizer.param_groups, groups, strict=True):
            group.update(was)
        return before["model"], after["model"], engine.step(torch.ones(2, 2)).step

    for before, after, step in rl.simulate(3, body):
        assert all(torch.equal(after[name], value) for name, value in before.items()) and step == 2


class MeasuresAll(torch.optim.Optimizer):
    """As Prodigy: one step size for all parameters, of what it has seen of all their gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "seen": 0.0})

    def step(self):
        """One step."""
        for group in self.param_groups:
            found = [param for param in group["params"] if param.grad is not None]
            group["seen"] += sum(float(param.grad.square().sum()) for param in found)
            for param in found:
                param.data.sub_(param.grad, alpha=group["lr"] / (1 + group["seen"]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_measures_all_parameters_together_trains_where_each_rank_has_all_and_is_an_error_elsewhere(stage):
    models = [torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def body(world):
        engine = rl.prepare(models[world.rank], loss=lambda m, x: (m(x).sum(), len(x)), world=world, optimizer=MeasuresAll, stage=stage)
        rows = torch.ones(2, 2) + world.rank
        engine.step(rows)
        if stage:
            with pytest.raises(rl.ConfigError, match="seen of group 0 is .* must have all of them on each rank: stage 0"):
                engine.step(rows)
        return engine.step(rows).step if not stage else 0

    assert rl.simulate(2, body) == [0 if stage else 2] * 2


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2, shard=2), rl.Mesh(tensor=2, replicate=2), rl.Mesh(replicate=2, shard=2)], ids=str)
def test_a_schedule_that_differs_between_the_ranks_of_rows_is_an_error_on_meshes_too(mesh):
    shape = rl.GPTConfig(vocab_size=16, width=16, layers=2, heads=2, kv_heads=2, ffn=16, seq_len=4)

    def body(world):
        own = world.group("replicate", "shard").rank
        pipe = {"pipe": "1f1b", "accumulate": 2} if mesh.pipe > 1 else {}
        engine = rl.prepare(rl.GPT(shape, seed=0), loss=language_model_loss, world=world, optimizer=adams, stage=int(mesh.shard > 1),
                            schedule=lambda step: 0.1 / (1 + step * own), **pipe)
        tokens = torch.ones(4, 4, dtype=torch.long)
        engine.step((tokens, tokens))
        with pytest.raises(rl.ConfigError, match="than rank .: lr of group 0 is 0.05, on rank . 0.1"):
            engine.step((tokens, tokens))

    rl.simulate(mesh, body)


def test_the_mark_of_an_optimizer_changes_with_each_of_its_numbers_and_with_nothing_else():
    optimizer, mark = adams(list(line().parameters())), OptimizerMark()
    first = mark.of(optimizer)
    seen = {first}
    for key, value in {"lr": 0.2, "weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-7, "amsgrad": True}.items():
        for group in optimizer.param_groups:
            was, group[key] = group[key], value
            seen.add(mark.of(optimizer))
            group[key] = was
    assert len(seen) == 1 + 5 * 2 and all(0 <= number < 2**31 for number in seen)
    optimizer.param_groups[0] |= {"lr": torch.tensor(0.1, dtype=torch.float64), "amsgrad": 0, "betas": [0.9, 0.999]}   # equal numbers
    assert mark.of(optimizer) == first


def test_rates_on_a_gpu_are_not_read():
    """To read one would wait for all that is queued; on the meta device it would be an error."""
    optimizer, mark = adams(list(line().parameters())), OptimizerMark()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    assert mark.of(optimizer) == mark.of(optimizer)
