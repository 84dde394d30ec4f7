"""torch.compile per block: one graph for all blocks, nothing of what is around a block inside it, and the same bits.

The backend is "aot_eager": all of the compiler but its code generation, so the numbers must not change at all.
"""

import copy
import logging
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from gradients import expect_equal, gradients
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train.blocks.activation_offload import offload_activations
from rankloom.train.blocks.compiled import compile_blocks, is_compiled
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.recompute import recompute

LAYERS = 10     # more than the eight graphs of one function that torch allows


@pytest.fixture(autouse=True)
def _forget_graphs():
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(seed=0, length=16):
    ids = torch.randint(0, 37, (2, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def counting_backend():
    from torch._dynamo.testing import CompileCounterWithBackend  # only here: every worker reads this file, and one runs it

    return CompileCounterWithBackend("aot_eager")


def prepared(policy="none", compile=True, offload=False, dropout=0.2, layers=LAYERS):
    config = GPTConfig(vocab_size=37, seq_len=16, width=16, layers=layers, heads=2, kv_heads=1, ffn=48, dropout=dropout)
    model, key, counter = GPT(config), DropoutKey(5), counting_backend()
    key_dropout(model, key)
    found = recompute(model, policy)
    if offload:
        offload_activations(model, small=1024)
    if compile:
        compile_blocks(model, backend=counter)
    return model, key, counter, found


def train(model, key):
    """Two steps of two micro-batches in flight."""
    for step in range(2):
        losses = []
        for micro in range(2):
            key.set_rows(step, range(micro, micro + 1))
            losses.append(language_model_loss(model, tokens(micro))[0])
        for loss in losses:
            loss.backward()
    return gradients(model)


@pytest.fixture(scope="module")
def reference():
    model, key, _, _ = prepared(compile=False)
    return train(model, key)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_all_blocks_share_one_graph_and_the_bits_stay(policy, offload, reference):
    model, key, counter, _ = prepared(policy, offload=offload)
    expect_equal(train(model, key), reference)
    assert counter.frame_count == 1, "one graph for all blocks, so none was broken in two"


def test_a_mixture_that_fits_so_many_bytes_is_compiled_too(reference):
    model, key, counter, found = prepared("500 KiB")
    expect_equal(train(model, key), reference)
    assert {d.choice for d in found.plan.decisions} == {"none", "selective", "full"}
    assert counter.frame_count == 2, "the block alone, and with selective around it"


def test_hooks_on_a_block_stay_outside_its_graph():
    model, key, counter, _ = prepared("full", layers=3)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
        block.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    train(model, key)
    assert seen == [False] * (2 * 3 * 4) and counter.frame_count == 1


def saved_bytes(policy):
    """What autograd is given to hold for the blocks of a compiled model, and for its loss."""
    model, _, _, _ = prepared(policy, layers=3)
    language_model_loss(model, tokens())[0].backward()   # compiles
    saved = {}
    stay = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage()._cdata, t), lambda t: t):
        language_model_loss(model, tokens())
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in stay)


def test_compiled_blocks_keep_less_with_each_policy():
    assert saved_bytes("full") < saved_bytes("selective") < saved_bytes("none")


def test_a_forward_that_is_given_an_argument_by_name_keeps_it():
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)))
    for block in model:
        block.forward = partial(block.forward, is_causal=True, src_mask=torch.triu(torch.full((5, 5), -torch.inf), 1))
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    compile_blocks(model, backend="eager")
    assert torch.equal(model(x), expected)


def test_evaluation_runs_the_plain_forward_in_any_shape():
    model, _, counter, _ = prepared("full")
    plain = prepared(compile=False)[0]
    for length in (3, 5, 16):
        with torch.no_grad():
            ids = tokens(length=length)[0]
            assert torch.equal(model.eval()(ids), plain.eval()(ids))
    assert counter.frame_count == 0


def test_a_copy_of_a_compiled_model_calls_itself_and_draws_with_its_own_key(reference):
    model, key, _, _ = prepared("selective")
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.fill_(float("nan"))
    key.set_rows(9, range(9, 10))
    expect_equal(train(twin, twin.embedding_dropout.key), reference)


def test_a_block_that_does_not_fit_in_one_graph_is_told_with_selective_and_broken_without():
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            torch._dynamo.graph_break()
            return self.linear(x)

    for policy in ("none", "full", "selective"):
        torch._dynamo.reset()
        model = nn.ModuleList([nn.Sequential(Breaking()), nn.Sequential(Breaking())])
        recompute(model, policy, blocks=(Breaking,))
        compile_blocks(model, blocks=(Breaking,), backend="eager")
        x = torch.ones(2, 4, requires_grad=True)
        if policy == "selective":
            with pytest.raises(torch._dynamo.exc.Unsupported) as told:
                model[0](x)
            assert "the forward of a Breaking in one graph" in told.value.__notes__[-1] and 'recompute="full"' in told.value.__notes__[-1]
        else:
            model[0](x).sum().backward()
            torch.testing.assert_close(x.grad, model[0][0].linear.weight.sum(0).expand(2, 4), rtol=0, atol=0)


def test_compile_is_put_on_last_and_once():
    model = prepared(layers=2)[0]
    assert is_compiled(model) and not is_compiled(prepared(compile=False, layers=2)[0])
    for put_on in (compile_blocks, offload_activations, lambda model: recompute(model, "full")):
        with pytest.raises(rl.ConfigError, match="a Block has CompiledForward already.*then compile_blocks, each once"):
            put_on(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("wrap", ["the model", "its blocks"])
def test_a_model_that_torch_compile_has_wrapped_trains_under_its_plain_names(wrap, stage):
    def trained(world, wrapped):
        model, counter = GPT(GPTConfig(vocab_size=37, seq_len=16, width=16, layers=2, heads=2, kv_heads=1, ffn=48)), counting_backend()
        names = list(model.state_dict())
        if wrapped and wrap == "the model":
            model = torch.compile(model, backend=counter)
        elif wrapped:
            model.blocks = nn.ModuleList(torch.compile(block, backend=counter) for block in model.blocks)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=torch.optim.AdamW, world=world, stage=stage)
        losses = [engine.step(tokens(step)).loss for step in range(2)]
        state = engine.full_state_dict()
        assert list(state["model"]) == names and state["optimizer"]["state"].keys() <= set(names)
        return losses, state["model"], counter.frame_count

    (plain, weights, _), = rl.simulate(1, lambda world: trained(world, False))
    (losses, mine, graphs), = rl.simulate(1, lambda world: trained(world, True))
    assert losses == plain and graphs and all(torch.equal(mine[name], value) for name, value in weights.items())


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + torch.tanh(self.linear(x) - self.mean) * self.mean


@pytest.mark.parametrize("policy", ["none", "full", "selective", "1 KiB"])
def test_a_compiled_block_that_changes_a_buffer_trains_as_it_is_or_is_refused_by_name(policy):
    def run(compile):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Averaging() for _ in range(3)).double()
        recompute(blocks, policy)
        if compile:
            compile_blocks(blocks, backend="aot_eager")
        for seed in range(2):
            x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            for block in blocks:
                x = block(x)
            x.sum().backward()
        return {**gradients(blocks), **{name: buffer.clone() for name, buffer in blocks.named_buffers()}}

    if policy == "selective":
        with pytest.raises(ConfigError, match='a Averaging changes its buffer mean.*recompute="full"'):
            run(True)
    else:
        expect_equal(run(True), run(False), tolerance=1e-15)


def test_a_module_that_compiles_itself_makes_the_model_a_compiled_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not is_compiled(model)
    model[1].compile()
    assert is_compiled(model)
