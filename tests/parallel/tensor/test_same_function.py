"""A block that a plan makes another function is told of before its first call over tensor ranks, whatever its parameters are."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from rankloom.parallel.tensor.moves import PARTIAL, WHOLE, redistribute
from rankloom.parallel.tensor.same_function import AT_MOST, keep_whole, without_memory
from seeded import seeded

WIDTH, HEADS, TOKENS = 16, 4, 6
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    """Right: between the two layers, each feature is looked at by itself. Its output layer may begin at zero, and hide what is wrong."""

    def __init__(self, *, hidden=32, closed=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        if closed:
            nn.init.zeros_(self.down.weight)

    def inside(self, x):
        return F.gelu(x)

    def forward(self, x, *, cache=None):
        if cache is not None:
            cache.append(len(cache))
            assert cache == [0], "it was called before with this cache"
        return x + self.down(self.inside(self.up(self.norm(x))))


class Softmax(Block):
    def inside(self, x):
        return x.softmax(-1)


class Centered(Block):
    def inside(self, x):
        return x - x.mean(-1, keepdim=True)


class Normed(Block):
    def inside(self, x):
        return F.layer_norm(x, x.shape[-1:])


class AddsTwice(Block):
    """A bias of its own, behind the sum, is right; one before it is added by every rank."""

    def __init__(self, **options):
        super().__init__(**options)
        self.more = nn.Parameter(torch.zeros(()))

    def inside(self, x):
        return super().inside(x) + self.more * x.sum(-1, keepdim=True)


class FusedKeysAndValues(nn.Module):
    """Queries of their own, but keys and values in one matrix, end to end."""

    def __init__(self, **_options):
        super().__init__()
        self.num_heads = HEADS
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def parts(self, x):
        return self.q(x), *self.kv(x).chunk(2, -1)

    def forward(self, x):
        query, key, value = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in self.parts(x))
        return x + self.o(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class FusedEndToEnd(FusedKeysAndValues):
    """All in one matrix, end to end; of a module that has the width of a head `colwise` takes them for lying side by side."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head_dim, self.qkv = WIDTH // HEADS, nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.kv

    def parts(self, x):
        return self.qkv(x).chunk(3, -1)


class CallsWhatIsInside(nn.Module):
    """Its layers are dicts, which are never called. It has its heads under a name that nothing knows."""

    @seeded(3)
    def __init__(self):
        super().__init__()
        self.h, self.layers = HEADS, nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            query, key, value = (layer[name](x).unflatten(-1, (self.h, -1)).transpose(1, 2) for name in ("q", "k", "v"))
            x = x + layer["o"](F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x


class Model(nn.Module):
    @seeded(3)
    def __init__(self, kind=Block, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(kind(**options) for _ in range(layers))

    def forward(self, x, **options):
        for layer in self.layers:
            x = layer(x, **options)
        return x


def rows(dtype=torch.float32):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def call(model, plan=PLAN, ranks=2, **options):
    """The model's output over tensor ranks, in its first call."""
    copies, x = [copy.deepcopy((model, options)) for _ in range(ranks)], rows(next(model.parameters()).dtype)
    cut = lambda world: rl.tensor_parallel(copies[world.rank][0], plan, world)
    return rl.simulate(ranks, lambda world: cut(world)(x, **copies[world.rank][1]).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", [Softmax, Centered, Normed, AddsTwice])
def test_features_that_are_looked_at_together_are_an_error_though_they_are_cut(kind, closed, dtype):
    model = Model(kind, closed=closed).to(dtype)
    with pytest.raises(rl.ConfigError, match=rf"layers.0, a {kind.__name__}, is another function .* the first behind down\. Does the plan"):
        call(model)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "plan"), [
    (FusedKeysAndValues, {"layers.*.q": "colwise", "layers.*.kv": "colwise", "layers.*.o": "rowwise"}),
    (FusedEndToEnd, {"layers.*.qkv": "colwise", "layers.*.o": "rowwise"})])
def test_matrices_that_are_fused_and_cut_as_one_are_an_error(kind, plan, layers):
    model = Model(kind, layers)
    with pytest.raises(rl.ConfigError, match=f"{'layers.0, a' if layers > 1 else 'the model, a'}.*, is another function"):
        call(model, plan)


class Sloped(Block):
    """An activation with a slope that it learns, alike on all ranks, between the two layers."""

    def __init__(self, frozen=False):
        super().__init__()
        self.slope = nn.PReLU().requires_grad_(not frozen)

    def inside(self, x):
        return self.slope(x)


def test_whole_parameters_that_are_used_for_cut_features_are_an_error_in_a_loop_of_one_s_own_too():
    with pytest.raises(rl.ConfigError, match=r"layers\.0, a Sloped, .* slope\.weight is whole on every rank, and slope uses it for a part "
                                             r"of the features, so each would have one term .* say replicated_with_grad_allreduce"):
        call(Model(Sloped))
    for model, more in ((Model(Sloped), {"layers.*.slope": "replicated_with_grad_allreduce"}), (Model(Sloped, frozen=True), {})):
        truth = copy.deepcopy(model)(rows())
        for found in call(model, PLAN | more):
            torch.testing.assert_close(found, truth)


def test_of_blocks_that_are_never_called_the_whole_model_is_looked_at():
    plan = {f"layers.*.{name}": "colwise" for name in "qkv"} | {"layers.*.o": "rowwise"}
    with pytest.raises(rl.ConfigError, match=r"the model, a CallsWhatIsInside, is another function .* the first behind layers.0.o\."):
        call(CallsWhatIsInside(), plan)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_rounding_leaves_is_no_difference(ranks, layers, dtype):
    model = Model(layers=layers).to(dtype)
    truth = model(rows(dtype))
    for found in call(model, ranks=ranks):
        torch.testing.assert_close(found, truth.detach(), rtol=0.02, atol=0.02 if dtype.itemsize == 2 else 1e-5)


class Leaky(Block):
    """Looks at features together, but they add little: 0.5 % of what the block adds."""

    def inside(self, x):
        return F.gelu(x) / (1 + 0.001 * x.norm(dim=-1, keepdim=True))


class OfAllWeights(Block):
    """Divides by a norm of the whole matrix, of which each rank has a part."""

    def inside(self, x):
        return F.gelu(x) * (1 + 0.002 * self.up.weight.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [Leaky, OfAllWeights])
def test_a_difference_far_above_rounding_is_told_of_though_it_is_less_than_two_percent(kind, dtype):
    with pytest.raises(rl.ConfigError, match=f"layers.0, a {kind.__name__}, is another function"):
        call(Model(kind).to(dtype))


class RoundsInside(Block):
    """Computes in a coarser dtype than it is given, as an attention or a norm may."""

    def __init__(self, coarse=torch.bfloat16, autocast=False, **options):
        super().__init__(**options)
        self.coarse, self.autocast = coarse, autocast

    def inside(self, x):
        with torch.autocast("cpu", dtype=self.coarse, enabled=self.autocast):
            return self.down(F.gelu(x.to(self.coarse)).to(x.dtype)).to(x.dtype)

    def forward(self, x):
        return x + self.inside(self.up(self.norm(x)))


@pytest.mark.parametrize(("dtype", "coarse", "autocast"), [
    (torch.float64, torch.float32, False), (torch.float64, torch.bfloat16, False), (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.float16, False), (torch.float32, torch.bfloat16, True)])
def test_a_block_that_computes_in_a_coarser_dtype_inside_may_round_as_that_does(dtype, coarse, autocast):
    assert len(call(Model(RoundsInside, coarse=coarse, autocast=autocast).to(dtype), ranks=4)) == 4


class Chaotic(Block):
    """Right, and so steep that it makes one rounding a million of them."""

    def forward(self, x):
        for _ in range(8):
            x = torch.sin(12 * self.down(torch.sin(4 * self.up(x))))
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_block_that_magnifies_rounding_is_not_taken_for_another_function(dtype):
    assert len(call(Model(Chaotic).to(dtype))) == 2


class MovesByHand(Block):
    """Multiplies by its row-cut matrix, and adds up the terms, itself."""

    group = None

    def forward(self, x):
        term = F.linear(F.gelu(self.up(self.norm(x))), self.down.weight)
        return x + (term if self.group is None else redistribute(term, PARTIAL, WHOLE, self.group, label="by hand"))


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_block_that_moves_its_activations_itself_is_not_judged(debug, monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", debug)

    def body(world):
        model = copy.deepcopy(plain)
        for layer in model.layers:
            layer.group = world
        return rl.tensor_parallel(model, PLAN, world)(rows()).detach()

    plain = Model(MovesByHand)
    for found in rl.simulate(2, body):
        torch.testing.assert_close(found, plain(rows()).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Softmax, Centered])
def test_debug_mode_finds_no_less_than_the_look_before_the_first_call(kind, monkeypatch):
    """What is wrong inside features that are cut has a right layout all the same."""
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")
    with pytest.raises(rl.ConfigError, match=rf"layers.0, a {kind.__name__}, is another function .* the first behind down\. Does the plan"):
        call(Model(kind))


def test_in_debug_mode_a_block_is_looked_at_once_too_and_no_hook_of_it_is_left(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")

    def body(world):
        model = rl.tensor_parallel(copy.deepcopy(plain), PLAN, world)
        x = rows().requires_grad_()
        outputs = [model(x) for _ in range(2)]
        outputs[-1].sum().backward()
        looks = [hook for layer in model.layers for hook in layer._forward_hooks.values() if type(hook).__name__ == "_Look"]
        return torch.equal(*outputs), x.grad is not None, looks

    plain = Model()
    assert rl.simulate(2, body) == [(True, True, [])] * 2


class KnowsItsWidth(Block):
    """Cuts what may be a rank's part by the width of the whole, as nanoGPT does."""

    def forward(self, x, **options):
        first, second = self.up(x).split(WIDTH, dim=-1)
        return x + self.down(torch.cat((first, second), -1))


def test_a_size_of_the_whole_where_a_rank_has_a_part_is_explained():
    model = Model(KnowsItsWidth)
    assert model(rows()).shape == rows().shape, "which is right in one process"
    with pytest.raises(rl.ConfigError, match=r"layers.0, a KnowsItsWidth, .*: it raises ValueError: not enough .* `self.n_embd`"):
        call(model)


class Rotates(Block):
    """It gets a number for each position, as attention gets angles, and reads whole rows behind its norm."""

    def forward(self, x, *, angles):
        return x + self.down(self.inside(self.up(self.norm(x)) * angles))


class FromWhatIsHere(nn.Module):
    """It makes them for as many tokens as come out of its embedding."""

    @seeded(3)
    def __init__(self, kind=Rotates):
        super().__init__()
        self.embed, self.layers, self.norm = nn.Embedding(5, WIDTH), nn.ModuleList(kind() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        angles = torch.arange(x.shape[1]).unsqueeze(-1) + 1.0
        for layer in self.layers:
            x = layer(x, angles=angles)
        return self.norm(x)


BY_TOKENS = PLAN | {"embed": "embedding_rowwise", "layers.*.norm": "sequence_parallel", "norm": "sequence_parallel_rep"}


def test_positions_made_from_tokens_that_are_cut_already_are_explained():
    tokens, model = torch.arange(8).view(1, 8) % 5, FromWhatIsHere()
    split = lambda world, plan: rl.tensor_parallel(copy.deepcopy(model), plan, world)(tokens)
    with pytest.raises(rl.ConfigError, match=r"layers.0, a Rotates, .*: it raises RuntimeError: .* say sequence_split for the first block"):
        rl.simulate(2, lambda world: split(world, BY_TOKENS))
    for whole in rl.simulate(2, lambda world: split(world, BY_TOKENS | {"layers.0": "sequence_split"}).detach()):
        torch.testing.assert_close(whole, model(tokens).detach())


def test_a_block_that_uses_something_of_a_rank_s_own_tokens_is_not_judged():
    class Scales(Rotates):
        def forward(self, x, *, angles):
            return x + self.down(self.inside(self.up(self.norm(x)))) * angles   # behind the sum each rank has its own tokens

    (one, two) = rl.simulate(2, lambda world: rl.tensor_parallel(FromWhatIsHere(Scales), BY_TOKENS, world)(torch.zeros(1, 8).long()).shape)
    assert one == two == (1, 8, WIDTH)


def test_cut_features_that_no_rowwise_layer_takes_are_explained():
    with pytest.raises(rl.ConfigError, match=r"a Block, .*: it raises RuntimeError: .* without a rowwise layer .* packed_qkv_colwise"):
        call(Model(Block), {"layers.*.up": "colwise"})


class RefusesEvaluation(Block):
    def forward(self, x, **options):
        if self.up.out_features < 32 and not self.training:
            raise NotImplementedError("evaluation is not written yet")
        return super().forward(x, **options)


def test_an_error_of_another_kind_is_left_to_the_call_itself():
    model = Model(RefusesEvaluation)
    truth = model(rows())
    for found in call(model):   # the copies that are looked at are in evaluation mode
        torch.testing.assert_close(found, truth.detach(), rtol=1e-5, atol=1e-5)


SEQUENCE = PLAN | {"layers.0": "sequence_split", "layers.*.norm": "sequence_parallel", "norm": "sequence_parallel_rep"}


class WithNorm(Model):
    """A norm behind the layers, which gathers the tokens that a plan has cut."""

    def __init__(self, kind=Block):
        super().__init__(kind)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, **options):
        return self.norm(super().forward(x, **options))


def test_blocks_of_which_each_rank_has_some_tokens_are_looked_at_too():
    right, wrong = WithNorm(), WithNorm(Softmax)
    truth = right(rows())
    for found in call(right, SEQUENCE):
        torch.testing.assert_close(found, truth.detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(rl.ConfigError, match="layers.0, a Softmax, is another function"):
        call(wrong, SEQUENCE)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_an_engine_tells_in_its_first_step(stage, precision, recompute):
    wrong, right = Model(Softmax, closed=True), Model()
    loss = lambda model, batch: (model(batch).square().sum(), len(batch))

    def body(world):
        prepared = lambda model: rl.prepare(copy.deepcopy(model), loss=loss, optimizer=torch.optim.AdamW, world=world, stage=stage,
                                            precision=precision, recompute=recompute, tensor_plan=PLAN)
        engine = prepared(right)
        losses = [engine.step(rows()).loss for _ in range(2)]
        with pytest.raises(rl.ConfigError, match="a Softmax, is another function"):
            prepared(wrong).step(rows())
        return losses

    found = rl.simulate(rl.Mesh(shard=2, tensor=2), body)
    assert all(losses[1] < losses[0] for losses in found)


def test_the_first_call_leaves_no_trace():
    """Hooks, generators, gradients, arguments and the ledger are as if it had not been looked."""
    models = [Model() for _ in range(2)]

    def body(world):
        model = rl.tensor_parallel(models[world.rank], PLAN, world)
        seen, said = [], []
        model.layers[0].down.register_forward_hook(lambda module, args, y: seen.append((module is model.layers[0].down, module.training)))
        for _ in range(2):
            before = copy.copy(world.ledger)
            model(rows(), cache=None).sum().backward()
            said.append((world.ledger.bytes - before.bytes, world.ledger.calls - before.calls))
        model.layers[0](rows(), cache=[])
        assert not any(module._forward_pre_hooks for module in model.layers.children())
        return seen[-3:], said

    state = torch.get_rng_state()
    for seen, said in rl.simulate(2, body):
        assert seen == [(True, True)] * 3 and said[0] == said[1] and said[0][1] == 4
    assert torch.equal(torch.get_rng_state(), state)


class Counts(Block):
    """Counts its calls, and divides by a running mean, as a block of buffers that change in evaluation mode, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("size", torch.ones(()))

    def inside(self, x):
        self.calls += 1
        return F.gelu(x) / self.size.mul_(0.5)


def test_buffers_that_a_forward_changes_are_changed_by_the_calls_of_the_model_alone():
    models = [Model(Counts) for _ in range(2)]

    def body(world):
        model = rl.tensor_parallel(models[world.rank], PLAN, world)
        model(rows())
        return [(layer.calls.item(), layer.size.item()) for layer in model.layers]

    assert rl.simulate(2, body) == [[(1.0, 0.5)] * 2] * 2


def test_a_cache_that_is_passed_is_not_written_to():
    assert len(call(Model(layers=1), cache=[])) == 2


class Unusual(Block):
    """What cannot be looked at: a handle that cannot be copied, or a type that is compared with."""

    def __init__(self, what):
        super().__init__()
        if what == "uncopied":
            self.lock = threading.Lock()
        self.what = what

    def inside(self, x):
        assert self.what != "asserts" or self.norm.weight.eq(1).all(), "the parameters are not those of the model"
        return x.softmax(-1)


@pytest.mark.parametrize("what", ["uncopied", "asserts"])
def test_a_block_that_cannot_be_copied_or_called_with_other_parameters_is_not_judged(what):
    models = [Model(Unusual, what=what) for _ in range(2)]

    def body(world):
        mine = rl.tensor_parallel(models[world.rank], PLAN, world)
        for _ in range(4):
            mine(rows())
        return [len(layer._forward_pre_hooks) for layer in mine.layers]

    assert rl.simulate(2, body) == [[0, 0]] * 2, "a hook that tries again and again"


def test_a_copy_of_a_block_that_cannot_be_looked_at_is_left_in_peace_after_the_tries_of_both():
    models = [Model(Unusual, what="asserts") for _ in range(2)]

    def body(world):
        mine = rl.tensor_parallel(models[world.rank], PLAN, world)
        average, left = copy.deepcopy(mine), []
        for model in (mine, average):
            for _ in range(4):
                model(rows())
            left.append([len(layer._forward_pre_hooks) for layer in model.layers])
        return left

    assert rl.simulate(2, body) == [[[0, 0], [0, 0]]] * 2


class Wrapped(Block):
    """Its first argument is no tensor, but has one inside; or there is none at all."""

    def forward(self, x=None, *, state=None):
        (state,) = state if x is None else x
        return (super().forward(rows() if state is None else state),)


@pytest.mark.parametrize("given", [lambda: ((rows(),), {}), lambda: ((), {"state": (rows(),)}), lambda: ((), {"state": (None,)})])
def test_a_block_whose_first_argument_is_no_tensor_is_called_as_ever(given):
    args, kwargs = given()
    blocks = [Model(Wrapped).layers[0] for _ in range(2)]
    (truth,) = blocks[0](*((args,) if args else ()), **kwargs)
    cut = lambda world: rl.tensor_parallel(blocks[world.rank], {"up": "colwise", "down": "rowwise"}, world)
    for (found,) in rl.simulate(2, lambda world: cut(world)(*((args,) if args else ()), **kwargs)):
        torch.testing.assert_close(found, truth)


def test_ranks_that_bring_other_arguments_are_not_judged():
    """That is another mistake, which the engine tells of by itself."""
    models = [Model() for _ in range(2)]
    rl.simulate(2, lambda world: rl.tensor_parallel(models[world.rank], PLAN, world)(rows().roll(world.rank, 0)))


class Drops(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def inside(self, x):
        return self.drop(super().inside(x))


def test_dropout_does_not_count_as_a_difference_and_no_mode_sees_the_look():
    """Such as one that counts the operations of a step, or saves them for a recomputation."""
    class Counts(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    models = [Model(Drops) for _ in range(2)]

    def body(world):
        model, counted = rl.tensor_parallel(models[world.rank], PLAN, world), []
        for _ in range(2):
            with Counts() as mode:
                model(rows())
            counted.append(mode.calls)
        return counted

    for first, second in rl.simulate(2, body):
        assert first == second > 0


def test_one_block_of_each_kind_is_kept_without_memory():
    model = Model(layers=3)
    model.layers.append(Block(hidden=64))
    words = {f"layers.{n}.{name}": word for n in range(4) for name, word in (("up", "colwise"), ("down", "rowwise"))}
    kept = keep_whole(model, words)
    assert list(kept) == ["layers.0", "layers.3"]
    assert all(x.is_meta for block in kept.values() for x in block.parameters())
    assert keep_whole(model, {name: word for name, word in words.items() if "layers.2" in name}).keys() == {"layers.2"}


@pytest.mark.parametrize(("block", "kept"), [
    (lambda: nn.Linear(2, 2), True), (lambda: nn.Linear(AT_MOST, 2, device="meta"), False),
    (lambda: nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)]), False)])
def test_what_is_too_large_or_no_number_is_not_kept(block, kept):
    assert (without_memory(block()) is not None) is kept
