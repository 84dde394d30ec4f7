"""Models of `transformers` as pipelines: `rl.prepare` cuts them by their own layers, and they train as in one process.

The bound is that of test_equivalence.py.
"""

import copy
import functools
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from closeness import expect_close, tensors_of
from rankloom.parallel.pipeline.cut import Stage, make_stages
from rankloom.train.pipeline.layer_pieces import layer_pieces
from seeded import shaken
from token_rows import token_batches

BOUND = 1e-12
ROWS, TOKENS, VOCAB = 8, 12, 40
SEQUENCE = {"model.layers.0": "sequence_split", "model.layers.*.input_layernorm": "sequence_parallel", "model.norm": "sequence_parallel",
            "model.layers.*.post_attention_layernorm": "sequence_parallel"}


@functools.cache
def llama(tie: bool = False, kv_heads: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=kv_heads,
        max_position_embeddings=32, tie_word_embeddings=tie)).double()
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":   # it rounds to fp32, whatever the model's dtype
            model.set_submodule(name, nn.RMSNorm(32, eps=module.variance_epsilon, dtype=torch.float64))
    return shaken(model)


@functools.cache
def gpt2(dropout: float = 0.0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1)).double())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return token_batches(ROWS, TOKENS, VOCAB)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4)   # a gradient of 0 (bias of keys) but for rounding makes no step


def loss_of_one_process(model, batch):
    """As anybody would write it for the plain model."""
    tokens, targets = batch
    logits = model(tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def train(world: rl.World, model: nn.Module, give=lambda tokens, targets: (tokens, targets), loss=loss_of_one_process, **options) -> dict:
    """Three steps; the first one's logits by row, where this rank sees them, and gradients out of AdamW's moments; the state at the end."""
    logits: dict[tuple[int, ...], torch.Tensor] = {}

    def watched(model, batch):
        def call(*args, **kwargs):
            output = model(*args, **kwargs)
            for row, value in zip(batch[1].tolist(), output.logits.detach()):
                logits[tuple(row)] = value.clone()   # the last call in a step: the engine tries the loss before the first
            return output

        return loss(call, batch)

    engine = rl.prepare(copy.deepcopy(model), loss=watched, optimizer=adamw, world=world, clip=0.5, accumulate=2, **options)
    mine = [give(*(t.tensor_split(engine.group.size)[engine.group.rank] for t in batch)) for batch in batches()]
    reports = [engine.step(mine[0])]
    first, seen = engine.full_state_dict()["optimizer"]["state"], dict(logits)
    reports += [engine.step(batch) for batch in mine[1:]]
    tensors = {f"gradient of {name}": held["exp_avg"] for name, held in first.items()} | tensors_of(engine.full_state_dict())
    return {"numbers": [x for r in (*reports, engine.evaluate(mine[:1])) for x in (r.loss, r.grad_norm, r.count)], "tensors": tensors,
            "logits": seen}


def expect_equal(mesh: rl.Mesh, model: nn.Module, *, give=lambda tokens, targets: (tokens, targets), loss=loss_of_one_process,
                 **options) -> None:
    """Loss, norm and count of every step, the gradients and logits of the first, the whole state, and an evaluation."""
    (truth,) = rl.simulate(1, lambda world: train(world, model, give, loss))
    seen = {}
    for mine in rl.simulate(mesh, lambda world: train(world, model, give, loss, **options)):
        assert mine["numbers"] == pytest.approx(truth["numbers"], rel=BOUND)
        expect_close(mine["tensors"], truth["tensors"], BOUND)
        expect_close(mine["logits"], {row: truth["logits"][row] for row in mine["logits"]}, BOUND)
        seen |= mine["logits"]
    assert seen.keys() == truth["logits"].keys() and len(seen) == ROWS


@pytest.mark.parametrize(("tie", "kv_heads", "stage"), [(False, 2, 3), (True, 1, 1), (True, 2, 0)])
def test_a_llama_at_pipe_2_tensor_2_shard_2_trains_like_the_unsplit_one(tie, kv_heads, stage):
    expect_equal(rl.Mesh(pipe=2, tensor=2, shard=2), llama(tie, kv_heads), stage=stage)


def test_a_llama_is_split_by_tokens_too():
    expect_equal(rl.Mesh(pipe=2, tensor=2), llama(), stage=2, tensor_plan=llama().tp_plan | SEQUENCE)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_gpt_2_at_pipe_2_tensor_2_trains_like_the_unsplit_one(dropout):
    expect_equal(rl.Mesh(pipe=2, tensor=2), gpt2(dropout), stage=1)


@pytest.mark.parametrize(("mesh", "policy"), [(rl.Mesh(pipe=3), "none"), (rl.Mesh(pipe=3), "full"), (rl.Mesh(tensor=2), "full"),
                                              (rl.Mesh(tensor=2), "selective"), (rl.Mesh(tensor=2), "10 MiB")], ids=str)
def test_a_mask_reaches_every_layer_with_the_tokens_also_when_it_runs_again(mesh, policy):
    def padded(tokens, targets):
        """On the left, where it changes what the others see."""
        mask = (torch.arange(TOKENS) >= torch.arange(len(tokens))[:, None]).long()
        return (tokens, mask), targets.masked_fill(mask == 0, -100)

    def loss(model, batch):
        (tokens, mask), targets = batch
        logits = model(input_ids=tokens, attention_mask=mask).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()

    expect_equal(mesh, llama(), give=padded, loss=loss, stage=0, recompute=policy)


@pytest.mark.parametrize(("schedule", "chunks", "pipe"), [("gpipe", None, 5), ("interleaved", 2, 2), ("zb-h1", None, 3), ("zb-v", None, 2)])
def test_a_tied_llama_runs_on_any_schedule(schedule, chunks, pipe):
    expect_equal(rl.Mesh(pipe=pipe), llama(tie=True), stage=1, pipe=rl.Pipe(schedule=schedule, chunks=chunks))


@pytest.mark.parametrize(("policy", "words"), [("selective", {}), ("full", SEQUENCE)], ids=["selective", "full, by tokens"])
def test_blocks_that_compute_again_do_so_in_stages_and_parts(policy, words):
    expect_equal(rl.Mesh(pipe=2, tensor=2), llama(), stage=0, recompute=policy, tensor_plan=llama().tp_plan | words)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Mistral", "Phi3", "Olmo2", "GPTNeoX", "OPT", "Bloom", "Falcon"])
def test_other_families_give_the_same_logits_in_pieces(family):
    """Sliding windows, scaled embeddings, norms behind embeddings, layers that return tuples, lists two levels deep."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2, sliding_window=4,
        **({"head_dim": 8} if family in ("Qwen3", "Gemma2") else {}))
    model, tokens = getattr(transformers, f"{family}ForCausalLM")(config).double().eval(), batches()[0][0]
    value = tokens
    for stage in make_stages(layer_pieces(model, lambda: tokens), [1, 2, 2]):
        value = stage(value)
    assert torch.equal(value.logits, model(tokens).logits)


# ------------------------------------------------------------------ models of no library


@torch.no_grad()
def fill(name, tensor):
    if name.endswith("gain"):
        tensor.fill_(0.7)
    elif not tensor.is_meta:
        tensor.normal_(std=0.3, generator=torch.Generator().manual_seed(sum(name.encode())))


class Layer(nn.Module):
    """Looks back one token, so that order matters."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(32, 16)
        self.register_buffer("gain", torch.full((), 0.7), persistent=False)

    def forward(self, x, scale):
        y = self.norm(x)
        return x + self.gain * scale * self.mix(torch.cat((y, y.roll(1, 1)), -1)).tanh()


class Decoder(nn.Module):
    """Its names and their order tell nothing, its layers are told their number, and it returns a dict."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, VOCAB)
        self.body = nn.ModuleDict({"steps": nn.ModuleList(Layer() for _ in range(3)), "table": nn.Embedding(VOCAB, 16)})
        self.widen = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))
        for name, tensor in (*self.double().named_parameters(), *self.named_buffers()):
            fill(name, tensor)

    def layers(self, x):
        for number, step in enumerate(self.body.steps):
            x = step(x, 1.0 / (number + 1))
        return x

    def forward(self, tokens):
        return {"logits": self.out(self.layers(self.widen(self.body.table(tokens))))}


class ByName(Decoder):
    """Tells its embedding the tokens by name."""

    def forward(self, tokens):
        return {"logits": self.out(self.layers(self.widen(self.body.table(input=tokens))))}


class LayersByName(Decoder):
    """Tells its layers and its head what comes in by name, and another tensor before it."""

    def layers(self, x):
        for step in self.body.steps:
            x = step(scale=torch.full_like(x, 0.5), x=x)
        return x

    def forward(self, tokens):
        return {"logits": self.out(input=self.layers(x=self.widen(input=self.body.table(input=tokens))))}


class InAList(Decoder):
    """Its layers return a list that begins with the stream."""

    kind = list

    def __init__(self):
        super().__init__()
        for step in self.body.steps:
            plain = step.forward
            step.forward = lambda x, scale, plain=plain: self.kind([plain(x, scale), None])

    def layers(self, x):
        for step in self.body.steps:
            x = step(x, 0.5)[0]
        return x


class InATriple(InAList):
    kind = staticmethod(lambda values: (*values, None))

    def layers(self, x):
        for step in self.body.steps:
            x, _, _ = step(x, 0.5)
        return x


class InADict(InAList):
    kind = staticmethod(lambda values: dict(enumerate(values)))


class Again(Decoder):
    def layers(self, x):
        return super().layers(super().layers(x))


class Backwards(Decoder):
    def layers(self, x):
        for step in reversed(self.body.steps):
            x = step(x, 1.0)
        return x


class CallsWhatIsInside(Decoder):
    """Its layers are no more than lists of modules."""

    def __init__(self):
        super().__init__()
        self.body["steps"] = nn.ModuleList(nn.ModuleDict({"inner": nn.Linear(16, 16, dtype=torch.float64)}) for _ in range(3))

    def layers(self, x):
        for step in self.body.steps:
            x = torch.tanh(step["inner"](x))
        return x


class Bridged(Decoder):
    """The first layer's output is added again behind the last."""

    def layers(self, x):
        first = self.body.steps[0](x, 1.0)
        return first + self.body.steps[2](self.body.steps[1](first, 1.0), 1.0)


class Scaled(Decoder):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16).double())

    def layers(self, x):
        return super().layers(x * self.scale)


class Between(Decoder):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16).double()

    def layers(self, x):
        for step in self.body.steps:
            x = step(self.norm(x), 1.0)
        return x


class Idle(Decoder):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2).double()


class TwoLists(Decoder):
    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList([Layer().double()])


class ByWeight(Decoder):
    """Reads a matrix that stands in the first stage."""

    def forward(self, tokens):
        return self.out(self.layers(self.widen(self.body.table(tokens)))) + self.body.table.weight.sum()


class Dropping(Decoder):
    """In training it leaves a layer out."""

    left_out = 1

    def layers(self, x):
        for number, step in enumerate(self.body.steps):
            x = x if self.training and number == self.left_out else step(x, 1.0)
        return x


class NoisyBetween(Decoder):
    """Changes what passes from layer to layer, in training only. shape of the change: a new tensor, or in place"""

    in_place = False

    def layers(self, x):
        for step in self.body.steps:
            x = step(x, 1.0)
            if self.training:
                x = x.mul_(1.5) if self.in_place else F.dropout(x, 0.5)
        return x


class NoisyBetweenInPlace(NoisyBetween):
    in_place = True


class NoisyBetweenByName(NoisyBetween):
    """Its layers are told what comes in by name, behind another tensor."""

    def layers(self, x):
        for step in self.body.steps:
            x = F.dropout(step(scale=torch.full_like(x, 0.5), x=x), 0.5, self.training)
        return x


class NoisyAround(Decoder):
    """Changes what goes into the first layer and what comes out of the last, in training only."""

    def layers(self, x):
        noisy = lambda x: F.dropout(x, 0.5) if self.training else x
        return noisy(super().layers(noisy(x)))


class Masked(Decoder):
    """Makes a mask of the embedding's output, of which it takes the shape only, and gives it to every layer."""

    def layers(self, x):
        scale = x[..., :1].clone().fill_(0.5) + x[..., 1:2].clone().zero_()
        for step in self.body.steps:
            x = step(x, scale)
        return x


class Told(Decoder):
    """A module without tensors tells each layer a number."""

    class Share(nn.Module):
        def forward(self, number):
            return 1.0 / (number + 1)

    def __init__(self):
        super().__init__()
        self.share = self.Share()

    def layers(self, x):
        for number, step in enumerate(self.body.steps):
            x = step(x, self.share(number))
        return x


class Copies(Decoder):
    """Hands a copy from layer to layer, in training or not."""

    def layers(self, x):
        for step in self.body.steps:
            x = step(x, 1.0).clone()
        return x


class AsksSizes(Decoder):
    """Scales what goes into the layers by the width of its table."""

    def layers(self, x):
        return super().layers(x * self.body.table.embedding_dim ** 0.5)


class AsksLayers(Decoder):
    """Reads a norm inside of a layer."""

    def forward(self, tokens):
        return self.out(self.layers(self.widen(self.body.table(tokens)))) * self.body.steps[1].norm.weight.sum()


class Rescales(Decoder):
    """Changes its weights between training and evaluation, as RWKV of `transformers` does."""

    def forward(self, tokens):
        if not self.training:
            for step in self.body.steps:
                with torch.no_grad():
                    step.norm.weight.div_(2.0)
        return super().forward(tokens)


class NoTokens(Decoder):
    def __init__(self):
        super().__init__()
        self.body.table = nn.Linear(2, 16)


def loss_of_a_dict(model, batch):
    logits = model(batch[0])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), (batch[1] != -100).sum()


def prepare(world, model=None, loss=loss_of_a_dict, **options):
    return rl.prepare(Decoder() if model is None else model, loss=loss, optimizer=adamw, world=world, accumulate=2, **options)


@pytest.mark.parametrize(("kind", "schedule", "pipe"), [
    (Decoder, "1f1b", 4), (Decoder, "zb-v", 2), (ByName, "1f1b", 2), (LayersByName, "1f1b", 2), (LayersByName, "zb-v", 2),
    (InAList, "1f1b", 2)])
def test_a_model_of_the_user_s_own_is_cut_by_what_it_does(kind, schedule, pipe):
    def body(world):
        engine = prepare(world, kind(), stage=1, clip=0.5, **({"pipe": schedule} if world.mesh.pipe > 1 else {}))
        return [(r.loss, r.grad_norm) for r in map(engine.step, batches())], engine.full_state_dict()["model"]

    ((truth, expected),) = rl.simulate(1, body)
    for found, state in rl.simulate(rl.Mesh(pipe=pipe), body):
        for ours, theirs in zip(found, truth, strict=True):
            assert ours == pytest.approx(theirs, rel=BOUND)
        expect_close(state, expected, BOUND)


class Weighed(Decoder):
    """Takes two inputs, as a mask beside tokens."""

    def forward(self, tokens, weights):
        return {"logits": self.out(self.layers(self.widen(self.body.table(tokens)) * weights.unsqueeze(-1)))}


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_inputs_may_be_a_list(kind):
    loss = lambda model, batch: loss_of_a_dict(lambda given: model(*given), batch)
    rows = [(kind([tokens, 1.0 + 0.1 * tokens.double()]), targets) for tokens, targets in batches()]

    def body(world):
        pipe = {"pipe": rl.Pipe(example=rows[0])} if world.mesh.pipe > 1 else {}
        engine = prepare(world, Weighed(), loss=loss, **pipe)
        return [engine.step(batch).loss for batch in rows], engine.evaluate(rows[:1]).loss

    ((losses, evaluated),) = rl.simulate(1, body)
    for found, other in rl.simulate(rl.Mesh(pipe=2), body):
        assert found == pytest.approx(losses, rel=BOUND) and other == pytest.approx(evaluated, rel=BOUND)


class WithLoss(Decoder):
    """Takes targets, and returns its loss, as models of `transformers` do with `labels`: the last stage has what it is computed of."""

    def forward(self, tokens, targets):
        return loss_of_a_dict(super().forward, (tokens, targets))


@pytest.mark.parametrize(("pipe", "schedule"), [(2, "1f1b"), (2, "zb-v"), (4, "gpipe")])
def test_a_model_may_compute_its_loss_itself(pipe, schedule):
    rows = [(both, both[1]) for both in batches()]

    def body(world):
        cut = {"pipe": rl.Pipe(example=rows[0], schedule=schedule)} if world.mesh.pipe > 1 else {}
        engine = prepare(world, WithLoss(), loss=lambda model, batch: model(*batch[0]), **cut)
        return [engine.step(batch).loss for batch in rows], engine.evaluate(rows[:1]).loss

    ((losses, evaluated),) = rl.simulate(1, body)
    for found, other in rl.simulate(rl.Mesh(pipe=pipe), body):
        assert found == pytest.approx(losses, rel=BOUND) and other == pytest.approx(evaluated, rel=BOUND)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_all_of_whose_stages_are_frozen_goes_along(stage):
    def body(world):
        model = Decoder()
        for part in (model.body.table, model.widen, *model.body.steps[:2]):
            part.requires_grad_(False)
        return [(r.loss, r.grad_norm) for r in map(prepare(world, model, stage=stage, clip=0.5).step, batches())]

    (truth,) = rl.simulate(1, body)
    for found in rl.simulate(rl.Mesh(pipe=2), body):
        for ours, theirs in zip(found, truth, strict=True):
            assert ours == pytest.approx(theirs, rel=BOUND)


def test_a_model_from_the_meta_device_is_cut_before_it_has_values():
    def body(world, device="meta"):
        with torch.device(device):
            model = Decoder()
        engine = prepare(world, model, stage=3, initialize=fill if device == "meta" else None)
        return [(r.loss, r.grad_norm) for r in map(engine.step, batches())]

    (truth,) = rl.simulate(1, lambda world: body(world, "cpu"))
    for found in rl.simulate(rl.Mesh(pipe=2), body):
        for ours, theirs in zip(found, truth, strict=True):
            assert ours == pytest.approx(theirs, rel=BOUND)


def test_without_an_engine_the_pieces_tell_the_layers_only_how_many_tokens_there_are():
    tokens, targets = batches()[0]
    loss = lambda output, targets: loss_of_a_dict(lambda _: output, (None, targets))

    def body(world):
        torch.manual_seed(world.rank)
        pipe = rl.pipeline(layer_pieces(Decoder().eval()), loss, world, microbatches=2)
        total = pipe.step(list(zip(tokens.chunk(2), targets.chunk(2))))
        return total[0].item(), {name: param.grad for stage in pipe.stages.values() for name, param in stage.named_parameters()}

    plain = Decoder().eval()
    total, _ = loss_of_a_dict(plain, (tokens, targets))
    total.backward()
    found = rl.simulate(2, body)
    assert found[0][1].keys() | found[1][1].keys() == dict(plain.named_parameters()).keys()
    for value, grads in found:
        assert value == pytest.approx(total.item(), rel=BOUND)
        expect_close(grads, {name: plain.get_parameter(name).grad for name in grads}, BOUND)


def test_a_stage_is_let_go_of_the_rest_of_the_model():
    model = Decoder()
    others = [weakref.ref(param) for name, param in model.named_parameters() if not name.startswith("body.steps.1.")]
    piece = layer_pieces(model)[2]
    del model
    gc.collect()
    assert [ref() for ref in others] == [None] * len(others)
    assert list(piece[0]) == ["body.steps.1"]


def test_a_stage_calls_the_model_once_and_stages_of_any_sizes_in_a_row_are_the_model():
    model, tokens = Decoder().eval(), batches()[0][0]
    pieces, truth = layer_pieces(model), model(tokens)["logits"]
    for sizes in ([5], [1, 4], [2, 2, 1], [1, 1, 3], [4, 1], [1, 1, 1, 1, 1]):
        value = tokens
        for stage in make_stages(pieces, sizes):
            assert len(stage._runs) == 1
            value = stage(value)
        assert torch.equal(value["logits"], truth)
    apart, of_two_models = Stage([pieces[1], pieces[3]]), Stage([pieces[1], layer_pieces(Decoder())[2]])
    assert len(apart._runs) == len(of_two_models._runs) == 2


def test_trying_a_model_leaves_it_as_it_was():
    model = Decoder()
    model.out.eval()
    layer_pieces(model)
    assert [name for name, module in model.named_modules() if not module.training] == ["out"]
    assert not any(module._forward_hooks for module in model.modules()) and all(param.grad is None for param in model.parameters())


def test_a_piece_holds_nothing_of_a_call_that_is_over():
    """Not of its trial either, which follows the zeros that stand for other pieces: each later call would add some."""
    value = batches()[0][0]
    for _, piece in layer_pieces(Decoder()):
        value = piece(value)
        assert piece.arriving is piece.leaving is piece.follow is None


class Bare(nn.Module):
    """Nothing before its layers, nothing behind them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_no_piece_is_empty():
    assert [list(modules) for modules, _ in layer_pieces(Bare(), example=torch.ones(2, 6))] == [[f"layers.{n}"] for n in range(3)]


class Apart(Layer):
    """Uses an operation that no dispatch mode sees."""

    def forward(self, x, scale):
        return torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.tanh.default, super().forward(x, scale))[1]


def test_a_layer_whose_operations_cannot_be_followed_is_tried_without():
    model = Decoder()
    model.body.steps[1] = Apart().double()
    assert len(layer_pieces(model)) == 5


def test_the_tokens_of_a_trial_are_in_the_smallest_of_a_model_s_tables():
    model = Decoder()
    model.body.table, model.places = nn.Embedding(3, 16).double(), nn.Embedding(64, 16).double()
    model.widen.register_forward_hook(lambda _, args, x: x + model.places(torch.arange(x.shape[1])))
    assert len(layer_pieces(model)) == 5


class Counting(Layer):
    """Counts its calls, and its gain falls from call to call, in evaluation mode, too."""

    calls = 0

    def forward(self, x, scale):
        self.calls += 1
        self.gain.mul_(0.5)
        return super().forward(x, scale)


def test_what_layers_keep_from_call_to_call_is_put_back_after_a_trial_and_hides_no_cut():
    model = Decoder()
    model.body.steps = nn.ModuleList(Counting().double() for _ in range(3))
    layer_pieces(model)
    assert [(layer.calls, round(layer.gain.item(), 6)) for layer in model.body.steps] == [(0, 0.7)] * 3


@pytest.mark.parametrize(("kind", "reason"), [
    (Again, "does not call its layers body.steps.0 to body.steps.2 once each"), (Backwards, "once each, in their order"),
    (CallsWhatIsInside, "does not call its layers body.steps.0 to body.steps.2 once each, in their order; say where to cut"),
    (Bridged, "gives another output when it is cut into its layers"), (Scaled, "scale of Scaled stands in no module"),
    (Between, "uses norm in more places than before its layers or behind"), (Idle, "does not use spare"),
    (TwoLists, "2 lists of layers, body.steps and more"), (NoTokens, "no nn.Embedding"),
    (ByWeight, r"another output when it is cut .*: it reads parameters of a module .* two modules \(`head.weight = table.weight`\)"),
    (NoisyBetween, "NoisyBetween changes, in training, what body.steps.0 gives to the layer behind it"),
    (NoisyBetweenByName, "changes, in training, what body.steps.0 gives to the layer behind it"),
    (NoisyBetweenInPlace, "changes, in training, what body.steps.0 gives to the layer behind it.*pipe=rl.Pipe"),
    (InADict, r"the layers of InADict return a dict, expected a tensor, or a tuple that begins with one; say where to cut"),
    (Rescales, r"Rescales changes body.steps.0.norm.weight when it is called, and no stage can change what another has"),
    (lambda: nn.LayerNorm(2), "LayerNorm has no list of layers.*pipe=rl.Pipe")])
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(kind, reason):
    with pytest.raises(rl.ConfigError, match=reason):
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepare(world, kind()))


@pytest.mark.parametrize("kind", [NoisyAround, Masked, Copies, Told, AsksSizes, InATriple])
def test_what_stays_inside_a_piece_is_not_refused(kind):
    model = kind()
    before = torch.get_rng_state()
    pieces = layer_pieces(model)
    assert torch.equal(torch.get_rng_state(), before), "the trial in training drew from the global generator"
    value, tokens = batches()[0][0], batches()[0][0]
    model.eval()
    for stage in make_stages(pieces, [1, 1, 2, 1]):
        value = stage(value)
    assert torch.equal(value["logits"], model(tokens)["logits"])


@pytest.mark.parametrize(("sizes", "left_out", "refused"), [
    ([1, 4], 1, False), ([1, 3, 1], 1, False), ([2, 3], 2, False), ([2, 3], 1, True), ([3, 2], 1, True), ([4, 1], 2, True)])
def test_a_layer_at_a_border_that_is_left_out_in_training_is_an_error(sizes, left_out, refused):
    """What the stage before sent would go past it, and zeros through the rest."""
    model, tokens = Dropping(), batches()[0][0]
    model.left_out = left_out
    model.widen.eval()
    value, stages = tokens, make_stages(layer_pieces(model), sizes)
    with pytest.raises(rl.ConfigError, match=f"has not called body.steps.{left_out}, a layer at the border") if refused else nullcontext():
        for stage in stages:
            value = stage(value)
        assert torch.equal(value["logits"], model(tokens)["logits"])


def test_a_model_that_fails_while_it_is_tried_is_refused_with_its_own_error():
    reason = ("AsksLayers was tried with a few tokens.*AttributeError: it reads `norm` of a .*, which is on another stage; only one tensor "
              "may pass from layer to layer, and no stage can look into modules of others; say where to cut with pipe=rl.Pipe")
    with pytest.raises(rl.ConfigError, match=reason) as caught:
        layer_pieces(AsksLayers())
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_stage_of_several_pieces_calls_a_module_of_others_by_its_class():
    (_, first), (_, second) = layer_pieces(Decoder())[1:3]
    with pytest.raises(AttributeError, match="it reads `missing` of a Linear, which is on another stage"):
        _ = first.then(second).shells[0].out.missing


def test_who_has_given_an_example_is_not_told_to_give_one():
    with pytest.raises(rl.ConfigError, match=r"missing 1 required positional argument: 'weights'; say where to cut"):
        layer_pieces(Weighed(), example=batches()[0][0])


@pytest.mark.parametrize("example", [{}, {"example": batches()[0]}], ids=["tokens", "example"])
def test_a_wrong_plan_for_tensor_ranks_is_not_taken_for_a_model_that_cannot_be_cut_into_stages(example):
    def body(world):
        plan = {"body.steps.*.mix": "colwise"}   # and no rowwise layer behind it
        return prepare(world, tensor_plan=plan, pipe=rl.Pipe(**example))

    with pytest.raises(rl.ConfigError, match=r"^rank \d: tensor_parallel in .*body.steps.0, a .*, is another function") as caught:
        rl.simulate(rl.Mesh(pipe=2, tensor=2), body)
    assert "rl.Pipe" not in str(caught.value)


@pytest.mark.parametrize("family", ["Mamba", "Llama4"])
def test_a_model_that_asks_modules_of_other_stages_for_their_dtype_is_cut(family):
    transformers = pytest.importorskip("transformers")
    numbers = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if family == "Llama4":
        numbers |= dict(intermediate_size=48, intermediate_size_mlp=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                        num_local_experts=2, max_position_embeddings=32)
    config = getattr(transformers, {"Mamba": "MambaConfig", "Llama4": "Llama4TextConfig"}[family])(**numbers)
    model = shaken(getattr(transformers, f"{family}ForCausalLM")(config)).eval()
    value = tokens = batches()[0][0]
    truth = model(tokens, use_cache=False).logits
    for stage in make_stages(layer_pieces(model), [1, 1, 2, 1]):
        value = stage(value)
    torch.testing.assert_close(value.logits, truth, rtol=0, atol=0)


def test_more_stages_than_pieces_and_context_ranks_are_refused():
    with pytest.raises(rl.ConfigError, match="6 stages for a model of 5 pieces"):
        rl.simulate(rl.Mesh(pipe=6), prepare)
    with pytest.raises(rl.ConfigError, match="pieces of a Decoder take no `part`.*use one context rank"):
        rl.simulate(rl.Mesh(pipe=2, context=2), prepare)


@pytest.mark.parametrize(("loss", "reason"), [
    (lambda model, batch: (model(batch[0], labels=batch[1])["loss"], 1), r"calls the model with \(Tensor, labels=\)"),
    (lambda model, batch: (model(batch[0], attention_mask=batch[0] > 0)["logits"].sum(), 1), "attention_mask=.*belongs in that part"),
    (lambda model, batch: (model(batch[0][:, 1:])["logits"].sum(), 1), "called it with the first part of the micro-batch"),
    (lambda model, batch: ((model(batch[0])["logits"] + model(batch[0])["logits"]).sum(), 1), "called the model 2 times"),
    (lambda model, batch: (batch[0].sum(), 1), "called the model 0 times")])
def test_a_loss_that_calls_the_model_otherwise_than_the_stages_were_called_is_refused(loss, reason):
    with pytest.raises(rl.LossError, match=reason):
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepare(world, loss=loss).step(batches()[0]))


@pytest.mark.parametrize(("name", "refused"), [("weights", False), ("shifts", True)])
def test_a_loss_must_name_a_tensor_as_the_parameter_that_the_stages_give_it_to(name, refused):
    """Stages call the model with the first part by position. As another parameter, one process would compute another loss."""
    loss = lambda model, batch: loss_of_a_dict(lambda given: model(given[0], **{name: given[1]}), batch)
    tokens, targets = batches()[0]
    batch = (tokens, 1.0 + 0.1 * tokens.double()), targets

    def body(world):
        pipe = {"pipe": rl.Pipe(example=batch)} if world.mesh.pipe > 1 else {}
        return prepare(world, Weighed(), loss=loss, **pipe).step(batch).loss

    with pytest.raises(rl.LossError, match="as `shifts`, but a pipeline.*it was `weights`") if refused else nullcontext():
        found = rl.simulate(rl.Mesh(pipe=2), body)
        assert found == pytest.approx(2 * rl.simulate(1, body), rel=BOUND)


def test_an_error_of_a_stage_says_as_which_parameters_it_was_given_the_batch():
    def loss(model, batch):
        (tokens, mask), targets = batch
        return loss_of_a_dict(lambda given: {"logits": model(given, attention_mask=mask).logits}, (tokens, targets))

    tokens, targets = batches()[0]
    batch = (tokens, torch.ones_like(tokens)), targets
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute") as caught:
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepare(world, copy.deepcopy(gpt2()), loss=loss).step(batch))
    (told,) = [note for note in caught.value.__notes__ if "by position" in note]
    assert "calls GPT2LMHeadModel" in told and "(input_ids, past_key_values)" in told and "wrap the model" in told


class WeighedAndDropping(Weighed, Dropping):
    pass


@pytest.mark.parametrize(("kind", "several", "width", "error", "says"), [
    (WeighedAndDropping, True, 16, rl.ConfigError, "has not called"), (Decoder, False, 3, RuntimeError, "normalized_shape")])
def test_an_error_of_ours_or_of_a_stage_that_was_given_one_tensor_says_nothing_of_parameters(kind, several, width, error, says):
    tokens = batches()[0][0]
    given = (tokens, tokens.double()) if several else tokens
    _, stage = layer_pieces(kind(), lambda: given, given)[2]
    with pytest.raises(error, match=says) as caught:
        stage(torch.ones(ROWS, TOKENS, width, dtype=torch.float64))
    assert not getattr(caught.value, "__notes__", []) and stage.arriving is None


def test_a_model_that_lacks_an_argument_when_it_is_tried_is_told_of_the_example():
    with pytest.raises(rl.ConfigError, match=r"missing 1 required positional argument: 'weights'; give .*pipe=rl.Pipe\(example=...\), or"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepare(world, Weighed()))


def test_a_loss_cannot_look_into_a_model_that_is_nowhere():
    for name in ("out", "training", "parameters", "config", "smoothing"):
        with pytest.raises(AttributeError, match=f"asks the model for '{name}', but no rank of a pipeline has the model"):
            asking = functools.partial(lambda model, batch, name: (getattr(model, name), 1), name=name)
            rl.simulate(rl.Mesh(pipe=2), lambda w, asking=asking: prepare(w, loss=asking).step(batches()[0]))


def test_a_loss_may_ask_a_model_in_stages_for_its_config_also_when_that_has_changed():
    asked = []

    def loss_that_asks(model, batch):
        asked.append((model.config.vocab_size, model.config.smoothing))
        return loss_of_a_dict(model, batch)

    def body(world):
        model = Decoder()
        model.config = SimpleNamespace(vocab_size=VOCAB, smoothing=0.0)
        engine, config = prepare(world, model, loss=loss_that_asks), model.config
        config.smoothing = 0.25
        return engine.step(batches()[0]).loss, prepare(world).step(batches()[0]).loss

    for mine, plain in rl.simulate(rl.Mesh(pipe=2), body):
        assert mine == plain
    assert set(asked) == {(VOCAB, 0.25)}


def test_a_batch_that_is_a_dict_is_refused():
    with pytest.raises(rl.BatchError, match="batches of two parts.*this is a dict"):
        rl.simulate(rl.Mesh(pipe=2), lambda w: prepare(w).step(dict(zip(("input_ids", "labels"), batches()[0]))))
