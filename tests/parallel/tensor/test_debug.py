"""In debug mode a plan that is wrong is caught where a tensor is read, on all ranks, and one that is right passes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from rankloom.base.errors import CollectiveMismatch, ConfigError, RankloomError, ShapeMismatch
from rankloom.models.generate import generate
from rankloom.parallel.tensor.moves import PARTIAL, WHOLE, redistribute
from rankloom.parallel.tensor.tags import tag_of

from .test_gpt import make, tokens
from .test_gpt import run as run_gpt
from .test_styles import EXPERTS, Bank, Mixture, NormedHeads, Pair, Tower, run, run_tokens, shaken


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")


class By(Function):
    """x times a factor, its gradient times another."""

    @staticmethod
    def forward(ctx, x, factor, slope):
        ctx.slope = slope
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope, None, None


def outside(x):
    """Through numpy, where torch does not look."""
    return torch.from_numpy(x.detach().numpy().copy())


class Does(nn.Module):
    """A module that does what it is told: forward(module, x). It has a layer, and a weight of its own."""

    def __init__(self, what, width: int = 12):
        super().__init__()
        self.what, self.inner, self.weight = what, nn.Linear(width, width), nn.Parameter(torch.empty(width))

    def forward(self, x):
        return self.what(self, x)


def caught(ranks: int, build, plan: dict[str, str], call, kind: type[RankloomError] = ConfigError) -> str:
    """What all ranks say, each with its own name; build(rank) is the model."""
    said = [""] * ranks

    def body(world):
        model = rl.tensor_parallel(shaken(build(world.rank)), plan, world)
        with pytest.raises(kind) as error:
            call(model)
        said[world.rank] = str(error.value)
        assert torch._C._len_torch_function_stack() == 0, "still watching"

    rl.simulate(ranks, body)
    assert all(text.startswith(f"rank {rank}: ") for rank, text in enumerate(said)), said
    assert len({text.partition(": ")[2] for text in said}) == 1, said
    return said[0].partition(": ")[2]


def backward(model: nn.Module) -> None:
    run_tokens(model)[1].backward()


BY_ROWS = {"embed": "embedding_rowwise"}
BODY = BY_ROWS | {"rest.0": "sequence_parallel", "rest.1": "colwise", "rest.2": "rowwise", "rest.3": "sequence_parallel_rep"}


def stream(*changed: nn.Module, at: int = 0) -> Tower:
    """Split by tokens: a norm, a column, a row, a norm; some layers are others."""
    layers = [nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)]
    layers[at:at + len(changed)] = changed
    return Tower(8, *layers)


# ------------------------------------------------------------------ forward: who reads what


def test_a_column_behind_a_column_is_told_to_gather():
    said = caught(2, lambda rank: Pair(nn.Linear(6, 12), nn.Linear(12, 4)), {"first": "colwise", "second": "colwise"}, run)
    assert said == ("input of second in group 'world': a tensor of shape (3, 4, 6), from tanh in the model, is "
                    "[..., tokens, width/tensor]; expected [..., tokens, width]: end the split features with a rowwise layer, "
                    "or gather them with colwise_rep")


@pytest.mark.parametrize("first", ["colwise_rep", "replicate"])
def test_a_row_behind_a_whole_is_told_to_take_its_part(first):
    said = caught(4, lambda rank: Pair(nn.Linear(6, 12), nn.Linear(12, 4)), {"first": first, "second": "rowwise"}, run)
    assert said.startswith("input of second in group 'world'") and "say rowwise_rep, which takes this rank's features" in said


def test_a_plain_layer_behind_a_column_is_named():
    said = caught(2, lambda rank: Pair(nn.Linear(6, 12), nn.RMSNorm(12)), {"first": "colwise"}, run)
    assert said.startswith("rms_norm in second in group 'world' reads second.weight, which is [...], whole")


def test_split_features_that_the_model_returns_are_named():
    said = caught(2, lambda rank: Pair(nn.Linear(6, 12), nn.Identity()), {"first": "colwise"}, run)
    assert "output of the model" in said and "gather them with colwise_rep" in said


def test_a_sum_that_nobody_adds_up_is_named():
    """The weight of a row-cut layer, used without the layer."""
    class Short(Pair):
        def forward(self, x):
            y = F.linear(torch.tanh(self.first(x)), self.second.weight)
            return self.third(y)

    def build(rank):
        model = Short(nn.Linear(6, 12), nn.Linear(12, 5, bias=False))
        model.third = nn.Linear(5, 4)
        return model

    plan = {"first": "colwise", "second": "rowwise", "third": "colwise"}
    said = caught(2, build, plan, run)
    assert said == ("input of third in group 'world': a tensor of shape (3, 4, 5), from linear in the model, is "
                    "[..., tokens, width] +tensor; expected [..., tokens, width]: each rank has one term of a sum; "
                    "call the rowwise layer itself, which adds them up")


def test_a_head_tied_by_hand_gives_a_part_of_the_logits():
    class Tied(Tower):
        def forward(self, ids):
            return F.linear(self.embed(ids), self.embed.weight)

    assert "reads output of embed, which is" in caught(2, lambda rank: Tied(8), BY_ROWS, backward)
    assert "output of the model" in caught(2, lambda rank: Tied(8).requires_grad_(False), BY_ROWS, run_tokens)


def test_a_whole_that_is_added_to_in_place_is_no_whole_any_more():
    class Adds(Pair):
        def forward(self, x):
            return (x.detach() * 1.0).add_(self.first(x).mean(-1, keepdim=True))

    said = caught(2, lambda rank: Adds(nn.Linear(6, 12), nn.Identity()), {"first": "colwise"}, run)
    assert "from add_ in the model, is [..., tokens, width/tensor]" in said


def test_a_mean_over_split_features_is_no_whole():
    said = caught(2, lambda rank: Pair(nn.Linear(6, 12), Does(lambda m, x: x.mean(-1, keepdim=True))), {"first": "colwise"}, run)
    assert "a tensor of shape (3, 4, 1), from mean in second, is [..., tokens, width/tensor]" in said


def test_a_layer_that_expects_all_tokens_is_told_who_gathers_them():
    plan = {name: word for name, word in BODY.items() if name != "rest.0"}
    said = caught(2, lambda rank: stream(nn.Identity()), plan, backward)
    assert said.startswith("input of rest.1 ") and said.endswith("[..., tokens, width] -tensor: name the norm before it sequence_parallel, "
                                                                   "which gathers the tokens")


def test_attention_to_some_tokens_is_named():
    attend = lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)
    plan = BY_ROWS | {"rest.1": "sequence_parallel_rep"}
    said = caught(2, lambda rank: Tower(8, Does(attend), nn.LayerNorm(12)), plan, backward)
    assert said.startswith("scaled_dot_product_attention in rest.0 in group 'world' attends to this rank's tokens only")


def test_a_norm_before_which_nothing_has_split_the_tokens_is_named():
    model = lambda rank: Tower(8, nn.LayerNorm(12), nn.Sequential(nn.LayerNorm(12)))
    said = caught(2, model, {"rest.0": "sequence_parallel_rep", "rest.1": "sequence_split", "rest.1.0": "sequence_parallel_rep"}, backward)
    assert said.startswith("input of rest.0 ") and "say sequence_split for the first module" in said


@pytest.mark.parametrize(("change", "said"), [
    ({"rest.3": "sequence_parallel"}, "output of the model in group 'world': a tensor of shape (3, 12, 12), from output of rest.3, is "
     "[..., tokens, width] -tensor; expected [..., tokens, width]: split layers were to read it"),
    ({"rest.0": "sequence_parallel_rep"}, "its gradient would not be summed; say sequence_parallel for the norm before it"),
    ({"rest.3": "replicate"}, "layer_norm in rest.3 in group 'world' reads rest.3.weight, which is [...], whole, for a result that is "
     "[..., tokens/tensor, width]: each rank would have one term of its gradient, and nothing would sum them. "
     "In the plan say sequence_parallel for a norm between split tokens"),
])
def test_a_norm_of_the_wrong_kind_is_named_before_anything_is_added_up(change, said):
    assert said in caught(3, lambda rank: stream(), BODY | change, backward)


def test_split_tokens_together_with_split_features_are_refused():
    def both(module, x):
        return x[..., :6, :6] + module.up(x)[..., :6, :6]

    def build(rank):
        does = Does(both)
        does.up = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24))
        return Tower(8, does, nn.LayerNorm(12))

    plan = BY_ROWS | {"rest.0.up.0": "sequence_parallel", "rest.0.up.1": "colwise", "rest.1": "sequence_parallel_rep"}
    said = caught(2, build, plan, backward)
    assert "reads [..., tokens/tensor, width] together with [..., tokens, width/tensor]" in said


def test_a_part_of_the_wrong_width_is_named_where_nothing_is_known_of_it():
    """Torch would speak of matrices that cannot be multiplied."""
    model = lambda rank: Pair(nn.Linear(6, 12), nn.Sequential(Does(lambda m, x: outside(x)), nn.Linear(12, 4)))
    said = caught(2, model, {"first": "colwise", "second.1": "colwise"}, run, ShapeMismatch)
    assert said.startswith("input of second.1 in group 'world': a tensor of shape (3, 4, 6); expected [..., tokens, width], with 12")


# ------------------------------------------------------------------ bits


def apart(rank: int, what) -> Pair:
    return Pair(Does(lambda module, x: what(module, x, 1.0 + (rank == 1)), 6), nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 4)))


PLAN = {"second.0": "colwise", "second.1": "rowwise"}
FORWARD = {
    "a module that knows its rank": (lambda module, x, mine: x * mine, "output of first "),
    "something unseen": (lambda module, x, mine: outside(x) * mine, "input of second.0 "),
    "a function of its own": (lambda module, x, mine: By.apply(x, mine, 1.0), "output of first "),
    "memory that is written again": (lambda module, x, mine: module.inner(x.clone()).mul_(mine), "output of first "),
    "what is drawn anew": (lambda module, x, mine: x + torch.rand_like(x), "output of first "),
    "dropout": (lambda module, x, mine: F.dropout(x), "output of first "),
}


@pytest.mark.parametrize("what", FORWARD)
def test_what_should_be_the_same_on_all_ranks_and_is_not_is_named_where_it_begins(what):
    does, where = FORWARD[what]
    said = caught(3, lambda rank: apart(rank, does), PLAN, run, CollectiveMismatch)
    assert said.startswith(where) and "is laid out as [..., tokens, width], alike on all ranks, but ranks [" in said


def test_an_input_that_differs_is_the_callers():
    def body(world):
        model = rl.tensor_parallel(shaken(Pair(nn.Linear(6, 12), nn.Linear(12, 4))), {"first": "colwise", "second": "rowwise"}, world)
        with pytest.raises(CollectiveMismatch, match=r"input of the model .* ranks \[1\]"):
            model(torch.ones(1, 2, 6).double() * (1 + world.rank))

    rl.simulate(2, body)


def test_a_tensor_that_is_changed_in_place_is_compared_again():
    def build(rank):
        model = Pair(Does(lambda module, x: x + 1.0), nn.Linear(6, 5))
        model.forward = lambda x: model.second(model.first(x.detach()).mul_(1.0 + (rank == 1)))
        return model

    said = caught(2, build, {"second": "colwise_rep"}, run, CollectiveMismatch)
    assert said.startswith("input of second ")


def test_parts_of_different_shapes_are_named():
    def body(world):
        drops = Does(lambda module, x: x[:, :4 - (world.rank == 1)])
        model = shaken(nn.Sequential(nn.Linear(6, 12), drops, nn.Linear(12, 4)))
        rl.tensor_parallel(model, {"0": "colwise", "2": "rowwise"}, world)
        with pytest.raises(CollectiveMismatch, match=r"output of 1 .* of one shape on all ranks, but ranks \[1\] hold another"):
            run(model)

    rl.simulate(3, body)


# ------------------------------------------------------------------ backward


def test_a_gradient_of_a_whole_that_differs_is_named():
    slope = lambda module, x, mine: module.inner(By.apply(module.inner(x), 1.0, mine))
    said = caught(2, lambda rank: apart(rank, slope), PLAN, lambda m: run(m)[1].backward(), CollectiveMismatch)
    assert said.startswith("gradient of the output of first.inner ")


def test_a_gradient_of_a_whole_parameter_that_nobody_sums_is_named():
    """Each rank uses the whole weight for its own features, unseen: the gradient of each is a term."""
    own = lambda module, x, mine: x * By.apply(module.weight, 1.0, mine)
    said = caught(2, lambda rank: apart(rank, own), PLAN, lambda m: run(m)[1].backward(), CollectiveMismatch)
    assert said.startswith("gradient of first.weight in group 'world': a tensor of shape (6,) is laid out as [...], alike on all ranks")


def test_a_gradient_of_a_sum_that_is_owed_is_the_same_on_all_ranks_or_named():
    class Own(Pair):
        def forward(self, x):
            return self.sums(F.linear(torch.tanh(self.first(x)), self.second.weight))

    def build(rank):
        model = Own(nn.Linear(6, 12), nn.Linear(12, 5, bias=False))
        model.sums = Does(lambda m, term: redistribute(By.apply(term, 1.0, 1.0 + rank), PARTIAL, WHOLE, model.second.group, label="hand"))
        return model

    said = caught(2, build, {"first": "colwise", "second": "rowwise"}, lambda m: run(m)[1].backward(), CollectiveMismatch)
    assert said.startswith("gradient of the input of sums") and "is laid out as [..., tokens, width] -tensor, alike on all ranks" in said


def test_a_norm_of_heads_whose_gradient_is_not_summed_is_named():
    plan = {"up": "colwise", "down": "rowwise"}
    said = caught(2, lambda rank: NormedHeads(), plan, run)
    assert said.startswith("rms_norm in norm in group 'world' reads norm.weight")
    assert "replicated_with_grad_allreduce for another module" in said


def test_a_gradient_that_would_be_summed_although_it_is_whole_is_named():
    plan = {"rest.0": "replicated_with_grad_allreduce", "rest.1": "colwise", "rest.2": "rowwise"}
    said = caught(2, lambda rank: stream(), plan, backward)
    assert "layer_norm in rest.0 in group 'world' reads embed in rest.0" in said or "reads embedding in embed" in said
    frozen = lambda rank: shaken(stream()).requires_grad_(False)
    assert "input of rest.1 " in caught(2, frozen, plan, run_tokens)


# ------------------------------------------------------------------ what is right


def test_without_debug_mode_there_is_no_hook(monkeypatch):
    count = lambda model: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    hooks = lambda: rl.simulate(2, lambda world: count(rl.tensor_parallel(make(), None, world)))[0]
    watched = hooks()
    monkeypatch.delenv("RANKLOOM_DEBUG")
    model = rl.simulate(2, lambda world: rl.tensor_parallel(make(), None, world))[0]
    assert watched == count(model) + 2 * len(list(model.modules()))
    assert not [m for m in model.modules() for hook in m._forward_hooks.values() if "_Watch" in repr(hook)]


def test_a_copy_is_watched_too():
    def body(world):
        model = copy.deepcopy(rl.tensor_parallel(make(), None, world))
        run_gpt(model)[1].backward()
        model.blocks[1].mlp_dropout.forward = lambda x: x * (1.0 + world.rank)
        with pytest.raises(CollectiveMismatch, match="output of blocks.1.mlp_dropout"):
            run_gpt(model)
        model.blocks[1].mlp_dropout.forward = lambda x: x
        norm = model.blocks[0].mlp_norm
        norm.forward = lambda x: F.rms_norm(x, norm.normalized_shape, By.apply(norm.weight, 1.0, 1.0 + world.rank))
        with pytest.raises(CollectiveMismatch, match="gradient of blocks.0.mlp_norm.weight"):
            run_gpt(model)[1].backward()

    rl.simulate(2, body)


def test_activations_say_how_they_lie_and_after_an_error_nobody_watches():
    seen = {}

    def body(world):
        model = rl.tensor_parallel(make(layers=1), make().tp_sequence_plan, world)
        for name in ("embedding", "blocks.0.attention_norm", "blocks.0.attention.query", "blocks.0", "norm"):
            keep = lambda module, args, output, name=name: seen.update({name: str(tag_of(output).layout)})
            model.get_submodule(name).register_forward_hook(keep)
        run_gpt(model)
        with pytest.raises(ShapeMismatch):
            model(tokens(40, length=7))
        assert torch._C._len_torch_function_stack() == 0

    rl.simulate(2, body)
    assert seen == {"embedding": "[..., tokens/tensor, width]", "blocks.0.attention_norm": "[..., tokens, width] -tensor",
                    "blocks.0.attention.query": "[..., tokens, width/tensor]", "blocks.0": "[..., tokens/tensor, width]",
                    "norm": "[..., tokens, width] -tensor"}


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_models_that_recompute_or_write_text_pass(plan):
    def body(world):
        model = rl.tensor_parallel(make(layers=1), getattr(make(), plan), world)
        if plan == "tp_plan":
            with torch.inference_mode():
                generate(model, tokens(40, length=4), max_new_tokens=2, temperature=0.8, seed=1)
        plain = model.blocks[0].forward
        model.blocks[0].forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)
        run_gpt(model)[1].backward()

    rl.simulate(2, body)


def test_a_module_that_moves_its_activations_itself_says_how_they_lie():
    class Own(Pair):
        def forward(self, x):
            term = F.linear(torch.tanh(self.first(x)), self.second.weight)
            assert tag_of(term).layout == PARTIAL
            return self.third(redistribute(term, PARTIAL, WHOLE, self.second.group, label="by hand"))

    def build():
        model = Own(nn.Linear(6, 12), nn.Linear(12, 5, bias=False))
        model.third = nn.Linear(5, 4)
        return shaken(model)

    plan = {"first": "colwise", "second": "rowwise", "third": "colwise_rep"}
    assert all(rl.simulate(2, lambda world: tag_of(run(rl.tensor_parallel(build(), plan, world))[1]) is None))   # made outside of the model


@pytest.mark.parametrize(("forward", "said"), [
    (lambda m, x: m.add_up(m.second(torch.tanh(m.first(x)))), "by hand in group 'world': a tensor of shape (3, 4, 6), from output of "
     "second, is [..., tokens, width], whole on each rank, so its sum over them would be 2 times as large. Was it added up before?"),
    (lambda m, x: m.add_up(F.linear(torch.tanh(m.first(x)), m.second.weight, m.second.bias)), "linear in the model in group 'world' adds "
     "second.bias, which is [...], whole, to one term of a sum over the ranks, which would have it 2 times: add it behind the sum"),
    (lambda m, x: m.add_up(x + F.linear(torch.tanh(m.first(x)), m.second.weight)), "add in the model in group 'world' adds the caller, "
     "which is [..., tokens, width], whole, to one term of a sum over the ranks, which would have it 2 times: add it behind the sum"),
])
def test_what_a_module_that_moves_its_activations_itself_would_add_up_p_times_is_named(forward, said):
    class Own(Pair):
        def add_up(self, term):
            return redistribute(term, PARTIAL, WHOLE, self.second.group, label="by hand")

        def forward(self, x):
            return forward(self, x)

    assert caught(2, lambda rank: Own(nn.Linear(6, 12), nn.Linear(12, 6)), {"first": "colwise", "second": "rowwise"}, run) == said


class Kernel(Function):
    """Writes into memory of its own, so that nobody sees where the result comes from."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out[...] = x
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient


RIGHT = {   # what a model with split features may do between a column and a row; m.weight is whole, and learns
    "the dtype of another": lambda m, x, y: y.type_as(m.weight),
    "zeros beside a whole": lambda m, x, y: y + 0.0 * (torch.zeros_like(y[..., :6]) + y.new_zeros(6) + x).detach().sum(),
    "part of a parameter": lambda m, x, y: y + m.first.bias.detach(),
    "a kernel": lambda m, x, y: Kernel.apply(y) * m.weight.detach()[:1],
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_not_refused(what):
    class Middle(Pair):
        def __init__(self):
            super().__init__(nn.Linear(6, 12), nn.Linear(12, 5))
            self.weight, self.middle = nn.Parameter(torch.ones(12)), nn.Identity()

        def forward(self, x):
            return self.second(self.middle(RIGHT[what](self, x, self.first(x))))

    rl.simulate(2, lambda world: run(rl.tensor_parallel(shaken(Middle()), {"first": "colwise", "second": "rowwise"}, world)))


class OneByOne(Bank):
    """As the experts of `transformers` are: each takes its matrices out of the bank, and what is between is a module's."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x, weights):
        total = torch.zeros_like(x)
        for expert, down in enumerate(self.down):
            gate, up = F.linear(x, self.gate_up[expert]).split(self.intermediate_dim, dim=-1)
            total.index_add_(0, torch.arange(len(x)), F.linear(self.act(gate) * up, down) * weights[:, expert, None])
        return total


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_experts_pass_with_gradients_and_without(mode):
    def body(world):
        model = Mixture()
        model.experts = OneByOne()
        with mode():
            rl.tensor_parallel(shaken(model), EXPERTS, world)(torch.ones(1, 2, 6).double())

    rl.simulate(2, body)


def test_a_norm_of_heads_passes_where_its_gradient_is_summed_or_not_wanted():
    def body(world):
        plan = {"up": "colwise", "down": "rowwise"}
        run(rl.tensor_parallel(shaken(NormedHeads()), plan | {"norm": "replicated_with_grad_allreduce"}, world))[1].backward()
        with torch.no_grad():
            rl.tensor_parallel(shaken(NormedHeads()), plan, world)(torch.ones(1, 2, 6).double())

    rl.simulate(2, body)


def test_every_step_is_checked_once():
    def body(world):
        model, sent = rl.tensor_parallel(make(layers=1), None, world), []
        for _ in range(3):
            before = world.ledger.messages
            run_gpt(model)[1].backward()
            sent.append(world.ledger.messages - before)
        assert sent[0] == sent[1] == sent[2]

    rl.simulate(2, body)


def test_a_stream_that_is_split_in_the_middle_with_dropout_between_passes():
    def body(world):
        layers = nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12))
        plan = {"embed": "embedding_colwise", "rest": "sequence_split", "rest.0": "sequence_dropout", "rest.1": "sequence_parallel",
                "rest.2": "colwise", "rest.3": "rowwise", "rest.4": "sequence_parallel_rep"}
        backward(rl.tensor_parallel(shaken(Tower(8, *layers)), plan, world))

    rl.simulate(2, body)
