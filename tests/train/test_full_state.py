"""`full_state_dict`: on meshes that split the model one rank gets the whole, the others hold no more than a tensor meanwhile; and a run
goes on from it as if it had never stopped."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom import GPT, GPTConfig
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.train.fp8 import Recipe
from rankloom.train.precision import PRECISIONS
from storages import Storages

MESHES = [(rl.Mesh(replicate=3), 0), (rl.Mesh(replicate=2, shard=2), 3), (rl.Mesh(tensor=2), 0), (rl.Mesh(pipe=3), 1),
          (rl.Mesh(shard=2, expert=2), 3), (rl.Mesh(pipe=2, context=2), 2), (rl.Mesh(replicate=2, tensor=2), 2),
          (rl.Mesh(shard=2, tensor=2, expert=2), 1), (rl.Mesh(pipe=2, shard=2, tensor=2), 3)]


def engine_of(world: rl.World, stage: int, layers: int = 2) -> rl.Engine:
    """After a step of AdamW, on rows that are the same everywhere."""
    experts = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, bias_rate=0.01) if world.mesh.expert > 1 else None
    config = GPTConfig(vocab_size=37, width=16, layers=layers, heads=4, kv_heads=1, ffn=24, seq_len=12, tie=stage < 2, moe=experts)
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config, dtype=torch.float64), loss=language_model_loss, world=world, stage=stage,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **pipe)
    tokens = torch.randint(0, 37, (4, 13), generator=torch.Generator().manual_seed(1))
    engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return engine


@pytest.mark.parametrize("way", ["full_state_dict", "save"])
@pytest.mark.parametrize(("mesh", "stage"), [(rl.Mesh(), 0), (rl.Mesh(shard=2), 3)], ids=str)
def test_adamw_goes_on_from_a_state_of_adam_as_torch_s_own_does(mesh, stage, way, tmp_path):
    """Loading in torch sets right that its decay is no part of the gradient."""
    build = {name: lambda params, name=name: getattr(torch.optim, name)(params, lr=0.1, weight_decay=0.5) for name in ("Adam", "AdamW")}
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(4)]
    start = nn.Linear(6, 3).double()

    def body(world):
        engines = {name: rl.prepare(copy.deepcopy(start), loss=lambda model, x: (model(x).square().sum(), len(x)), optimizer=build[name],
                                    world=world, stage=stage) for name in build}
        share = lambda x: x.tensor_split(world.size)[world.rank]
        for x in rows[:2]:
            engines["Adam"].step(share(x))
        if way == "save":
            engines["Adam"].save(tmp_path / "step")
            engines["AdamW"].load(tmp_path / "step")
        else:
            engines["AdamW"].load_full_state_dict(engines["Adam"].full_state_dict())
        for x in rows[2:]:
            engines["AdamW"].step(share(x))
        return engines["AdamW"].full_state_dict()["model"]

    plain = copy.deepcopy(start)
    optimizer = build["Adam"](plain.parameters())
    for number, x in enumerate(rows):
        if number == 2:
            before, optimizer = optimizer, build["AdamW"](plain.parameters())
            optimizer.load_state_dict(before.state_dict())
        optimizer.zero_grad()
        (plain(x).square().sum() / len(x)).backward()
        optimizer.step()
    for model in rl.simulate(mesh, body):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model[name], value, rtol=1e-12, atol=1e-14)


class WithNothing(nn.Linear):
    """Has a parameter without elements, too."""

    def __init__(self):
        super().__init__(6, 3, dtype=torch.float64)
        self.nothing = nn.Parameter(torch.empty(0, 6, dtype=torch.float64))

    def forward(self, x):
        return super().forward(torch.cat([x, self.nothing]))


@pytest.mark.parametrize("deterministic", [False, 2])
@pytest.mark.parametrize("stages", [(0, 0), (2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("way", ["full_state_dict", "save"])
def test_momentum_goes_on_where_a_parameter_has_no_elements(stages, way, deterministic, tmp_path):
    """torch's fused SGD fails where it has a momentum of some gradients and none of others."""
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(4)]
    start = WithNothing()

    def body(world):
        first, then = [rl.prepare(copy.deepcopy(start), loss=lambda model, x: (model(x).square().sum(), len(x)), world=world, stage=stage,
                                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
                                  deterministic=deterministic) for stage in stages]
        share = lambda x: x.tensor_split(world.size)[world.rank]
        for x in rows[:2]:
            first.step(share(x))
        if way == "save":
            first.save(tmp_path / "step")
            then.load(tmp_path / "step")
        else:
            then.load_full_state_dict(first.full_state_dict())
        never_stopped, gone_on = [[engine.step(share(x)).loss for x in rows[2:]] for engine in (first, then)]
        assert gone_on == pytest.approx(never_stopped, rel=1e-12)

    rl.simulate(2, body)


def remembered(state: dict) -> dict:
    """What the run remembers beside tensors of the model's."""
    return state["optimizer"]["run"]


@pytest.mark.parametrize("mesh, stage", MESHES, ids=str)
def test_one_rank_gets_what_all_would_get_and_the_others_nothing(mesh, stage):
    def body(world):
        engine = engine_of(world, stage)
        return engine.full_state_dict(), [engine.full_state_dict(rank) for rank in range(world.size)]

    for rank, (everywhere, asked) in enumerate(rl.simulate(mesh, body)):
        for root, state in enumerate(asked):
            if root != rank:
                assert state == {"model": {}, "optimizer": {}}
                continue
            assert remembered(state) == remembered(everywhere) == {"step": 1, "loss_scale": None, "amax": {}}
            assert state["model"].keys() == everywhere["model"].keys() and state["model"]
            assert all(torch.equal(state["model"][name], value) for name, value in everywhere["model"].items())
            assert state["optimizer"]["param_groups"] == everywhere["optimizer"]["param_groups"]
            ours, theirs = state["optimizer"]["state"], everywhere["optimizer"]["state"]
            assert ours.keys() == theirs.keys() and ours
            for name, held in theirs.items():
                assert ours[name].keys() == held.keys() and all(torch.equal(ours[name][key], value) for key, value in held.items())


LARGEST = 256 * 64 * 8   # the embedding


def large_engine(world: rl.World, stage: int) -> rl.Engine:
    """The state is 50 times its largest tensor."""
    config = GPTConfig(vocab_size=256, width=64, layers=8, heads=4, kv_heads=4, ffn=96, seq_len=12, tie=True)
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config, dtype=torch.float64), loss=language_model_loss, world=world, stage=stage,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **pipe)
    tokens = torch.zeros(4, 12, dtype=torch.long)
    engine.step((tokens, tokens))
    return engine


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_names_stand_in_the_order_of_the_plain_model_whichever_ranks_have_which_stages(schedule):
    def body(world):
        model = GPT(GPTConfig(vocab_size=37, width=16, layers=6, heads=4, kv_heads=1, ffn=24, seq_len=12))
        names = list(model.state_dict())
        engine = rl.prepare(model, loss=language_model_loss, world=world, optimizer=torch.optim.AdamW, accumulate=2, pipe=schedule)
        return names, list(engine.full_state_dict()["model"])

    for plain, gathered in rl.simulate(rl.Mesh(pipe=2), body):
        assert gathered == plain


@pytest.mark.parametrize("mesh, stage", [(rl.Mesh(tensor=2), 0), (rl.Mesh(pipe=2), 1), (rl.Mesh(replicate=2, shard=2), 3),
                                         (rl.Mesh(pipe=2, shard=2), 3), (rl.Mesh(context=2), 2)], ids=str)
def test_the_others_hold_a_tensor_at_a_time(mesh, stage):
    def body(world):
        engine = large_engine(world, stage)
        with Storages(fresh=True) as storages:
            state = engine.full_state_dict(rank=world.size - 1)
        return storages.peak, sum(value.nbytes for value in state["model"].values())

    *others, (most, whole) = rl.simulate(mesh, body)
    assert most > 3 * whole > 50 * LARGEST
    for peak, kept in others:
        assert kept == 0 and peak < 4 * LARGEST   # a part, its copy to send, and what a gloo thread has not let go yet


WIDTH = 32
DELAYED = replace(PRECISIONS["fp8"], float8=Recipe(timing="delayed", history=3))


class Net(nn.Module):
    """Dropout, and a constant whose mean over three ranks has other bits."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        for param in self.parameters():
            param.data.normal_(0.0, 0.2, generator=draw)
        self.register_buffer("table", torch.rand(WIDTH, generator=draw) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * self.table.to(x.dtype)
        return self.head(x)


def squares(model, x):
    return model(x).float().square().sum(), len(x)


def net_engine(world: rl.World, precision=None, stage: int = 0) -> rl.Engine:
    return rl.prepare(Net(), loss=squares, world=world, precision=precision, clip=1.0, stage=stage, schedule=lambda step: 1e-2 / (1 + step),
                      optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", [None, "fp16", DELAYED], ids=["fp32", "fp16", "fp8 delayed"])
def test_a_run_goes_on_from_its_state_with_the_same_bits(precision, stage):
    rows = torch.randn(6, 12, WIDTH, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, 1, 12)[:, None]

    def body(world):
        share = [x.tensor_split(world.size)[world.rank] for x in rows]
        first = net_engine(world, precision, stage)
        begun = [first.step(x).loss for x in share[:3]]
        second = net_engine(world, precision, stage)
        second.step(share[5])   # of another run
        second.load_full_state_dict(first.full_state_dict())
        assert [first.step(x) for x in share[3:5]][-1].step == 5
        went_on = [second.step(x).loss for x in share[3:]]
        first.step(share[5])
        return len(set(begun + went_on)), first.full_state_dict(), second.full_state_dict()

    for different, first, second in rl.simulate(3, body):
        assert different == 6 and remembered(first).keys() == remembered(second).keys()
        assert all(torch.equal(second["model"][name], value) for name, value in first["model"].items())
        assert (remembered(second)["step"], remembered(second)["loss_scale"]) == (6, remembered(first)["loss_scale"])
        assert (remembered(first)["loss_scale"] is not None) == (precision == "fp16")
        assert len(remembered(first)["amax"]) == (8 if precision is DELAYED else 0)
        assert all(torch.equal(remembered(second)["amax"][name], value) for name, value in remembered(first)["amax"].items())


def test_without_what_the_run_remembers_steps_go_as_in_a_new_run():
    def body(world):
        x = torch.ones(4, WIDTH)
        old, new = net_engine(world, DELAYED), net_engine(world, DELAYED)
        state = new.full_state_dict()
        del state["optimizer"]["run"]
        old.step(x * 3)
        old.load_full_state_dict(state)
        return [(report.step, report.loss, report.lr) for engine in (old, new) for report in [engine.step(x)]]

    (old, new), = rl.simulate(1, body)
    assert old == new


@pytest.mark.parametrize("rank", [2, 99, -1, True, "0", 0.5], ids=repr)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_is_none_is_an_error_on_all(rank, stage):
    def body(world):
        with pytest.raises(rl.ConfigError, match=r"rank=.*: there are ranks 0 to 1; give one of them, or None"):
            net_engine(world, stage=stage).full_state_dict(rank)

    rl.simulate(2, body)


def test_ranks_that_name_different_receivers_all_raise():
    def body(world):
        with pytest.raises(rl.ConfigError, match=r"rank 0 asks for rank=0, rank 1 for rank=1; all ranks give the same"):
            net_engine(world, stage=3).full_state_dict(world.rank)

    rl.simulate(2, body)


def spoiled(state: dict, value: object) -> dict:
    """The state with another value for one tensor of the model."""
    return state | {"model": state["model"] | {"head.bias": value}}


@pytest.mark.parametrize("spoil, said", [
    (lambda state, rank: {key: {} for key in state} if rank else state,
     r"rank 1: the state has nothing under model and optimizer; was it gathered"),
    (lambda state, rank: None if rank else state, r"rank 1: the state has nothing under model and optimizer; was it gathered"),
    (lambda state, rank: state["model"], r"rank 0: the state has nothing under model and"),
    (lambda state, rank: state | {"optimizer": state["optimizer"] | {"run": {"amax": {"elsewhere.input": torch.ones(3)}}}},
     "Was it saved with other layers in fp8"),
    (lambda state, rank: state | {"model": {name: value for name, value in state["model"].items() if not rank or "bias" not in name}},
     r"rank 1: this is the state dict of another model, 5 tensors differ: blocks.0.0.bias: missing"),
    (lambda state, rank: state | {"model": [*state["model"]]} if rank else state, r"rank 1: the state has nothing under model; was it"),
    (lambda state, rank: spoiled(state, None) if rank else state,
     r"rank 1: head.bias in the state dict is a NoneType, expected a dense tensor with values"),
    (lambda state, rank: spoiled(state, torch.empty(3, device="meta")), r"rank 0: head.bias in the state dict is on meta, of layout"),
    (lambda state, rank: spoiled(state, torch.ones(3).to_sparse()), r"rank 0: head.bias in the state dict is on cpu, of layout .*sparse"),
    (lambda state, rank: state | {"optimizer": state["optimizer"] | {"state": {"head.bias": None}}} if rank else state,
     r"rank 1: the optimizer state of 'head.bias' has no values by name"),
], ids=["empty on one rank", "none on one rank", "of a model only", "other layers", "other tensors on one rank", "names only",
        "none for a tensor on one rank", "no values", "sparse", "no moments of a tensor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_with_nothing_changed(stage, spoil, said):
    def body(world):
        engine = net_engine(world, DELAYED, stage)
        other = engine.full_state_dict()
        engine.step(torch.ones(4, WIDTH))
        before = engine.full_state_dict()
        with pytest.raises(rl.ModelMismatch, match=said):
            engine.load_full_state_dict(spoil(other, world.rank))
        after = engine.full_state_dict()
        assert remembered(after)["step"] == 1 and all(torch.equal(after["model"][name], value) for name, value in before["model"].items())
        assert all(torch.equal(remembered(after)["amax"][name], value) for name, value in remembered(before)["amax"].items())

    rl.simulate(2, body)


def numbered(optimizer: dict) -> tuple[dict, list[str]]:
    """The state as a plain torch optimizer has it, and the names in its order."""
    groups = optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]]
    return {"state": {names.index(name): held for name, held in optimizer["state"].items()},
            "param_groups": [group | {"params": [names.index(name) for name in group["params"]]} for group in groups]}, names


@pytest.mark.parametrize("mesh, stage", [(rl.Mesh(replicate=2), 0), (rl.Mesh(shard=2), 3), (rl.Mesh(tensor=2), 0)], ids=str)
def test_the_state_of_a_plain_optimizer_is_refused_until_it_has_names(mesh, stage):
    def body(world):
        engine = engine_of(world, stage)
        state = engine.full_state_dict()
        plain, names = numbered(state["optimizer"])
        with pytest.raises(rl.ModelMismatch, match=r"the saved optimizer has numbers \(0 first\) in place of names"):
            engine.load_full_state_dict(state | {"optimizer": plain})
        named = {"state": {names[i]: held for i, held in plain["state"].items()},
                 "param_groups": [group | {"params": [names[i] for i in group["params"]]} for group in plain["param_groups"]]}
        engine.load_full_state_dict(state | {"optimizer": named})

    rl.simulate(mesh, body)


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(tensor=2), rl.Mesh(pipe=2, tensor=2)], ids=str)
@pytest.mark.parametrize("change, said", [
    ({"norm.weight": torch.zeros(3)}, r"norm.weight: \(3,\) in the state dict, \(64,\) in the model"),
    ({"blocks.0.attention.query.weight": torch.zeros(32, 64)}, r"query.weight: \(32, 64\) in the state dict, \(64, 64\) in the model"),
    ({"stranger": torch.zeros(1)}, r"stranger: \(1,\) in the state dict, missing in the model"),
])
def test_a_state_that_does_not_fit_one_part_is_refused_by_all_with_nothing_changed(change, said, mesh):
    def body(world):
        engine = large_engine(world, 1 if mesh.pipe > 1 else 0)
        before = engine.full_state_dict()
        other = {name: value + 1 for name, value in before["model"].items()} | change
        with pytest.raises(rl.ModelMismatch, match=said):
            engine.load_full_state_dict(before | {"model": other})
        return [torch.equal(value, before["model"][name]) for name, value in engine.full_state_dict()["model"].items()]

    assert all(all(equal) for equal in rl.simulate(mesh, body))


@pytest.mark.parametrize("mesh", [rl.Mesh(shard=2), rl.Mesh(tensor=2), rl.Mesh(pipe=2)], ids=str)
def test_a_state_with_a_block_more_is_that_of_another_model(mesh):
    def body(world):
        more = engine_of(world, 1, layers=3).full_state_dict()
        with pytest.raises(rl.ModelMismatch, match="the saved optimizer has 'blocks.2.attention.key.weight', the one here does not"):
            engine_of(world, 1).load_full_state_dict(more)

    rl.simulate(mesh, body)


class Counted(nn.Module):
    """Two layers, and what both of them use: a constant, and the largest value seen."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.first, self.second, self.both, self.changes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module(), changes
        for param in self.parameters():
            nn.init.ones_(param)
        self.both.register_buffer("table", torch.ones(()))
        self.both.register_buffer("largest", torch.zeros(1))

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x) * self.both.table
        if self.changes:
            self.both.largest.copy_(torch.maximum(self.both.largest, y.detach().max()))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.second, self.run(self.first, x))


def counted_pieces(model: Counted):
    return [({name: layer, "both": model.both}, lambda x, layer=layer: model.run(layer, x))
            for name, layer in (("first", model.first), ("second", model.second))]


@pytest.mark.parametrize("rank", [None, 0, 3])
@pytest.mark.parametrize("changes", [False, True])
def test_a_buffer_that_stages_have_changed_apart_is_an_error_and_one_that_is_equal_is_gathered(changes, rank):
    def distance(y, targets):
        return (y - targets).square().sum(), len(y)

    def body(world):
        engine = rl.prepare(Counted(changes), loss=lambda m, batch: distance(m(batch[0]), batch[1]), world=world, accumulate=2, stage=1,
                            pipe=rl.Pipe(pieces=counted_pieces, loss=lambda model: distance),
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        engine.step((torch.ones(4, 4), torch.zeros(4, 4)))
        if changes:
            with pytest.raises(rl.ModelMismatch, match=r"buffer both.largest stands in stages of pipe ranks 0 and 1, and has other values"):
                engine.full_state_dict(rank)
            return None
        return sorted(engine.full_state_dict(rank)["model"])[:2]

    found = rl.simulate(rl.Mesh(pipe=2, shard=2), body)
    assert changes or found == [["both.largest", "both.table"] if rank in (None, at) else [] for at in range(4)]


class Calibrated(nn.Linear):
    """A layer that keeps beside its parameters what torch calls extra state, as those of quantizers do."""

    def __init__(self, seen: object = None) -> None:
        super().__init__(4, 4)
        self.seen = seen

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: object) -> None:
        self.seen = state


EXTRAS = {"a dict": lambda: {"largest": torch.arange(3.0), "steps": [1, 2]}, "a tensor": lambda: torch.arange(3), "none": lambda: None}


def calibrated_engine(world: rl.World, seen: object, stage: int) -> rl.Engine:
    model = nn.Sequential(*(Calibrated(seen) for _ in range(2)))
    pipe = {"accumulate": 2, "pipe": rl.Pipe(pieces=lambda model: [({str(at): layer}, layer) for at, layer in enumerate(model)],
                                             loss=lambda model: lambda y, targets: (y.sum(), len(y)))} if world.mesh.pipe > 1 else {}
    return rl.prepare(model, loss=squares, world=world, stage=stage, optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                      tensor_plan={"*": "replicate"} if world.mesh.tensor > 1 else None, **pipe)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mesh, stage", [(rl.Mesh(replicate=2), 0), *((rl.Mesh(shard=2), stage) for stage in (1, 2, 3)),
                                         (rl.Mesh(tensor=2), 0), (rl.Mesh(pipe=2, shard=2), 2)], ids=str)
@pytest.mark.filterwarnings("ignore:the models of ranks")
def test_extra_state_of_modules_goes_along_as_in_a_state_dict_of_torchs(mesh, stage, extra):
    """It ended in an AttributeError; of tensors that do not change their shape, nothing was loaded where parameters are cut."""
    def body(world):
        if world.mesh.pipe > 1 and extra == "a dict":
            with pytest.raises(rl.ConfigError, match="0._extra_state is a dict, which stages cannot hand to each other"):
                calibrated_engine(world, EXTRAS[extra](), stage).full_state_dict()
            return
        engine, other = (calibrated_engine(world, seen, stage) for seen in (EXTRAS[extra](), torch.zeros(3)))
        state, asked = engine.full_state_dict(), [engine.full_state_dict(rank)["model"] for rank in range(world.size)]
        assert [len(held) for held in asked] == [6 if rank == world.rank else 0 for rank in range(world.size)]
        other.load_full_state_dict(state)
        plain = nn.Sequential(Calibrated(), Calibrated())
        plain.load_state_dict(state["model"])   # which is strict
        for layer in (*plain, *(module for module in other.model.modules() if isinstance(module, Calibrated))):
            assert repr(layer.seen) == repr(EXTRAS[extra]())

    rl.simulate(mesh, body)


@pytest.mark.filterwarnings("ignore:the models of ranks")
def test_extra_state_that_the_model_goes_on_changing_is_a_copy_in_a_state():
    def body(world):
        engine = calibrated_engine(world, [1], 3)
        state = engine.full_state_dict()
        engine.model[0].seen.append(2)
        return state["model"]["0._extra_state"]

    assert rl.simulate(2, body) == [[1], [1]]


class Named(nn.Linear):
    """A buffer whose name ends like that of extra state."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("old_extra_state", torch.zeros(2))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_is_no_extra_state_whatever_it_is_called(stage):
    def body(world):
        torch.manual_seed(0)
        engines = [rl.prepare(Named(), loss=lambda model, x: (model(x).square().sum(), len(x)), optimizer=torch.optim.SGD, world=world,
                              stage=stage) for _ in range(2)]
        engines[0].model.old_extra_state.fill_(3.0)
        engines[1].load_full_state_dict(engines[0].full_state_dict())
        return engines[1].model.old_extra_state.tolist()

    assert rl.simulate(2, body) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(("other", "said"), [("weight", "values"), ("momentum", "values"), ("step", "numbers of the run"),
                                             ("scale", "numbers of the run")])
def test_ranks_that_load_different_states_all_raise_with_nothing_changed(stage, other, said):
    """Replicas had parted, or had waited for each other until the time-out."""
    def body(world):
        torch.manual_seed(0)
        engine = rl.prepare(torch.nn.Linear(4, 2), loss=lambda model, x: (model(x).square().sum(), len(x)), world=world, stage=stage,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        engine.step(torch.ones(2, 4))
        kept = engine.full_state_dict()
        state = engine.full_state_dict()
        if world.rank == 1 and other == "weight":
            state["model"]["weight"][0, 0] += 1
        elif world.rank == 1 and other == "momentum":
            state["optimizer"]["state"]["weight"]["momentum_buffer"][0, 0] += 1
        elif world.rank == 1 and other == "scale":
            state["optimizer"]["run"]["loss_scale"] = {"value": 2.0, "good_steps": 1, "overflows": 0}
        elif world.rank == 1:
            del state["optimizer"]["run"]
        with pytest.raises(rl.ModelMismatch, match=f"rank 1 loads a state with other {said} than rank 0"):
            engine.load_full_state_dict(state)
        return torch.equal(engine.full_state_dict()["model"]["weight"], kept["model"]["weight"])

    assert rl.simulate(2, body) == [True] * 2


@pytest.mark.parametrize("way", ["full_state_dict", "save", "evaluate"])
@pytest.mark.parametrize(("stage", "backend", "options"), [
    (1, "rankloom", {}), (3, "rankloom", {}), (1, "gloo", {"offload": True}), (3, "rankloom", {"offload": True}),
    (0, "gloo", {"precision": "bf16"}), (2, "rankloom", {"precision": "bf16"})], ids=str)
def test_a_weight_that_was_changed_in_place_is_not_saved_or_scored_as_something_else(stage, backend, options, way, tmp_path):
    """It would be multiplied by every rank, or be lost. A step finds it, too, but may never come."""
    rows = torch.ones(2, 6)

    def body(world):
        engine = rl.prepare(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), loss=lambda model, x: (model(x).square().sum(), len(x)),
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1), world=world, stage=stage, **options)
        calls = {"full_state_dict": engine.full_state_dict, "save": lambda: engine.save(tmp_path / "step"),
                 "evaluate": lambda: engine.evaluate([rows])}
        engine.step(rows)
        calls[way]()
        with torch.no_grad():
            engine.model[1].weight.mul_(2.0)
        with pytest.raises(rl.UnitError, match=r"1.weight was changed in (place|the model)"):   # on every rank
            calls[way]()

    rl.simulate(2, body, backend=backend)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_weight_that_one_rank_holds_as_it_is_trained_may_be_changed_in_place(stage):
    def body(world):
        engine = engine_of(world, stage)
        before = engine.full_state_dict()["model"]["blocks.0.mlp.down.weight"]
        with torch.no_grad():   # which autograd counts, unlike a write by `data`
            for name, param in engine.model.named_parameters():
                if name.endswith("mlp.down.weight"):
                    param.mul_(2.0)
        return torch.equal(engine.full_state_dict()["model"]["blocks.0.mlp.down.weight"], 2 * before)

    assert rl.simulate(rl.Mesh(pipe=2), body) == [True] * 2


def test_a_stage_that_several_ranks_hold_finds_a_change_in_place_before_the_next_step():
    def body(world):
        engine = engine_of(world, 1)
        with torch.no_grad():
            next(param for name, param in engine.model.named_parameters() if name.endswith("mlp.down.weight")).mul_(2.0)
        tokens = torch.zeros(4, 12, dtype=torch.int64)
        engine.step((tokens, tokens))

    with pytest.raises(rl.UnitError, match="mlp.down.weight was changed in place"):
        rl.simulate(rl.Mesh(pipe=2, shard=2), body, backend="rankloom")


def test_a_sharded_model_of_an_own_loop_is_not_saved_with_a_change_in_place():
    def body(world):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        sharded = rl.fully_shard(model, world)
        sharded.state_dict()
        with torch.no_grad():
            model[1].weight.mul_(2.0)
        with pytest.raises(rl.UnitError, match="1.weight was changed in place"):
            sharded.state_dict()

    rl.simulate(2, body, backend="rankloom")


class Noted(nn.Linear):
    def get_extra_state(self):
        return self.notes

    def set_extra_state(self, notes):
        self.notes = notes


@pytest.mark.parametrize("stage", [0, 1])
def test_extra_state_in_a_whole_state_is_a_copy(stage):
    def body(world):
        model = Noted(4, 2)
        model.notes = ["then"]
        engine = rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world, stage=stage)
        state = engine.full_state_dict()
        engine.model.notes.append("later")
        return state["model"]["_extra_state"]

    assert rl.simulate(1, body) == [["then"]]
