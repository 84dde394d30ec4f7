"""Number formats: masters in 32 bits, the model their rounding, and a loss scale on which all ranks agree."""

import copy
import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from awkward import adamw, loss_sum, make_batches, make_model, share, train_plainly
from rankloom.base.errors import UnitError
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.parallel.sections.wrapping import tensors_in
from rankloom.train import precision
from rankloom.train.precision import PRECISIONS, LossScale, MasterWeights, Precision, precision_named

SIXTEEN = ["bf16", "fp16"]


def train(world: rl.World, name: str | None, steps: int = 5, dtype: torch.dtype = torch.float32, **more) -> tuple[rl.Engine, list]:
    engine = rl.prepare(make_model(dtype), loss=loss_sum, optimizer=adamw, world=world, precision=name, **more)
    return engine, [engine.step(share(batch, world.rank, world.size)) for batch in make_batches(steps)]


@pytest.mark.parametrize("name", SIXTEEN)
def test_a_loss_sums_in_32_bits_what_the_model_gives_in_16(name):
    """The sum of 40,000 squares of 2 is above all that fp16 has, and not among the numbers of bf16."""
    def body(world):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().sum(), 4), optimizer=adamw, world=world, precision=name)
        return engine.step(torch.ones(40_001, 1)).loss

    assert rl.simulate(1, body) == [40_001.0]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64)])
def test_a_wide_precision_casts_model_and_state_to_it(name, dtype):
    engine, _ = rl.simulate(2, lambda w: train(w, name, steps=1, dtype=torch.bfloat16))[1]
    assert {p.dtype for p in engine.model.parameters()} == {dtype}
    assert {p.grad.dtype for p in engine.model.parameters() if p.grad is not None} == {dtype}


def test_without_a_precision_the_model_stays_as_it_is():
    engine, _ = rl.simulate(1, lambda w: train(w, None, steps=1, dtype=torch.bfloat16))[0]
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}


@torch.no_grad()
def clamped(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.01, 0.01)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def by_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(2)


def replaced(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 2


def test_a_model_that_nobody_has_written_to_is_not_read_to_know_that(monkeypatch):
    """A step begins with this look, and to compare would be a pass over all parameters and masters."""
    def refuse(one, other):
        raise AssertionError("a parameter was compared with its master")

    model = nn.Linear(2, 2)
    masters = MasterWeights(model, precision_named("bf16"))
    monkeypatch.setattr(torch, "equal", refuse)
    masters.expect_own_values()
    masters.publish()
    masters.expect_own_values()


@pytest.mark.parametrize("name", SIXTEEN)
@pytest.mark.parametrize("change", [clamped, loaded, by_data, replaced])
def test_values_that_were_put_into_a_model_with_masters_are_an_error_and_not_lost(name, change):
    def body(world):
        engine, _ = train(world, name, steps=2)
        batch = share(make_batches(1)[0], world.rank, world.size)
        change(engine.model)
        with pytest.raises(rl.UnitError, match="was changed in the model, and what is trained is a copy in torch.float32"):
            engine.step(batch)
        engine.load_full_state_dict(train(world, name, steps=2)[0].full_state_dict())
        engine.step(batch)

    rl.simulate(2, body)


def test_values_that_are_put_away_and_back_are_no_change():
    """As an average of weights is swapped in for an evaluation."""
    def body(world):
        engine, _ = train(world, "bf16", steps=2)
        before = {name: param.clone() for name, param in engine.model.state_dict().items()}
        loaded(engine.model)
        engine.model.load_state_dict(before)
        return engine.step(share(make_batches(1)[0], world.rank, world.size)).loss

    rl.simulate(2, body)


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("name", SIXTEEN)
def test_model_weights_are_the_rounded_masters_and_the_optimizer_keeps_32_bits(name, p):
    compute = PRECISIONS[name].compute
    for engine, _ in rl.simulate(p, lambda w: train(w, name)):
        state = engine.full_state_dict()
        trained = {key: q for key, q in engine.model.named_parameters() if q.requires_grad}
        moved = 0
        for key, param in trained.items():
            master = state["model"][key]
            assert param.dtype == compute and master.dtype == torch.float32
            assert torch.equal(param.detach(), master.to(compute))
            moved += int((master != master.to(compute).float()).sum())
        assert moved > 100, "the masters hold no more than the model: they are no masters"
        assert {v.dtype for held in state["optimizer"]["state"].values() for v in held.values()} == {torch.float32}
        assert torch.equal(state["model"]["head.weight"], state["model"]["embed.weight"]), "tied weights came apart"
        assert engine.model.head.weight is engine.model.embed.weight


@pytest.mark.parametrize("name", SIXTEEN)
def test_sixteen_bits_train_close_to_32(name):
    """Only the arithmetic of forward and backward is coarse: 5 steps end within 2 % of the loss, and on all ranks alike."""
    truth = train_plainly(model=make_model(torch.float32))["losses"]
    runs = [[report.loss for report in reports] for _, reports in rl.simulate(2, lambda w: train(w, name))]
    assert runs[0] == runs[1] and runs[0] == pytest.approx(truth, rel=0.02) and runs[0] != truth


def test_updates_smaller_than_a_bf16_step_are_not_lost():
    """100 steps of 1e-4 on a weight of 1.0: each is far below half of bf16's spacing. fp32 rounds 100 times by 2**-25 at most."""
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.w * x

    def body(world):
        engine = rl.prepare(One(), loss=lambda m, x: (m(x).sum(), len(x)), optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), world=world,
                            precision="bf16")
        for _ in range(100):
            engine.step(torch.ones(2))
        return engine.full_state_dict()["model"]["w"].item(), engine.model.w.item()

    for master, rounded in rl.simulate(2, body):
        assert master == pytest.approx(0.99, abs=100 * 2**-25)
        assert rounded == torch.tensor(master).bfloat16().item() != 1.0


def test_running_statistics_and_their_weights_stay_in_32_bits():
    def body(world):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).float().square().sum(), len(x)), optimizer=adamw, world=world, precision="bf16")
        engine.step(torch.arange(12.0).view(4, 3))
        return {name: t.dtype for name, t in model.state_dict().items()}

    for dtypes in rl.simulate(2, body):
        assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert dtypes["1.running_var"] == dtypes["1.weight"] == torch.float32


@pytest.mark.parametrize("came_in", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_who_computes_in_full_does_whatever_format_the_model_came_in(stage, came_in):
    form = Precision("mine", torch.bfloat16, master=torch.float32, output=torch.float32, full=("1", "2"))

    def body(world):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)).to(came_in)
        for param in model.parameters():
            nn.init.constant_(param, 0.5)
        model[2].requires_grad_(False)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().sum(), len(x)), optimizer=adamw, world=world, stage=stage,
                            precision=form)
        assert engine.step(torch.ones(2, 3)).grad_norm > 0
        state = engine.full_state_dict()
        return ({name for name, value in state["model"].items() if value.dtype != torch.float32},
                {value.dtype for held in state["optimizer"]["state"].values() for value in held.values()})

    assert rl.simulate(2, body) == [(set(), {torch.float32})] * 2


class Attending(nn.Module):
    """Two modules with children, in a list that nothing calls."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2))
        for at, param in enumerate(self.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(at))

    def forward(self, x):
        return self.parts[1](self.parts[0](x))


@pytest.mark.parametrize("full", ["parts.?", "parts*", "parts", "*"])
@pytest.mark.parametrize("name", SIXTEEN)
def test_a_module_that_computes_in_full_rounds_nothing_inside_it(name, full):
    x, short = torch.linspace(-1, 1, 24).view(2, 3, 4), PRECISIONS[name].compute
    rounded = lambda value: value if full == "*" else value.to(short).float()
    expected = [rounded(x)]
    for part in Attending().parts:
        expected.append(rounded(part(expected[-1])))

    def body(world, stage):
        seen = []

        def loss(model, x):
            seen.append(model(x))
            return seen[0].sum(), 1

        form = replace(PRECISIONS[name], full=(full,))
        rl.prepare(Attending(), loss=loss, optimizer=adamw, world=world, stage=stage, precision=form).step(x)
        return seen[0].detach()

    for stage in (0, 3):
        for answer in rl.simulate(2, lambda world, stage=stage: body(world, stage)):
            assert torch.equal(answer, expected[-1])


@pytest.mark.parametrize("stage", [0, 1])
def test_the_users_function_sees_the_attributes_of_parameters_that_have_masters(stage):
    def body(world):
        model, seen = make_model(torch.float32), []
        model.hidden.weight.no_decay = True

        def optimizer(params):
            seen.extend((param.shape, param.dtype) for param in params if getattr(param, "no_decay", False))
            return adamw(params)

        rl.prepare(model, loss=loss_sum, optimizer=optimizer, world=world, stage=stage, precision="bf16")
        return seen

    assert rl.simulate(2, body) == [[(make_model().hidden.weight.shape, torch.float32)]] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_may_be_wider_than_a_model_that_stays_as_it_is(stage):
    def body(world):
        engine = rl.prepare(make_model(torch.bfloat16), loss=loss_sum, optimizer=adamw, world=world, stage=stage,
                            precision=Precision("mine", master=torch.float32))
        engine.step(share(make_batches(1)[0], world.rank, world.size))
        return {engine.full_state_dict()["model"]["hidden.weight"].dtype, *(owner.dtype for owner in engine.placement.owners.values())}

    assert rl.simulate(2, body) == [{torch.float32}] * 2


def test_inputs_and_outputs_are_cast_in_whatever_they_are_nested():
    @dataclass(frozen=True)
    class Output:
        logits: torch.Tensor
        about: str = "y"

    class Kind(OrderedDict):
        """A class that torch's pytree does not know."""

    class Model(nn.Linear):
        def forward(self, batch, notes):
            y = super().forward(batch["x"][0])
            notes.append(y.dtype)
            return Output(y), UserDict(y=y), Kind(y=Output(y)), [(y, 1)]

    model, notes = Model(2, 2), []
    MasterWeights(model, precision_named("bf16"))
    seen = model({"x": [torch.ones(1, 2)], "name": "a"}, notes)
    assert notes == [torch.bfloat16]   # what holds no floats comes as it is, and may be written to
    assert [type(part) for part in seen] == [Output, UserDict, Kind, list]
    assert [y.dtype for part in (seen[0], dict(seen[1]), *seen[2:]) for y in tensors_in(part)] == [torch.float32] * 4


def test_the_first_step_is_scaled_as_its_whole_batch_will_count():
    """Its first micro-batch is a guess at the others, which are as long here: so the guess is what the count then says."""
    def body(world):
        scales = []

        def loss(model, x):
            scales.append(engine.scale.value)
            return model(x).square().sum(), len(x)

        engine = rl.prepare(nn.Linear(2, 2), loss=loss, optimizer=adamw, world=world, precision="fp16", accumulate=4)
        engine.step(torch.ones(16, 2))
        return scales[-1]   # of the last of four micro-batches

    assert rl.simulate(1, body) == [2.0**16 / 16]


@dataclass
class WithCache:
    """Rows, and something that is made when it is first wanted: until then the field is unset."""

    x: torch.Tensor
    cache: torch.Tensor = field(init=False)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"stage": 1}, {"stage": 3}, {"stage": 3, "precision": "bf16"}], ids=str)
def test_a_dataclass_may_go_into_a_model_and_come_out_of_it_with_a_field_unset(options):
    class Model(nn.Linear):
        def forward(self, rows):
            return WithCache(super().forward(rows.x))

    models = [Model(2, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def body(world):
        engine = rl.prepare(models[world.rank], loss=lambda model, rows: (model(rows).x.square().sum(), len(rows.x)), optimizer=adamw,
                            world=world, **options)
        return [engine.step(WithCache(torch.full((3, 2), 1.0 + world.rank))).count for _ in range(2)]

    assert rl.simulate(2, body) == [[6.0, 6.0]] * 2


def test_whole_numbers_are_not_cast_and_floats_are_also_by_keyword():
    seen = {}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, tokens, *, weights):
            seen.update(tokens=tokens.dtype, weights=weights.dtype)
            return (self.w * weights * tokens).sum()

    model = Model()
    MasterWeights(model, precision_named("bf16"))
    model(torch.arange(3), weights=torch.ones(3))
    assert seen == {"tokens": torch.int64, "weights": torch.bfloat16}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("asked", ["fp64", Precision("mine", torch.float64), Precision("mine", torch.bfloat16), "fp16"], ids=str)
def test_floats_are_cast_to_the_format_of_the_model_also_where_it_is_a_wide_one(asked, stage):
    def body(world):
        engine = rl.prepare(nn.Linear(2, 1), loss=lambda m, x: (m(x).square().sum(), len(x)), optimizer=adamw, world=world, stage=stage,
                            precision=asked)
        return engine.step(torch.ones(4, 2)).count   # fp32

    assert rl.simulate(2, body) == [8, 8]


class WithTable(nn.Module):
    """A table in 32 bits, which makes activations of 16 bits wide."""

    def __init__(self, cast: bool):
        super().__init__()
        self.layer, self.cast = nn.Linear(2, 1), cast
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + (self.table.to(x) if self.cast else self.table))


@pytest.mark.parametrize("name", SIXTEEN)
def test_an_error_about_formats_names_the_buffers_that_have_another(name):
    def body(world, cast):
        engine = rl.prepare(WithTable(cast), loss=lambda m, x: (m(x).square().sum(), len(x)), optimizer=adamw, world=world, precision=name)
        engine.step(torch.ones(4, 2))
        return engine.model.table.dtype

    assert rl.simulate(1, lambda world: body(world, cast=True)) == [torch.float32]
    with pytest.raises(RuntimeError, match="dtype") as error:
        rl.simulate(1, lambda world: body(world, cast=False))
    assert any(f"precision {name!r} casts parameters and inputs to {PRECISIONS[name].compute}" in note and "table (1 in all)" in note
               for note in error.value.__notes__)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("norm", "full"), [(nn.utils.parametrizations.spectral_norm, "*parametrizations*"), (nn.utils.spectral_norm, "0")])
def test_a_spectral_norm_trains_in_16_bits_with_what_the_note_says_to_compute_in_full(norm, full, compute, stage):
    def body(world, full):
        how = Precision("16 bits", compute, master=torch.float32, output=torch.float32, full=full)
        engine = rl.prepare(nn.Sequential(norm(nn.Linear(6, 4)), nn.Linear(4, 4)), loss=lambda m, x: (m(x).square().sum(), 4 * len(x)),
                            optimizer=adamw, world=world, precision=how, stage=stage)
        return engine.step(torch.ones(4, 6)).skipped

    with pytest.raises(RuntimeError) as error:
        rl.simulate(1, lambda world: body(world, ()))
    assert any("Precision(..., full=(names,))" in note and "*parametrizations*" in note for note in error.value.__notes__)
    assert rl.simulate(1, lambda world: body(world, (full,))) == [False]


@pytest.mark.parametrize("name", ["fp32", *SIXTEEN])
def test_an_engine_is_not_copied_and_its_model_may_be(name):
    """The copy's gradients had gone nowhere: it trained nothing, and nobody said so."""
    def body(world):
        engine, _ = train(world, name, steps=1)
        with pytest.raises(UnitError, match="an engine cannot be copied.*engine.full_state_dict"):
            copy.deepcopy(engine)
        x = make_batches(1)[0]
        loss, twin = loss_sum(engine.model, x)[0], copy.deepcopy(engine.model)
        assert torch.equal(loss_sum(twin, x)[0], loss)

    rl.simulate(1, body)


def test_the_whole_model_of_stage_0_is_copied_straight_into_host_memory():
    """A second copy of all masters may not fit on a GPU. Where each copy goes is seen by a mode: on a CPU, both ways end alike."""
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **kwargs or {})
            copies.extend((func, (kwargs or {}).get("device")) for _ in range(func in (aten.clone.default, aten._to_copy.default)))
            return made

    def body(world):
        engine = rl.prepare(nn.Linear(3, 2), loss=loss_sum, optimizer=adamw, world=world, precision="bf16")
        with Copies():
            whole = engine.placement.values(None)
        assert all(value.data_ptr() != engine.placement.owners[name].data_ptr() for name, value in whole.items())

    aten, copies = torch.ops.aten, []
    rl.simulate(1, body)
    assert copies == [(aten._to_copy.default, torch.device("cpu"))] * 2


def test_an_unknown_precision_is_answered_with_the_nearest():
    with pytest.raises(rl.ConfigError, match="'fp23' is unknown. Did you mean 'fp32'"):
        precision_named("fp23")
    with pytest.raises(rl.ConfigError, match=r"precision torch.bfloat16 is unknown. Known: bf16"):
        precision_named(torch.bfloat16)


def test_a_format_is_a_dtype_and_patterns_stand_in_a_tuple():
    """The letters of a string would be patterns, too, and `*` fits all."""
    with pytest.raises(rl.ConfigError, match="compute='bf16' is of type str, expected a torch dtype"):
        Precision("mine", compute="bf16")
    with pytest.raises(rl.ConfigError, match="full='\\*norm\\*' is of type str, expected patterns"):
        Precision("mine", full="*norm*")


def test_modules_that_compute_in_the_master_dtype_need_one():
    with pytest.raises(rl.ConfigError, match=r"full=\('\*norm\*',\) names modules that compute in the master dtype, and there is none"):
        Precision("mine", torch.bfloat16, full=("*norm*",))


class Mirrored(nn.Module):
    """Two layers with one weight, which the module around them has too; it computes with none."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"encode": nn.Linear(8, 8), "decode": nn.Linear(8, 8)})
        self.weight = self.parts["decode"].weight = self.parts["encode"].weight

    def forward(self, x):
        return self.parts["decode"](torch.tanh(self.parts["encode"](x)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_modules_with_one_weight_compute_in_one_format(stage):
    """It was an error of torch's, of a product of two formats."""
    mirrored, gpt = Mirrored(), GPT(GPTConfig(vocab_size=8, seq_len=4, width=8, layers=2, heads=2, kv_heads=2, tie=True))

    def body(world, model, *full):
        loss = (lambda model, x: (model(x).square().sum(), len(x))) if model is mirrored else language_model_loss
        data = torch.ones(4, 8) if model is mirrored else (torch.ones(2, 4, dtype=torch.int64),) * 2
        engine = rl.prepare(copy.deepcopy(model), loss=loss, optimizer=adamw, world=world, stage=stage,
                            precision=replace(PRECISIONS["bf16"], full=full))
        return engine.step(data).loss

    with pytest.raises(rl.ConfigError, match=r"parts.encode computes in torch.float32, and parts.decode, which uses its weight too, in "
                                             r"torch.bfloat16; let `full` name both, or none"):
        rl.simulate(2, lambda world: body(world, mirrored, "*.encode"))
    with pytest.raises(rl.ConfigError, match=r"embedding computes in torch.float32, and the model itself, which uses its weight too"):
        rl.simulate(2, lambda world: body(world, gpt, "embedding"))
    rl.simulate(2, lambda world: (body(world, mirrored, "parts"), body(world, mirrored, "*code"), body(world, gpt, "*norm*")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("said", [True, False])
def test_where_modules_in_full_have_the_format_of_all_others_they_share_weights_with_any(said, dtype):
    """As where the same settings are tried in fp32 first."""
    form, model = Precision("mine", dtype if said else None, master=dtype, full=("*.encode",)), Mirrored().to(dtype)

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=lambda model, x: (model(x).square().sum(), len(x)), optimizer=adamw, world=world,
                            stage=3, precision=form)
        assert math.isfinite(engine.step(torch.ones(4, 8, dtype=dtype)).loss)

    rl.simulate(2, body)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("field", ["compute", "master", "reduce", "output"])
def test_a_format_has_floating_numbers_in_16_bits_or_more(field, dtype):
    """Sums in whole numbers lost what is below 1, and said nothing."""
    with pytest.raises(rl.ConfigError, match=rf"{field}={dtype}, expected a dtype of floating numbers in 16 bits or more"):
        Precision("mine", **{field: dtype})


def test_a_dtype_without_its_keyword_is_no_name():
    """It was ignored, where it stands first in FSDP2's policy."""
    with pytest.raises(rl.ConfigError, match=r"name is of type dtype, expected a name; dtypes go by keyword"):
        Precision(torch.bfloat16)


# ---------------------------------------------------------------- the loss scale


@pytest.mark.parametrize(("count", "value"), [
    (1, 2.0**16), (0, 2.0**16), (1000, 2.0**6), (2**20, 2.0**-4), (math.inf, 2.0**16), (math.nan, 2.0**16)])
def test_the_first_scale_is_2_to_the_16_for_a_mean(count, value):
    assert LossScale.first(count) == LossScale(value)


def test_the_first_scale_does_not_depend_on_torch_s_default_dtype():
    torch.set_default_dtype(torch.float16)   # in which a count of 131072 is infinite
    try:
        assert LossScale.first(131072.0) == LossScale(0.5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_scale_halves_at_an_overflow_and_doubles_after_a_long_time_without(monkeypatch):
    monkeypatch.setattr(precision, "GROW_AFTER", 3)
    scale = LossScale(8.0)
    seen = []
    for overflow in (False, False, True, False, False, False, False):
        scale = scale.after(overflow)
        seen.append(scale.value)
    assert seen == [8, 8, 4, 4, 4, 8, 8], "an overflow starts the count anew"


def overflowing(model: nn.Module, batch) -> tuple[torch.Tensor, int]:
    """A loss whose gradients do not fit fp16 on rank 1 in step 2; the batch says where and when it is."""
    total, count = loss_sum(model, batch[:2])
    return total * (1e8 if batch[2][0].tolist() == [1, 2] else 1.0), count


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", [adamw, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)], ids=["plain", "fused"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(optimizer, accumulate):
    def body(world):
        engine = rl.prepare(make_model(torch.float32), loss=overflowing, optimizer=optimizer, world=world, precision="fp16",
                            accumulate=accumulate)
        story = []
        for step, batch in enumerate(make_batches()):
            mine = share(batch, world.rank, world.size)
            before = {key: p.detach().clone() for key, p in engine.model.named_parameters()}
            report = engine.step((*mine, torch.tensor([[world.rank, step]] * len(mine[0]))))
            same = all(torch.equal(p, before[key]) for key, p in engine.model.named_parameters())
            story.append((report.skipped, same, engine.scale.value, report.step))
        return story

    results = rl.simulate(3, body)
    first = results[0][0][2]
    assert results[0] == results[1] == results[2]
    assert results[0] == [(False, False, first, 1), (False, False, first, 2), (True, True, first / 2, 3), (False, False, first / 2, 4),
                          (False, False, first / 2, 5)]


def test_what_no_scale_can_help_is_raised_on_all_ranks_and_a_good_step_starts_the_count_anew(monkeypatch):
    monkeypatch.setattr(precision, "HOPELESS_AFTER", 3)

    def body(world):
        engine = rl.prepare(make_model(torch.float32), loss=overflowing, optimizer=adamw, world=world, precision="fp16")
        tokens, targets = share(make_batches()[0], world.rank, world.size)
        batch = {bad: (tokens, targets, torch.tensor([[1, 2 if bad else 0]] * len(tokens))) for bad in (True, False)}
        told = [engine.step(batch[bad]).skipped for bad in (False, True, True, False, True, True)]
        with pytest.raises(rl.NonFinite, match="step 7: .* after 3 overflows in a row. rank 0"):
            engine.step(batch[True])
        return told, engine.step(batch[False]).skipped, engine.scale.overflows

    assert rl.simulate(2, body) == [([False, True, True, False, True, True], False, 0)] * 2


def test_the_scale_grows_again_on_all_ranks(monkeypatch):
    monkeypatch.setattr(precision, "GROW_AFTER", 2)
    values = [(engine.scale.value, len(reports)) for engine, reports in rl.simulate(2, lambda w: train(w, "fp16", steps=5))]
    start = rl.simulate(2, lambda w: train(w, "fp16", steps=1))[0][0].scale.value
    assert values == [(4 * start, 5)] * 2


@pytest.mark.parametrize("mesh, more", [(rl.Mesh(), {}), (rl.Mesh(), {"accumulate": 4}), (rl.Mesh(replicate=2), {"accumulate": 2}),
                                        (rl.Mesh(shard=4), {"stage": 3}), (rl.Mesh(replicate=2), {"deterministic": 4}),
                                        (rl.Mesh(pipe=2), {"accumulate": 4})], ids=str)
def test_the_scale_is_that_of_all_items_of_the_first_step_whichever_of_them_came_first(mesh, more):
    """Seven of eight items stand in the first two rows of eight, as where rows are padded."""
    def body(world):
        pipe = {"pipe": rl.Pipe(pieces=two_pieces, loss=lambda model: counted)} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(TwoLayers(), loss=lambda m, batch: counted(m(batch[0]), batch[1]), optimizer=adamw, world=world,
                            precision="fp16", **more, **pipe)
        items = torch.tensor([[448.0], [448.0]] + [[21.0]] * 5 + [[23.0]])   # 1024
        rows = (torch.ones(8, 8), items)
        engine.step(tuple(t.tensor_split(engine.group.size)[engine.group.rank].clone() for t in rows))
        return engine.scale.value

    assert set(rl.simulate(mesh, body)) == {2.0**16 / 1024}


def counted(output, items):
    return output.sum() * 1e-3, items.sum()


def test_a_scale_that_is_measured_as_one_is_measured_once():
    """65536 items a step make the first scale exactly 1; measuring again would give micro-batches scales of their own."""
    def body(world):
        model = nn.Linear(2, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        loss = lambda m, x: (m(x).float().sum(), 2**16 // 6)
        engine = rl.prepare(model, loss=loss, optimizer=adamw, world=world, precision="fp16", accumulate=3)
        labels, plain = [], world.all_reduce
        world.all_reduce = lambda x, *a, label="", **more: labels.append(label) or plain(x, *a, label=label, **more)
        for _ in range(2):
            engine.step(torch.ones(3, 2))
        return engine.scale.value, labels.count("first count")

    assert rl.simulate(2, body) == [(1.0, 1)] * 2


# ---------------------------------------------------------------- 16 bits in a pipeline


class TwoLayers(nn.Module):
    """Float inputs, so that a format that is not cast shows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        for at, param in enumerate(self.parameters()):
            nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(at))

    def forward(self, x):
        return self.second(self.first(x).relu())


def two_pieces(model):
    return [({"first": model.first}, lambda x: model.first(x).relu()), ({"second": model.second}, model.second)]


def distance(output, targets):
    assert targets.dtype == torch.float32, "only inputs are cast"
    assert output.dtype == torch.float32, "the format of the output, in stages too"
    return (output - targets).square().sum(), len(targets)


def piped(world: rl.World, name: str | Precision, *, schedule: str = "1f1b", bad: int | None = None, stage: int = 1, accumulate: int = 4):
    """Losses and skips of four steps, the scale, the weights. bad: the rank of the rows whose targets no fp16 gradient fits, in step 2."""
    pipe = {"pipe": rl.Pipe(pieces=two_pieces, loss=lambda model: distance, schedule=schedule)} if world.mesh.pipe > 1 else {}
    chosen = replace(PRECISIONS[name], output=torch.float32) if isinstance(name, str) else name
    engine = rl.prepare(TwoLayers(), loss=lambda m, batch: distance(m(batch[0]), batch[1]), optimizer=adamw, world=world, precision=chosen,
                        accumulate=accumulate, stage=stage, **pipe)
    draw, story = torch.Generator().manual_seed(3), []
    for step in range(4):
        x, targets = torch.randn(16, 8, generator=draw), torch.randn(16, 4, generator=draw)
        mine = [t.tensor_split(engine.group.size)[engine.group.rank].clone() for t in (x, targets)]
        if step == 2 and bad == engine.group.rank:
            mine[1][-1] = 1e6
        report = engine.step(tuple(mine))
        story.append((report.loss, report.skipped, engine.scale.value))
    return story, engine.full_state_dict()["model"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", SIXTEEN)
def test_a_pipeline_in_16_bits_has_the_bits_of_one_process(name, schedule):
    """The same products, and the micro-batches' gradients added in the same order in fp32; one step overflows in fp16."""
    (alone, weights), = rl.simulate(1, lambda w: piped(w, name, bad=0 if name == "fp16" else None))
    assert [skipped for _, skipped, _ in alone[1:]] == [False, name == "fp16", False]
    for story, mine in rl.simulate(rl.Mesh(pipe=2), lambda w: piped(w, name, schedule=schedule, bad=0 if name == "fp16" else None)):
        assert story == alone
        assert all(torch.equal(mine[key], value) for key, value in weights.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_of_a_pipelined_mesh_skips_the_step_on_all(stage):
    for mesh in (rl.Mesh(pipe=2, shard=2), rl.Mesh(pipe=2, replicate=2)):
        found = rl.simulate(mesh, lambda w: piped(w, "fp16", bad=1, stage=stage, accumulate=2))
        (before, now, after) = found[0][0][1:]
        assert all(story == found[0][0] for story, _ in found), "ranks tell different stories"
        assert (before[1], now[1], after[1]) == (False, True, False) and after[2] == now[2] == before[2] / 2
        for key, value in found[0][1].items():
            assert all(torch.equal(weights[key], value) for _, weights in found)


def language_model(world: rl.World, tie: bool, stage: int) -> list[tuple[float, bool, float]]:
    config = GPTConfig(vocab_size=37, width=16, layers=2, heads=4, kv_heads=2, ffn=24, seq_len=12, tie=tie)
    pipe = {"pipe": "1f1b"} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config), loss=language_model_loss, optimizer=adamw, world=world, precision="fp16", accumulate=2, stage=stage,
                        clip=1.0, **pipe)
    tokens = torch.randint(0, 37, (12, 13), generator=torch.Generator().manual_seed(0)).tensor_split(engine.group.size)[engine.group.rank]
    reports = [engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())) for _ in range(4)]
    return [(report.loss, report.skipped, engine.scale.value) for report in reports]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=2, tensor=2), rl.Mesh(pipe=2, context=2), rl.Mesh(pipe=2, shard=2)],
                         ids=str)
def test_fp16_goes_with_pipe_and_every_other_axis(mesh, tie):
    """Sums of fp16 products are cut in other places, so losses are near: 4 steps, each off by less than a few of fp16's 2**-11."""
    (alone,) = rl.simulate(1, lambda w: language_model(w, tie, 0))
    for story in rl.simulate(mesh, lambda w: language_model(w, tie, 2)):
        assert [entry[1:] for entry in story] == [entry[1:] for entry in alone]
        assert [loss for loss, *_ in story] == pytest.approx([loss for loss, *_ in alone], rel=4 * 2**-11)
        assert story[3][0] < 0.95 * story[0][0]


def test_a_pipeline_measures_its_first_scale_in_evaluation_mode():
    """Else statistics would count the first micro-batch twice."""
    def body(world):
        model, training = TwoLayers(), []
        model.first.register_forward_pre_hook(lambda module, _: training.append(module.training))
        pipe = rl.Pipe(pieces=two_pieces, loss=lambda model: distance)
        engine = rl.prepare(model, loss=lambda m, batch: distance(m(batch[0]), batch[1]), optimizer=adamw, world=world, precision="fp16",
                            accumulate=2, pipe=pipe)
        engine.step((torch.ones(4, 8), torch.ones(4, 4)))
        return training.count(True)

    assert rl.simulate(rl.Mesh(pipe=2), body) == [2, 0]


def test_what_a_failed_schedule_leaves_is_in_no_later_gradient():
    def body(world):
        pipe = {"pipe": rl.Pipe(pieces=two_pieces, loss=lambda model: distance)} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(TwoLayers(), loss=lambda m, batch: distance(m(batch[0]), batch[1]), optimizer=adamw, world=world, stage=1,
                            accumulate=2, **pipe)
        good = (torch.ones(4, 8), torch.ones(4, 4))
        engine.step(good)
        with pytest.raises(rl.NonFinite):
            engine.step((good[0], good[1] / 0))
        return engine.step(good).grad_norm

    (alone,) = rl.simulate(1, body)
    assert rl.simulate(rl.Mesh(pipe=2), body) == pytest.approx([alone] * 2, rel=1e-6)   # fp32
