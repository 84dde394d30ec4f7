"""`engine.save` and `engine.load`: a run goes on from a checkpoint on any mesh as if it had never stopped, and nothing of it is lost,
written twice, or half there."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from threading import Lock

import pytest
import torch
from torch import nn

import rankloom as rl
from full_disk import fill_disk_of_rank_1
from rankloom import GPT, GPTConfig
from rankloom.base.errors import ConfigError, DataError, ModelMismatch, StorageError
from rankloom.checkpoint import files
from rankloom.checkpoint.files import read_manifest, sizes_of
from rankloom.checkpoint.manifest import announce
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.train import checkpoint
from rankloom.train.fp8 import Recipe
from rankloom.train.precision import PRECISIONS

ROWS, BEFORE, AFTER = 8, 2, 2
DENSE = [(rl.Mesh(), 0), (rl.Mesh(replicate=2), 0), (rl.Mesh(shard=2), 3), (rl.Mesh(replicate=2, shard=2), 1), (rl.Mesh(tensor=2), 0),
         (rl.Mesh(tensor=4), 1), (rl.Mesh(shard=2, tensor=2), 3), (rl.Mesh(pipe=2), 0), (rl.Mesh(pipe=4), 2),
         (rl.Mesh(pipe=2, shard=2), 2), (rl.Mesh(pipe=2, tensor=2), 1), (rl.Mesh(context=2, shard=2), 2)]
MIXED = [(rl.Mesh(), 0), (rl.Mesh(expert=2), 0), (rl.Mesh(shard=2, expert=2), 3), (rl.Mesh(tensor=2, expert=2), 1), (rl.Mesh(pipe=2), 1)]
VOCABULARY = 37   # that two ranks pad, and four


def engine_of(world: rl.World, stage: int, *, experts: bool = False, tie: bool = True, **how) -> rl.Engine:
    moe = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, bias_rate=0.01) if experts else None
    config = GPTConfig(vocab_size=VOCABULARY, width=16, layers=4, heads=4, kv_heads=2, ffn=24, seq_len=12, tie=tie, moe=moe)
    how = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2), "accumulate": 2, "clip": 1.0} | how
    model = GPT(config, seed=1, dtype=how.pop("dtype", torch.float64))
    return rl.prepare(model, loss=language_model_loss, world=world, stage=stage, **how)


def steps(engine: rl.Engine, count: int) -> list[float]:
    """Losses of so many steps, each on the batch of its number."""
    losses = []
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY, (ROWS, 13), generator=torch.Generator().manual_seed(engine.steps_done))
        mine = tokens.tensor_split(engine.group.size)[engine.group.rank]
        losses.append(engine.step((mine[:, :-1].contiguous(), mine[:, 1:].contiguous())).loss)
    return losses


def saved_by(mesh: rl.Mesh, stage: int, folder, **how) -> list[float]:
    """The losses after the save, of a run that does not stop."""
    def body(world):
        engine = engine_of(world, stage, **how)
        steps(engine, BEFORE)
        engine.save(folder)
        return steps(engine, AFTER)

    return rl.simulate(mesh, body)[0]


def gone_on(mesh: rl.Mesh, stage: int, folder, **how) -> list[float]:
    def body(world):
        engine = engine_of(world, stage, **how)
        engine.load(folder)
        assert engine.steps_done == BEFORE
        return steps(engine, AFTER)

    return rl.simulate(mesh, body)[0]


@pytest.mark.parametrize("mesh, stage", DENSE, ids=str)
def test_a_run_goes_on_from_any_mesh_on_one_rank_and_from_one_rank_on_any_mesh(tmp_path, mesh, stage):
    there, back = tmp_path / "there", tmp_path / "back"
    # the layouts add in other orders: as everywhere, 1e-12 in fp64
    reference = saved_by(mesh, stage, there)
    assert gone_on(rl.Mesh(), 0, there) == pytest.approx(reference, rel=1e-12)
    assert gone_on(mesh, stage, there) == pytest.approx(reference, rel=1e-12)
    reference = saved_by(rl.Mesh(), 0, back)
    assert gone_on(mesh, stage, back) == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("mesh, stage", MIXED, ids=str)
def test_experts_go_from_any_mesh_to_any_other(tmp_path, mesh, stage):
    reference = saved_by(mesh, stage, tmp_path, experts=True, tie=False)
    for other in MIXED:
        assert gone_on(*other, tmp_path, experts=True, tie=False) == pytest.approx(reference, rel=1e-12), other


@pytest.mark.parametrize("mesh, stage", [*DENSE, (rl.Mesh(replicate=2, expert=2), 0)], ids=str)
def test_each_element_is_written_once_and_the_files_are_of_even_size(tmp_path, mesh, stage):
    def body(world):
        engine = engine_of(world, stage, experts=mesh.expert > 1)
        steps(engine, 1)
        engine.save(tmp_path)
        state = engine.full_state_dict()
        unique = state["model"]   # a tied GPT has one name for its one matrix
        remembered = [value for held in state["optimizer"]["state"].values() for value in held.values()]
        return sum(value.nbytes for value in (*unique.values(), *remembered)), {name: value.shape for name, value in unique.items()}

    nbytes, shapes = rl.simulate(mesh, body)[0]
    _, manifest = read_manifest(tmp_path)
    assert sizes_of(manifest, "model/") == shapes
    held = [tensor.dtype.itemsize * torch.Size(tensor.shape).numel() for tensor in manifest.tensors.values()]
    assert sum(held) == nbytes
    headers = sum(int.from_bytes((tmp_path / file.name).read_bytes()[:8], "little") + 8 for file in manifest.files)
    assert sum(file.nbytes for file in manifest.files) == nbytes + headers
    if mesh.pipe == 1:   # stages are as large as they are
        sizes = [file.nbytes for file in manifest.files]
        assert len(sizes) == mesh.size and max(sizes) < 2 * min(sizes)


def test_no_value_travels_between_ranks(tmp_path):
    def body(world):
        engine = engine_of(world, 3)
        steps(engine, 1)
        before = world.ledger.bytes
        engine.save(tmp_path)
        engine.load(tmp_path)
        return world.ledger.bytes - before, sum(value.nbytes for value in engine.full_state_dict()["model"].values())

    for sent, whole in rl.simulate(rl.Mesh(shard=2), body):
        assert sent < whole   # of a state of three times that: the names and boxes of tensors, which are small here


@pytest.mark.parametrize("p", [2, 8])
def test_a_save_sends_what_a_rank_holds_once_however_many_ranks_there_are(tmp_path, p):
    """Every rank had sent it to all others, and held what all of them had told, of which rank 0 alone makes the manifest."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])

    def body(world):
        engine = rl.prepare(deepcopy(model), loss=language_model_loss, world=world, stage=0,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        before = world.ledger.bytes
        engine.save(tmp_path)
        return world.ledger.bytes - before, len(json.dumps(announce(engine.placement.parts())))

    for sent, text in rl.simulate(p, body)[1:]:
        assert text < sent < 2 * text   # with the names of parameters in the optimizer's groups, and a few numbers to each rank


def test_ranks_that_do_not_hold_all_of_a_tensor_between_them_are_all_told_so_and_write_nothing(tmp_path, monkeypatch):
    """Rank 0 alone looks at what all announce."""
    monkeypatch.setattr(checkpoint, "announce", lambda parts: [part for part in announce(parts) if not any(start for start, _ in part.box)])

    def body(world):
        with pytest.raises(ModelMismatch, match=r"ranks hold \d+ elements of model/.* between them, expected \d+; has a step failed"):
            engine_of(world, 3).save(tmp_path / "ckpt")

    rl.simulate(3, body)
    assert not list(tmp_path.iterdir())


def bits(engine: rl.Engine) -> list[torch.Tensor]:
    state = engine.full_state_dict()
    remembered = state["optimizer"]["state"]
    return [*state["model"].values(), *(remembered[name][key] for name in sorted(remembered) for key in sorted(remembered[name]))]


@pytest.mark.parametrize("stage, other", [(0, 3), (3, 0), (2, 1)])
def test_a_deterministic_run_has_the_same_bits_whether_it_stopped_or_not(tmp_path, stage, other):
    how = {"deterministic": 4, "accumulate": 1, "dtype": torch.float32, "precision": "bf16"}

    def straight(world):
        engine = engine_of(world, stage, **how)
        steps(engine, BEFORE)
        engine.save(tmp_path)
        steps(engine, AFTER)
        return bits(engine)

    def stopped(world):
        engine = engine_of(world, other, **how)
        engine.load(tmp_path)
        steps(engine, AFTER)
        return bits(engine)

    expected = rl.simulate(2, straight)[0]
    for ranks in (1, 3):
        for mine, theirs in zip(rl.simulate(ranks, stopped)[0], expected, strict=True):
            assert torch.equal(mine, theirs)


DELAYED = replace(PRECISIONS["fp8"], float8=Recipe(timing="delayed", history=3))


@pytest.mark.parametrize("how", [
    {"precision": "fp16", "dtype": torch.float32}, {"precision": "bf16", "dtype": torch.float32},
    {"optimizer": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9)},
    {"optimizer": lambda params: torch.optim.Adagrad(params, lr=1e-2)},
    {"optimizer": lambda params: torch.optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "betas": (0.8, 0.9)}])},
    {"optimizer": lambda params: torch.optim.Adafactor(params)},
    {"schedule": lambda step: 1e-2 / (step + 1)},
], ids=["fp16", "bf16", "momentum", "adagrad", "groups", "adafactor", "schedule"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_that_a_step_depends_on_comes_back(tmp_path, how, stage):
    # on as many ranks, where addition has one order: the very same losses
    assert saved_by(rl.Mesh(shard=2), stage, tmp_path, **how) == gone_on(rl.Mesh(shard=2), stage, tmp_path, **how)


class Wide(nn.Module):
    """Layers that fp8 multiplies, and a note of its own."""

    def __init__(self, note=None):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.note = note
        for at, param in enumerate(self.parameters()):
            param.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(at))

    def forward(self, x):
        return self.layers(x)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def wide(world, note=None, **how):
    loss = lambda model, batch: (model(batch).float().square().sum(), batch.shape[0])
    return rl.prepare(Wide(note), loss=loss, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), world=world, **how)


def wide_steps(engine, count):
    draw = torch.Generator().manual_seed(engine.steps_done)
    return [engine.step(torch.randn(32, 32, generator=draw)).loss for _ in range(count)]


@pytest.mark.parametrize("stage", [0, 3])
def test_what_delayed_scaling_remembers_and_extra_state_come_back(tmp_path, stage):
    def straight(world):
        engine = wide(world, note=[1, "two"], stage=stage, precision=DELAYED)
        wide_steps(engine, BEFORE)
        engine.save(tmp_path)
        return wide_steps(engine, AFTER)

    def stopped(world):
        engine = wide(world, stage=stage, precision=DELAYED)
        engine.load(tmp_path)
        return engine.model.note, wide_steps(engine, AFTER)

    expected = rl.simulate(2, straight)
    assert rl.simulate(2, stopped) == [([1, "two"], losses) for losses in expected]


def test_of_extra_state_that_ranks_have_otherwise_that_of_the_first_is_saved(tmp_path):
    def body(world):
        wide(world, note=world.rank).save(tmp_path)
        engine = wide(world)
        engine.load(tmp_path)
        return engine.model.note

    assert rl.simulate(2, body) == [0, 0]


def test_extra_state_that_json_has_not_is_told_by_name_on_all_ranks(tmp_path):
    def body(world):
        with pytest.raises(ConfigError, match="_extra_state cannot be in a checkpoint, which has no pickle"):
            wide(world, note={1, 2}).save(tmp_path)

    rl.simulate(2, body)
    assert not list(tmp_path.iterdir())


class Spread(nn.Module):
    """A parameter in another order of memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_what_is_remembered_lies_in_memory_as_its_parameter_does(tmp_path, fused, by_file):
    """Fused kernels go through memory, not through dims."""
    def made(world):
        torch.manual_seed(0)
        loss = lambda model, batch: (model(batch).square().sum(), batch.shape[0])
        return rl.prepare(Spread(), loss=loss, world=world, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, fused=fused))

    def body(world):
        x, engine, other = torch.randn(2, 3, 5, 5), made(world), made(world)
        for _ in range(3):
            engine.step(x)
        if by_file:
            engine.save(tmp_path)
            other.load(tmp_path)
        else:
            other.load_full_state_dict(engine.full_state_dict())
        return [engine.step(x).loss for _ in range(3)], [other.step(x).loss for _ in range(3)]

    straight, stopped = rl.simulate(1, body)[0]
    assert straight == stopped


class Decaying(torch.optim.Optimizer):
    """SGD whose rate decays by a number that it keeps for each tensor, in a tensor of one element."""

    elementwise = True

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            share = self.state[param].setdefault("share", torch.ones(1))
            share *= 0.5
            param -= 0.1 * share * param.grad


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("there, here", [(2, 1), (1, 2), (2, 2)])
def test_a_number_of_a_tensor_stays_one_where_a_rank_has_a_slice_of_one_element(tmp_path, there, here, by_file):
    """17 elements on two ranks are 16 and 1: slices end on 64 bytes."""
    loss = lambda model, batch: (model(batch).square().sum(), batch.shape[0])

    def made(world):
        torch.manual_seed(0)
        return rl.prepare(nn.Linear(17, 1, bias=False), loss=loss, world=world, optimizer=Decaying, stage=1)

    def step(engine):
        rows = torch.randn(4, 17, generator=torch.Generator().manual_seed(engine.steps_done))
        return engine.step(rows.tensor_split(engine.group.size)[engine.group.rank]).loss

    def save(world):
        engine = made(world)
        step(engine), step(engine)
        engine.save(tmp_path)
        return engine.full_state_dict(), [step(engine) for _ in range(3)]

    def go_on(world):
        engine = made(world)
        engine.load(tmp_path) if by_file else engine.load_full_state_dict(state)
        return [step(engine) for _ in range(3)]

    state, straight = rl.simulate(rl.Mesh(shard=there), save)[0]
    assert read_manifest(tmp_path)[1].tensors["optimizer/share/weight"].shape == (1,)
    assert rl.simulate(rl.Mesh(shard=here), go_on)[0] == pytest.approx(straight, rel=1e-5)   # fp32: the sums are in another order


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_parameter_is_written_once_under_its_first_name(tmp_path, stage):
    tied = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(tied, nn.Tanh(), tied)

    def body(world):
        rl.prepare(deepcopy(model), loss=lambda model, batch: (model(batch).sum(), len(batch)), world=world, stage=stage,
                   optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).save(tmp_path)

    rl.simulate(2, body)
    assert [*read_manifest(tmp_path)[1].tensors] == ["model/0.weight"]


def test_a_slice_of_one_element_is_one_also_where_another_parameter_has_no_more(tmp_path):
    """The weight is on two ranks, 16 and 1, and the bias on the third."""
    model = nn.Linear(17, 1)

    def body(world):
        engine = rl.prepare(deepcopy(model), loss=lambda model, batch: (model(batch).square().sum(), len(batch)), world=world, stage=1,
                            optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))
        engine.step(torch.ones(2, 17))
        before = bits(engine)
        engine.save(tmp_path)
        engine.load(tmp_path)
        return all(map(torch.equal, bits(engine), before))

    assert rl.simulate(rl.Mesh(shard=3), body) == [True] * 3


def test_what_is_remembered_of_the_padding_of_a_vocabulary_comes_back_as_zeros(tmp_path):
    def body(world):
        engine = engine_of(world, 1)
        steps(engine, 1)
        held = lambda: {name: engine.optimizer.state[owner]["exp_avg"].clone() for name, owner in engine.placement.owners.items()}
        before = held()
        engine.save(tmp_path)
        engine.load(tmp_path)
        return all(torch.equal(before[name], value) for name, value in held().items())

    assert rl.simulate(rl.Mesh(tensor=2), body) == [True] * 2


class Slowly(torch.optim.SGD):
    """Keeps a value under a name with a slash and a percent sign, as paths of metrics have."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["ema/5%2F"] = 0.5 * state.get("ema/5%2F", 0.0) + param.grad
            state["seen/at"] = state.get("seen/at", 0) + 1
            param.sub_(0.1 * state["ema/5%2F"])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_frozen_parameters_that_tensor_ranks_hold_parts_of_are_written_whole(tmp_path, stage):
    def values_of(world, stage, saves):
        config = GPTConfig(vocab_size=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, ffn=24, seq_len=12)
        model = GPT(config, seed=1 + saves)
        model.blocks[0].requires_grad_(False)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=torch.optim.SGD, world=world, stage=stage)
        engine.save(tmp_path) if saves else engine.load(tmp_path)
        return engine.full_state_dict()["model"]

    saved = rl.simulate(rl.Mesh(tensor=2), lambda world: values_of(world, stage, True))[0]
    found = rl.simulate(1, lambda world: values_of(world, 0, False))[0]
    assert all(torch.equal(found[name], value) for name, value in saved.items())


def test_a_value_of_an_optimizer_may_have_a_slash_in_its_name(tmp_path):
    loss = lambda model, batch: (model(batch).square().sum(), batch.shape[0])
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def body(world):
        torch.manual_seed(0)
        engines = [rl.prepare(nn.Linear(4, 4), loss=loss, world=world, optimizer=Slowly) for _ in range(2)]
        engines[0].step(rows)
        engines[0].save(tmp_path)
        engines[1].load(tmp_path)
        assert engines[1].full_state_dict()["optimizer"]["state"]["weight"]["seen/at"] == 1
        return [engine.step(rows).loss for engine in engines]

    ((one, other),) = rl.simulate(1, body)
    assert one == other


class Computed(nn.Linear):
    """Its state dict has something that it makes up."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(5.0)


class Remembers(torch.optim.SGD):
    """Something that belongs to no parameter."""

    def step(self, closure=None):
        self.state["calls"] = 1
        return super().step(closure)


@pytest.mark.parametrize("model, optimizer, said", [
    (lambda: Computed(4, 4), torch.optim.SGD, "scale is in the model's state dict, and neither a parameter nor a buffer"),
    (lambda: nn.Linear(4, 4), Remembers, "belongs to none of its parameters"),
    (lambda: nn.Linear(4, 4), lambda params: torch.optim.SGD([{"params": params, "by": {1: 2}}]), "by cannot be in a checkpoint"),
], ids=["computed", "no parameter's", "keys"])
def test_what_could_not_be_given_back_is_refused_by_name_when_it_is_saved(tmp_path, model, optimizer, said):
    def body(world):
        torch.manual_seed(0)
        loss = lambda model, batch: (model(batch).square().sum(), batch.shape[0])
        engine = rl.prepare(model(), loss=loss, world=world, optimizer=optimizer)
        engine.step(torch.randn(4, 4))
        with pytest.raises(ConfigError, match=said):
            engine.save(tmp_path)

    rl.simulate(2, body)
    assert not list(tmp_path.iterdir())


class Numbered(torch.optim.SGD):
    """Keeps two values of each parameter by number."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] |= {0: param.clone(), 1: 2.0}


@pytest.mark.parametrize("stage", [0, 2])
def test_values_that_an_optimizer_keeps_by_number_are_refused_on_all_ranks(tmp_path, stage):
    """They came out of `full_state_dict` under strings, with whatever was in memory."""
    def body(world):
        loss = lambda model, batch: (model(batch).square().sum(), batch.shape[0])
        torch.manual_seed(0)
        engine = rl.prepare(nn.Linear(4, 4, bias=False), loss=loss, world=world, optimizer=Numbered, stage=stage)   # all on rank 0
        engine.step(torch.ones(4, 4))
        with pytest.raises(ConfigError, match="optimizer state 0 of weight is a Tensor under a key of class int"):
            engine.full_state_dict()
        with pytest.raises(ConfigError, match="keeps a value of weight under 0, and .* such as '0'"):
            engine.save(tmp_path)

    rl.simulate(2, body)
    assert not list(tmp_path.iterdir())


class Counts(torch.optim.SGD):
    """Keeps a number that belongs to no parameter, from the start."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["calls"] = 0

    def step(self, closure=None):
        self.state["calls"] += 1
        return super().step(closure)

    elementwise = True


@pytest.mark.parametrize("stage", [0, 2])
def test_what_an_optimizer_keeps_for_no_parameter_stays_and_a_whole_state_without_it_is_refused(stage):
    def body(world):
        torch.manual_seed(0)
        made = lambda build: rl.prepare(deepcopy(start), loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
                                        world=world, optimizer=build, stage=stage)
        engine, plain = made(Counts), made(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        for each in (engine, plain):
            each.step(torch.ones(2, 4))
        assert engine.held() == plain.held()
        with pytest.raises(ConfigError, match="under 'calls'"):
            engine.full_state_dict()
        with pytest.raises(ModelMismatch, match="under 'calls'"):
            engine.load_full_state_dict(plain.full_state_dict())
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        return engine.optimizer.state["calls"], engine.step(torch.ones(2, 4)).loss == plain.step(torch.ones(2, 4)).loss

    start = nn.Linear(4, 4)
    assert rl.simulate(2, body) == [(1, True)] * 2


class Settled(torch.optim.SGD):
    """Has settings that are tensors, and reads them in a step."""

    def __init__(self, params, scales):
        super().__init__(params, lr=torch.tensor(0.1))
        self.param_groups[0]["scales"] = scales

    def step(self, closure=None):
        self.param_groups[0]["scales"].mul_(2.0)
        return super().step(closure)

    elementwise = True


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
def test_settings_that_are_tensors_come_back_as_such(tmp_path, stage, by_file):
    def body(world):
        engine, other = [rl.prepare(nn.Linear(4, 4), loss=lambda model, batch: (model(batch).square().sum(), len(batch)), world=world,
                                    stage=stage, optimizer=lambda params: Settled(params, torch.ones(2, dtype=torch.float64)))
                         for _ in range(2)]
        engine.step(torch.ones(2, 4))
        if by_file:
            engine.save(tmp_path)
            other.load(tmp_path)
        else:
            other.load_full_state_dict(engine.full_state_dict())
        other.step(torch.ones(2, 4))
        return other.optimizer.param_groups[0]["scales"].tolist(), engine.optimizer.param_groups[0]["scales"].tolist()

    assert rl.simulate(1, body) == [([4.0, 4.0], [2.0, 2.0])]


# ---------------------------------------------------------------------- what goes wrong


def refused(kind, said, make, folder):
    """All ranks raise, and each trains on as if nothing had been asked."""
    def body(world):
        untouched, engine = make(world), make(world)
        steps(untouched, 1), steps(engine, 1)
        with pytest.raises(kind, match=said):
            engine.load(folder)
        assert all(torch.equal(a, b) for a, b in zip(bits(engine), bits(untouched), strict=True))
        assert steps(engine, 1) == steps(untouched, 1)

    rl.simulate(2, body)


def test_where_there_is_no_checkpoint_loading_says_so_and_changes_nothing(tmp_path):
    refused(DataError, "no such folder", lambda world: engine_of(world, 3), tmp_path / "never")
    refused(DataError, "holds no manifest.json", lambda world: engine_of(world, 0), tmp_path)


def test_a_damaged_file_is_noticed_before_anything_is_changed(tmp_path):
    saved_by(rl.Mesh(shard=2), 3, tmp_path)
    path = max(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    refused(DataError, "the file is damaged", lambda world: engine_of(world, 1), tmp_path)


def test_whichever_file_is_damaged_it_is_noticed_by_fewer_ranks_than_there_are_files(tmp_path):
    saved_by(rl.Mesh(shard=4), 3, tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DataError, match=f"{path.name}.* the file is damaged"):
            rl.simulate(2, lambda world: engine_of(world, 0).load(tmp_path))
        path.write_bytes(whole)


def test_the_manifest_of_another_program_is_not_overwritten(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")

    def body(world):
        with pytest.raises(ConfigError, match="manifest.json: is there, and not of a checkpoint"):
            engine_of(world, 0).save(tmp_path)

    rl.simulate(2, body)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("manifest.json", "{}")]


def test_the_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path):
    saved_by(rl.Mesh(shard=2), 3, tmp_path)
    untied = f"{tmp_path}, on rank .*head.weight: missing in the state dict"
    refused(ModelMismatch, untied, lambda world: engine_of(world, 3, tie=False), tmp_path)
    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9)}
    refused(ModelMismatch, "it is the state of another kind of optimizer", lambda world: engine_of(world, 3, **sgd), tmp_path)
    others = {"Adamax": "has exp_avg, exp_avg_sq, step, and exp_inf is needed", "NAdam": "another kind of optimizer",
              "Adafactor": "another kind of optimizer"}
    for name, message in others.items():
        other = {"optimizer": lambda params, name=name: getattr(torch.optim, name)(params, lr=0.1)}
        refused(ModelMismatch, message, lambda world, other=other: engine_of(world, 3, **other), tmp_path)


def test_a_folder_that_cannot_be_made_is_told_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def body(world):
        engine = engine_of(world, 0)
        steps(engine, 1)
        with pytest.raises(ConfigError, match="file: cannot be made"):
            engine.save(tmp_path / "file")
        return steps(engine, 1)

    rl.simulate(2, body)


@pytest.mark.parametrize("folder", ["", None, 3, "a\0b"], ids=repr)
def test_a_folder_that_is_none_is_told_on_all_ranks_in_words(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)

    def body(world):
        engine = engine_of(world, 0)
        for ask in (engine.save, engine.load):
            with pytest.raises(ConfigError, match=f"rank 1: the folder of a checkpoint is {re.escape(repr(folder))}, expected a path"):
                ask(folder if world.rank == 1 else tmp_path)

    rl.simulate(2, body)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["x" * 300, "~nobody-of-this-name/x"], ids=["long", "nobody's"])
def test_a_folder_where_one_rank_cannot_look_is_told_on_all_ranks(tmp_path, folder):
    """The others had waited for that rank until the time-out."""
    def body(world):
        engine = engine_of(world, 0)
        for ask in (engine.save, engine.load):
            with pytest.raises(ConfigError, match=f"rank 1: {folder} cannot be the folder of a checkpoint .*; give another"):
                ask(folder if world.rank == 1 else tmp_path)
        return True

    assert rl.simulate(2, body) == [True] * 2


def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_from_before(tmp_path, monkeypatch):
    reference = saved_by(rl.Mesh(shard=2), 3, tmp_path)
    fill_disk_of_rank_1(monkeypatch)

    def body(world):
        engine = engine_of(world, 3)
        steps(engine, BEFORE + 1)
        with pytest.raises(ConfigError, match="No space left on device"):
            engine.save(tmp_path)

    rl.simulate(rl.Mesh(shard=2), body)
    assert gone_on(rl.Mesh(shard=2), 3, tmp_path) == reference
    assert len(list(tmp_path.iterdir())) == 3   # a manifest, and a file of each rank: nothing of the save that failed


def test_where_rank_0_has_no_memory_for_the_manifest_all_are_told_and_nothing_is_left(tmp_path, monkeypatch):
    def no_memory(manifest):
        raise MemoryError

    monkeypatch.setattr(files, "to_json", no_memory)

    def body(world):
        with pytest.raises(ConfigError, match="cannot be written .no memory for its manifest"):
            engine_of(world, 3).save(tmp_path / "new")

    rl.simulate(rl.Mesh(shard=2), body)
    assert not (tmp_path / "new").exists()


def test_saving_again_replaces_what_was_there(tmp_path):
    def body(world):
        engine = engine_of(world, 2)
        for _ in range(2):
            steps(engine, 1)
            engine.save(tmp_path)

    rl.simulate(2, body)
    assert len(list(tmp_path.iterdir())) == 3
    assert read_manifest(tmp_path)[1].facts["run"]["step"] == 2


def test_a_second_job_that_saves_into_the_folder_meanwhile_is_refused_on_all_ranks_and_a_checkpoint_is_left(tmp_path, monkeypatch):
    """Each removed the files of the other."""
    real = files.to_json

    def late(manifest):   # the first has checked its own files, and has not renamed its manifest
        monkeypatch.setattr(files, "to_json", real)
        rl.simulate(2, refused_to_save)
        return real(manifest)

    def refused_to_save(world):
        with pytest.raises(StorageError, match=f"{tmp_path}: another job is saving into this folder; give each job its own"):
            engine_of(world, 0).save(tmp_path)

    monkeypatch.setattr(files, "to_json", late)
    reference = saved_by(rl.Mesh(), 0, tmp_path)
    assert gone_on(rl.Mesh(), 0, tmp_path) == reference
    assert len(list(tmp_path.iterdir())) == 2, "a manifest and a file, and no lock"


def test_a_load_gives_one_whole_checkpoint_whenever_another_job_saves_into_the_folder(tmp_path, monkeypatch):
    """It spoke of a damaged file or of another host's disk, or had loaded a half. Ranks 0 and 1 read the manifests of two saves."""
    reals = {name: getattr(checkpoint, name) for name in ("read_manifest", "expect_unchanged", "Reader")}
    saved_by(rl.Mesh(), 0, tmp_path)

    def after_a_save(name):
        first = Lock()

        def begin(*given):
            if first.acquire(blocking=False):
                rl.simulate(1, save_one_more)
            return reals[name](*given)
        return begin

    def save_one_more(world):
        engine = engine_of(world, 0)
        engine.load(tmp_path)
        steps(engine, 1)
        engine.save(tmp_path)

    for number, name in enumerate(reals):
        monkeypatch.undo()
        monkeypatch.setattr(checkpoint, name, after_a_save(name))

        def load(world):
            engine = engine_of(world, 3)
            engine.load(tmp_path)
            return engine.steps_done, engine.full_state_dict()["model"]

        (step, values), (other, _) = rl.simulate(2, load)
        assert step == other and step >= BEFORE + number
        expected = rl.simulate(1, partial(at_step, step=step))[0]
        assert all(torch.allclose(values[key], expected[key], rtol=1e-12) for key in expected)
    assert len(list(tmp_path.iterdir())) > 2, "what was read when the last save ended is left to the next"


def at_step(world: rl.World, step: int) -> dict[str, torch.Tensor]:
    engine = engine_of(world, 0)
    steps(engine, step)
    return engine.full_state_dict()["model"]


def test_a_folder_that_holds_another_checkpoint_on_one_rank_is_told_on_all(tmp_path):
    for step in (1, 2):
        rl.simulate(1, lambda world, step=step: (engine := engine_of(world, 0), steps(engine, step), engine.save(tmp_path / str(step))))

    def body(world):
        with pytest.raises(ModelMismatch, match="holds another checkpoint on rank 1 than on rank 0; give a folder that all hosts share"):
            engine_of(world, 0).load(tmp_path / str(1 + world.rank))

    rl.simulate(2, body)


def save_in_a_process(world: rl.World, folder: str) -> list[float]:
    engine = engine_of(world, 3)
    steps(engine, BEFORE)
    engine.save(folder)
    return steps(engine, AFTER)


def test_processes_write_what_threads_read_on_another_mesh(tmp_path):
    reference, _ = rl.spawn(2, partial(save_in_a_process, folder=str(tmp_path)))
    assert gone_on(rl.Mesh(tensor=2), 0, tmp_path) == pytest.approx(reference, rel=1e-12)
