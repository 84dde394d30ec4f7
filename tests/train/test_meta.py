"""A model on the meta device: on meshes of all axes it trains as one process does, and no rank ever holds more than its part."""

import dataclasses
import threading
from functools import cache

import pytest
import torch
from torch import nn

import rankloom as rl
from closeness import expect_close, tensors_of
from rankloom import GPT, GPTConfig
from rankloom.base.errors import ConfigError, ModelMismatch
from rankloom.models.config import MoEConfig
from rankloom.models.gpt import initial_values
from rankloom.models.loss import language_model_loss
from rankloom.parallel.sections import sharding
from seeded import seeded
from storages import Storages

pytestmark = pytest.mark.gloo

BOUND = 1e-12   # that of test_equivalence.py
ROWS, TOKENS, VOCAB = 12, 12, 37
MOE = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, bias_rate=0.01)
MESHES = [
    (rl.Mesh(tensor=2), 0), (rl.Mesh(tensor=2), 2), (rl.Mesh(pipe=2), 0), (rl.Mesh(pipe=2), 3), (rl.Mesh(expert=2), 0),
    (rl.Mesh(expert=2), 3), (rl.Mesh(context=2), 1), (rl.Mesh(pipe=3, tensor=2), 1), (rl.Mesh(replicate=2, shard=3), 2),
    (rl.Mesh(pipe=2, expert=2), 2), (rl.Mesh(pipe=2, shard=2, tensor=2), 3), (rl.Mesh(shard=2, tensor=2, expert=2), 1)]


def shape(tie: bool, experts: bool) -> GPTConfig:
    """Small, with a vocabulary that nothing divides, and fewer key-value heads than ranks."""
    return GPTConfig(vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=1, ffn=24, seq_len=TOKENS, tie=tie,
                     moe=MOE if experts else None)


def on_meta(config: GPTConfig) -> GPT:
    """In fp64; the norm of a block is frozen."""
    return frozen(GPT(config, device="meta").double())


def frozen(model: GPT) -> GPT:
    """A norm and a matrix that is cut over tensor ranks are not trained."""
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    model.blocks[1].attention.query.weight.requires_grad_(False)
    return model


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three global batches."""
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=draw) for _ in range(3)]
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in batches]


def engine_of(world: rl.World, model: nn.Module, stage: int, **options) -> rl.Engine:
    """With AdamW, clipping, and where there are stages 1f1b."""
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    chosen = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), **pipe, **options}
    return rl.prepare(model, loss=language_model_loss, world=world, stage=stage, clip=0.5, **chosen)


def train(engine: rl.Engine) -> tuple[list[float], dict, dict]:
    """Losses and norms of three steps, and the whole state before and after."""
    rows, before = engine.group, engine.full_state_dict()["model"]
    reports = [engine.step(tuple(t.tensor_split(rows.size)[rows.rank] for t in batch)) for batch in make_batches()]
    after = engine.full_state_dict()
    return [number for report in reports for number in (report.loss, report.grad_norm)], before, after


@cache
def truth(config: GPTConfig):
    """Built whole, on one process."""
    return rl.simulate(1, lambda world: train(engine_of(world, frozen(GPT(config, seed=7, dtype=torch.float64)), 0)))[0]


def expect_equal(mine, theirs):
    """The beginning to the bit, what follows to 1e-12 of the largest element of each tensor."""
    assert mine[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        assert torch.equal(mine[1][name], value), name
    assert mine[0] == pytest.approx(theirs[0], rel=BOUND)
    expect_close(tensors_of(mine[2]), tensors_of(theirs[2]), BOUND)


@pytest.mark.parametrize("mesh, stage", MESHES, ids=str)
def test_on_every_axis_it_begins_with_the_bits_of_one_process_and_trains_as_one_does(mesh, stage):
    config = shape(tie=stage < 3, experts=mesh.expert > 1 or stage == 2)

    def body(world):
        model = on_meta(config)
        return train(engine_of(world, model, stage, initialize=initial_values(model, seed=7)))

    for mine in rl.simulate(mesh, body):
        expect_equal(mine, truth(config))


LONG = GPTConfig(vocab_size=1024, width=32, layers=6, heads=4, kv_heads=4, ffn=64, seq_len=16, tie=True)


PARTS = [(rl.Mesh(shard=4), 3), (rl.Mesh(tensor=4), 0), (rl.Mesh(pipe=4), 1), (rl.Mesh(expert=4), 0),
         (rl.Mesh(pipe=2, shard=2, tensor=2), 3)]


@pytest.mark.parametrize("mesh, stage", PARTS, ids=str)
def test_while_a_model_is_built_a_rank_holds_no_more_than_its_part_and_one_whole_tensor(mesh, stage, monkeypatch):
    config = dataclasses.replace(LONG, moe=dataclasses.replace(MOE, ffn=64)) if mesh.expert > 1 else LONG
    before, plain = threading.local(), sharding.make_gradients
    cut = {"pipe": rl.Pipe(sizes=[8 // mesh.pipe] * mesh.pipe)} if mesh.pipe > 1 else {}   # else one stage has the matrix and a norm only

    def body(world):
        model = GPT(config, device="meta").double()
        with Storages() as memory:
            before.peak = lambda: memory.peak
            engine = engine_of(world, model, stage, initialize=lambda name, tensor: tensor.fill_(1.0), **cut)
        return engine.held().parameters, before.found

    def make_gradients(*args, **kwargs):
        before.found = before.peak()   # gradients have memory of their own
        return plain(*args, **kwargs)

    monkeypatch.setattr(sharding, "make_gradients", make_gradients)
    whole = [param.numel() * 8 for param in GPT(config, device="meta").parameters()]
    for part, peak in rl.simulate(mesh, body):
        assert part < 0.7 * sum(whole)
        assert peak < part + max(whole) * (1 + (mesh.tensor > 1) / mesh.tensor)   # and what is taken out of it, before it is sliced


class Net(nn.Module):
    """torch's own modules, which fill themselves: an embedding with a row of zeros, tied to the output, two blocks, a buffer."""

    tp_plan = {"words": "embedding_rowwise", "blocks.*.0": "colwise", "blocks.*.2": "rowwise", "head": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def pieces(self):
        """For a pipeline: the embedding and the head are on the first and the last rank."""
        blocks = [({f"blocks.{i}": block}, lambda x, block=block: x + block(x)) for i, block in enumerate(self.blocks)]
        return [({"words": self.words}, self.words), *blocks, ({"norm": self.norm, "words": self.words}, lambda x: x @ self.words.weight.T)]


def prepared(world: rl.World, stage: int, model: nn.Module | None = None, **options) -> rl.Engine:
    """A `Net` on the meta device, or another model, with SGD."""
    if model is None:
        with torch.device("meta"):
            model = Net()
    if world.mesh.pipe > 1:
        options |= {"pipe": rl.Pipe(pieces=Net.pieces, loss=lambda model: nn.MSELoss(), schedule="gpipe")}
    return rl.prepare(model, loss=lambda model, piece: (model(piece).square().sum(), piece.numel()),
                      optimizer=lambda params: torch.optim.SGD(params, lr=0.1), world=world, stage=stage, **options)


CUTS = [rl.Mesh(tensor=2), rl.Mesh(tensor=3), rl.Mesh(pipe=2), rl.Mesh(pipe=2, shard=2, tensor=2), rl.Mesh(shard=2, tensor=2)]


@pytest.mark.parametrize("mesh, stage", MESHES, ids=str)
def test_attributes_of_parameters_reach_the_optimizers_function_on_every_axis(mesh, stage):
    def body(world):
        model, seen = GPT(shape(tie=True, experts=True), device="meta"), []
        names = [name for name, _ in model.named_parameters()]
        for name, param in model.named_parameters():
            param.called = name

        def optimizer(params):
            seen.extend(param.called for param in params)
            return torch.optim.AdamW(params)

        engine_of(world, model, stage, optimizer=optimizer, initialize=initial_values(model, seed=7))
        return sorted(seen) == sorted(names)

    assert all(rl.simulate(mesh, body))


@pytest.mark.parametrize("stage", [0, 3])
def test_modules_that_fill_themselves_draw_the_whole_whatever_is_cut_out_of_it(stage):
    expected = rl.simulate(1, lambda world: prepared(world, 0, seed=5).full_state_dict()["model"])[0]
    assert not expected["words.weight"][7].any() and expected["words.weight"].std() > 0.5
    for mesh in CUTS:
        for state in rl.simulate(mesh, lambda world: prepared(world, stage, seed=5).full_state_dict()["model"]):
            assert expected.keys() - state.keys() <= {"head.weight"}   # which stages know by its first name
            assert all(torch.equal(state[name], expected[name]) for name in state)


class Resets(Net):
    """Has a parameter of its own, and fills all modules inside of it, too; a second time, and its head otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))

    def reset_parameters(self) -> None:
        for module in (self.words, self.norm, self.kept, *self.blocks[0].children(), *self.blocks[1].children()):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            self.words.weight.fill_(1.0)
            self.kept.weight.fill_(1.0)
            self.scale.normal_()


class Bank(nn.Linear):
    """Its length is how much it holds: nothing yet, so that it counts as false."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_module_that_fills_those_inside_of_it_changes_none_of_their_values(stage):
    def body(world, kind):
        with torch.device("meta"):
            model = kind()
        if kind is Resets:
            model.kept = seeded(2)(lambda: Bank(8, 8))()
        return prepared(world, stage, model, seed=5).full_state_dict()["model"]

    plain, kept = rl.simulate(1, lambda world: body(world, Net))[0], seeded(2)(lambda: Bank(8, 8))()
    for mesh in (rl.Mesh(), rl.Mesh(shard=2), rl.Mesh(tensor=2)):
        for state in rl.simulate(mesh, lambda world: body(world, Resets)):
            assert all(torch.equal(state[name], value) for name, value in plain.items())
            assert torch.equal(state["kept.weight"], kept.weight) and state["scale"].std() > 0.1


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(shard=2, tensor=2), rl.Mesh(replicate=2, tensor=2)], ids=str)
def test_what_rank_0_draws_counts_for_all_parts(mesh):
    def body(world):
        draw = torch.Generator().manual_seed(world.rank)

        def initialize(name, tensor):
            tensor.copy_(torch.rand(tensor.shape, generator=draw))

        return prepared(world, 3, initialize=initialize).full_state_dict()["model"]

    states = rl.simulate(mesh, body)
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())
    draw = torch.Generator().manual_seed(0)
    assert torch.equal(states[0]["norm.running_mean"], torch.rand(8, generator=draw))   # buffers come first


def test_what_is_not_on_the_meta_device_keeps_its_values_when_it_is_cut():
    def body(world):
        with torch.device("meta"):
            model = Net()
        model.blocks[1] = seeded(3)(lambda: nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)))()
        before = {name: value.clone() for name, value in model.blocks[1].state_dict().items()}
        return before, prepared(world, 3, model).full_state_dict()["model"]

    before, state = rl.simulate(rl.Mesh(shard=2, tensor=2), body)[0]
    assert all(torch.equal(state[f"blocks.1.{name}"], value) for name, value in before.items())


def failures(mesh: rl.Mesh, initialize, stage: int) -> list[str]:
    """What each rank was told."""
    def body(world):
        with pytest.raises(ConfigError) as caught:
            prepared(world, stage, initialize=lambda name, tensor: initialize(world, name, tensor))
        return str(caught.value)

    return rl.simulate(mesh, body)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", [rl.Mesh(shard=2), rl.Mesh(tensor=2), rl.Mesh(pipe=2)], ids=str)
def test_tensors_that_the_function_does_not_know_are_named_on_all_ranks(mesh, stage):
    def initialize(world, name, tensor):
        if name == "blocks.0.0.weight":
            tensor[1:].fill_(1.0)
        elif name not in ("blocks.1.2.bias", "norm.running_var"):
            tensor.fill_(1.0)
        return torch.ones_like(tensor)

    for said in failures(mesh, initialize, stage):
        for name in ("blocks.0.0.weight", "blocks.1.2.bias", "norm.running_var"):
            assert name in said
        assert "must write into the tensor" in said and "words.weight" not in said


@pytest.mark.parametrize("mesh", [rl.Mesh(shard=2), rl.Mesh(tensor=2)], ids=str)
@pytest.mark.parametrize("change", [lambda tensor: tensor.set_(torch.ones(3)), lambda tensor: tensor.resize_(100).fill_(1.0),
                                    lambda tensor: setattr(tensor, "data", torch.ones_like(tensor, dtype=torch.float64))])
def test_a_function_that_makes_another_tensor_is_told_so_on_all_ranks(mesh, change):
    def initialize(world, name, tensor):
        tensor.fill_(1.0)
        if name == "blocks.0.2.bias":
            change(tensor)

    for said in failures(mesh, initialize, 3):
        assert "`initialize` made blocks.0.2.bias another tensor, of shape" in said and "it must write into the one" in said


def test_stages_that_share_a_parameter_must_be_given_the_same_values():
    def initialize(world, name, tensor):
        tensor.fill_(float(world.rank))

    for said in failures(rl.Mesh(pipe=2, shard=2), initialize, 3):
        assert said.startswith("words.weight: `initialize` gave other values in another stage of the pipeline")


def test_in_16_bits_the_masters_have_the_values_in_full():
    def body(world):
        model = GPT(LONG, device="meta")
        return engine_of(world, model, 3, precision="bf16", initialize=initial_values(model, seed=3)).full_state_dict()["model"]

    whole = GPT(LONG, seed=3).state_dict()
    for state in rl.simulate(rl.Mesh(shard=2, tensor=2), body):
        assert all(torch.equal(state[name], value) for name, value in whole.items())


def test_a_model_that_differs_between_ranks_is_refused():
    def body(world):
        model = GPT(dataclasses.replace(LONG, layers=2 + world.rank), device="meta")
        engine_of(world, model, 0, initialize=initial_values(model, seed=0))

    with pytest.raises(ModelMismatch, match="another model than rank 0"):
        rl.simulate(rl.Mesh(tensor=2), body)


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(pipe=2, shard=2)], ids=str)
def test_a_llama_of_transformers_is_filled_from_a_state_dict_and_its_buffers(mesh):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)
    plain = transformers.LlamaForCausalLM(config).double()
    given = dict(plain.named_parameters()) | dict(plain.named_buffers())

    def loss(model, batch):
        logits = model(batch[0])
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    def body(world, model, **options):
        pipe = {"pipe": "gpipe", "accumulate": 2} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(model, loss=loss, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), world=world, stage=3, clip=0.5,
                            **pipe, **options)
        rows = engine.group
        reports = [engine.step(tuple(t.tensor_split(rows.size)[rows.rank] for t in batch)) for batch in make_batches()]
        return [(report.loss, report.grad_norm) for report in reports]

    def on_ranks(world):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).double()
        return body(world, model, initialize=lambda name, tensor: tensor.copy_(given[name].detach()))

    found = rl.simulate(mesh, on_ranks)
    for ours, expected in zip(found, rl.simulate(1, lambda world: body(world, plain)) * mesh.size, strict=True):
        assert [number for pair in ours for number in pair] == pytest.approx([number for pair in expected for number in pair], rel=BOUND)
