"""Every word of a plan, on small modules: what it cuts is the plain module, value and gradient; what it cannot cut it says."""

import copy
import functools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError, ModelMismatch
from rankloom.parallel.tensor import styles
from rankloom.parallel.tensor.holding import holdings
from split_model import Conv1D, expect_equals_plain

RANKS = [1, 2, 3, 4]


def shaken(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draw))
    return model.double()


class Pair(nn.Module):
    """Two layers with something elementwise between."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Gated(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.gate_up, self.down = nn.Linear(6, 48, bias=bias), nn.Linear(24, 6, bias=bias)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Fused(nn.Module):
    """Attention with queries, keys and values in one matrix, grouped; it reads sizes off what comes, and the counts off itself."""

    def __init__(self, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = 2, heads, kv_heads
        self.qkv, self.out = nn.Linear(6, (heads + 2 * kv_heads) * 2), nn.Linear(heads * 2, 6, bias=False)

    def forward(self, x):
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class InOneModule(nn.Module):
    """Attention and MLP, their layers side by side; the MLP's are wider than the queries, and no multiple of a head."""

    def __init__(self, attribute: str, fused: bool, ffn: int, wide: str = "up"):
        super().__init__()
        self.attribute, self.fused, self.wide = attribute, fused, wide
        setattr(self, attribute, 4 if "heads" in attribute else 3)
        if fused:
            self.qkv = nn.Linear(6, 36, bias=False)   # a bias of keys has a gradient of nothing but rounding
        else:
            self.q, self.k, self.v = (nn.Linear(6, 12, bias=False) for _ in "qkv")
        self.o, self.gate, self.down = nn.Linear(12, 6), nn.Linear(6, ffn), nn.Linear(ffn, 6)
        setattr(self, wide, nn.Linear(6, ffn))

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        shape = (getattr(self, self.attribute), -1) if "heads" in self.attribute else (-1, getattr(self, self.attribute))
        mixed = F.scaled_dot_product_attention(*(part.unflatten(-1, shape).transpose(1, 2) for part in parts), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * getattr(self, self.wide)(x))


class Grouped(nn.Module):
    """Attention in three matrices, which knows how many heads it has by the names that it is given."""

    def __init__(self, **counts):
        super().__init__()
        vars(self).update(counts)
        self.names = list(counts)
        # keys without a bias: its gradient is zero, and the rest are roundings
        self.q, self.k, self.v, self.out = nn.Linear(6, 24), nn.Linear(6, 12, bias=False), nn.Linear(6, 12), nn.Linear(24, 6)

    def forward(self, x):
        heads, kv_heads = (getattr(self, name) for name in self.names)
        q, k, v = (f(x).unflatten(-1, (n, -1)).transpose(1, 2) for f, n in ((self.q, heads), (self.k, kv_heads), (self.v, kv_heads)))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


class Bank(nn.Module):
    """Experts side by side, each token through all of them, weighted; it knows how wide they are."""

    def __init__(self):
        super().__init__()
        self.intermediate_dim = 12
        self.gate_up, self.down = nn.Parameter(torch.empty(3, 24, 6)), nn.Parameter(torch.empty(3, 6, 12))

    def forward(self, x, weights):
        gate, up = torch.einsum("ni,eoi->neo", x, self.gate_up).split(self.intermediate_dim, dim=-1)
        return torch.einsum("nei,eoi,ne->no", F.silu(gate) * up, self.down, weights)


class BankAndIdentity(Bank):
    """The same, and one more that returns its input, as LongCat's do."""

    def __init__(self):
        super().__init__()
        self.identity = nn.Identity()

    def forward(self, x, weights):
        return super().forward(x, weights[:, :3]) + self.identity(x) * weights[:, 3:]


class Mixture(nn.Module):
    """A router that all ranks have, and experts of which each has a part."""

    def __init__(self, identity: bool = False):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4 if identity else 3), BankAndIdentity() if identity else Bank()

    def forward(self, x):
        flat = x.flatten(0, 1)
        return x + self.experts(flat, weights=self.router(flat).softmax(-1)).view_as(x)


class NormedHeads(nn.Module):
    """Each head is normed by one weight that all heads share, so that ranks use it for different heads."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 24), nn.RMSNorm(2), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))


class Scaled(nn.Embedding):
    """An embedding that scales its rows, as Gemma's does, by a buffer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Tower(nn.Module):
    """An embedding, then whatever comes."""

    def __init__(self, vocab: int, *layers: nn.Module, **options):
        super().__init__()
        self.embed, self.rest = nn.Embedding(vocab, 12, **options), nn.Sequential(*layers)

    def forward(self, tokens):
        return self.rest(self.embed(tokens))


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 6, generator=draw, dtype=torch.float64).requires_grad_()
    y = model(x)
    return torch.autograd.grad((y * y.detach().cos()).sum(), x, retain_graph=True)[0], (y * y.detach().cos()).sum()   # the input's too


def run_tokens(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    y = model(torch.randint(0, 7, (3, 12), generator=torch.Generator().manual_seed(1)))
    return y, (y * y.detach().cos()).sum()


PAIRS = {
    "linear": lambda: Pair(nn.Linear(6, 12), nn.Linear(12, 5)),
    "without bias": lambda: Pair(nn.Linear(6, 12, bias=False), nn.Linear(12, 5, bias=False)),
    "transposed": lambda: Pair(Conv1D(12, 6), Conv1D(5, 12)),
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_column_then_a_row(pair, ranks):
    expect_equals_plain(ranks, lambda: shaken(PAIRS[pair]()), run, plan={"first": "colwise", "second": "rowwise"})


@pytest.mark.parametrize("kind", PAIRS)
def test_the_parts_of_a_layer_say_how_many_features_they_have(kind):
    """As `nn.Linear` does: code that is not ours reads it."""
    def body(world):
        pair = rl.tensor_parallel(shaken(PAIRS[kind]()), {"first": "colwise", "second": "rowwise"}, world)
        return [(layer.in_features, layer.out_features) for layer in (pair.first, pair.second)]

    assert rl.simulate(2, body) == [[(6, 6), (6, 5)]] * 2


@pytest.mark.parametrize("words", [("colwise_rep", "rowwise_rep"), ("colwise_gather_output", "rowwise_split_input"),
                                   ("colwise_rep", "replicate"),
                                   ("replicate", "rowwise_rep"), ("replicate", "colwise_rep")], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_layers_whose_ends_are_whole(pair, words):
    for ranks in RANKS:
        expect_equals_plain(ranks, lambda: shaken(PAIRS[pair]()), run, plan=dict(zip(("first", "second"), words)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_gate_and_up_in_one_matrix(ranks, bias):
    expect_equals_plain(ranks, lambda: shaken(Gated(bias)), run, plan={"gate_up": "packed_colwise", "down": "rowwise"})


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (24, 12)])
@pytest.mark.parametrize("ranks", RANKS)
def test_queries_keys_and_values_in_one_matrix(ranks, heads, kv_heads):
    expect_equals_plain(ranks, lambda: shaken(Fused(heads, kv_heads)), run, plan={"qkv": "packed_qkv_colwise", "out": "rowwise"})


def small(attribute: str, fused: bool, ffn: int, wide: str = "up") -> nn.Module:
    """With small values: the cosine of an output of thousands has lost four digits."""
    model = shaken(InOneModule(attribute, fused, ffn, wide))
    for param in model.parameters():
        param.data *= 0.2
    return model


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("attribute", ["num_heads", "head_dim"])
@pytest.mark.parametrize(("fused", "ffn"), [(False, 48), (False, 20), (True, 48), (True, 20)])
def test_an_mlp_beside_queries_keys_and_values_is_no_attention(attribute, fused, ffn, ranks):
    columns = {"qkv": "packed_qkv_colwise"} if fused else dict.fromkeys("qkv", "colwise")
    rest = {"up": "colwise", "gate": "colwise", "o": "rowwise", "down": "rowwise"}
    expect_equals_plain(ranks, partial(small, attribute, fused, ffn), run, plan=columns | rest)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("attribute", ["num_heads", "head_dim"])
@pytest.mark.parametrize(("wide", "fused"), [("fc", False), ("dense_h_to_4h", False), ("fc", True), ("a_name_that_nobody_knows", True)])
def test_an_mlp_beside_attention_is_known_by_many_names_and_beside_fused_matrices_by_any(wide, fused, attribute, ranks):
    columns = {"qkv": "packed_qkv_colwise"} if fused else dict.fromkeys("qkv", "colwise")
    rest = {wide: "colwise", "gate": "colwise", "o": "rowwise", "down": "rowwise"}
    expect_equals_plain(ranks, partial(small, attribute, fused, 20, wide), run, plan=columns | rest)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("attribute", ["num_heads", "head_dim"])
@pytest.mark.parametrize(("fused", "ffn"), [(False, 48), (False, 20), (True, 48), (True, 20)])
def test_an_mlp_may_be_cut_beside_attention_that_is_left_whole(attribute, fused, ffn, ranks):
    expect_equals_plain(ranks, partial(small, attribute, fused, ffn), run, plan={"up": "colwise", "gate": "colwise", "down": "rowwise"})


GROUPED = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}


@pytest.mark.parametrize("names", [("num_heads", "num_kv_heads"), ("n_head", "n_kv_head"), ("nhead", "nkv"), ("h", "kv"),
                                   ("n_local_heads", "n_local_kv_heads"), ("q_heads_of_layer", "kv_heads_of_layer")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_knows_its_heads_by_many_names(names, ranks):
    def make():
        model = Grouped(**dict(zip(names, (4, 2))))
        vars(model).update({"head_dim": 6} if "layer" in names[0] else {})   # these are known by their values
        return shaken(model)

    expect_equals_plain(ranks, make, run, plan=GROUPED)


@pytest.mark.parametrize("names", [("groups", "others"), ("Q", "K")])
def test_attention_that_says_its_heads_under_names_that_nobody_knows_is_refused(names):
    with pytest.raises(ConfigError, match=f"3 column-cut layers of 24, 12, 12 features and seems .* only {names[0]} could"):
        rl.simulate(2, lambda world: rl.tensor_parallel(shaken(Grouped(**dict(zip(names, (4, 2))))), GROUPED, world))


EXPERTS = {"experts": "moe_tp_experts", "experts.gate_up": "packed_colwise", "experts.down": "rowwise"}


@pytest.mark.parametrize("ranks", RANKS)
def test_matrices_of_experts_are_cut_each_and_their_router_learns_from_all(ranks):
    expect_equals_plain(ranks, lambda: shaken(Mixture()), run, plan=EXPERTS)
    expect_equals_plain(ranks, lambda: shaken(Mixture(identity=True)), run, plan=EXPERTS | {"experts.identity": "moe_identity_expert"})


def test_experts_that_a_plan_calls_all_reduce_are_those_of_moe_tp_experts():
    expect_equals_plain(2, lambda: shaken(Mixture()), run, plan=EXPERTS | {"experts": "all_reduce"})


class Sinking(nn.Module):
    """Attention with a number for each head that takes from its softmax, as models of `transformers` with sinks have it."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.sinks, self.scale = 3, nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(()))
        self.q, self.k, self.v, self.o = nn.Linear(6, 12), nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(12, 6)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
        scores = q @ k.mT
        kept = (scores.logsumexp(-1) - self.sinks.view(1, -1, 1)).sigmoid()
        return self.o(((scores.softmax(-1) @ v) * kept[..., None]).transpose(1, 2).flatten(2)) * self.scale


SINKS = dict.fromkeys(("1.q", "1.k", "1.v", "1.sinks"), "colwise") | {"1": "local_params", "1.o": "rowwise"}


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("ranks", RANKS[:1] + [2, 4])
def test_parameters_of_a_module_with_a_number_for_each_head_are_cut_with_the_heads(ranks, debug, monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", debug)
    expect_equals_plain(ranks, lambda: shaken(nn.Sequential(nn.Identity(), Sinking())), run, plan=SINKS)


@pytest.mark.parametrize(("plan", "said"), [
    (SINKS | {"1.sinks": "rowwise"}, r"1.sinks, of shape \(4,\), is to be 'rowwise'; .* may be colwise, which cuts their first dim"),
    (SINKS | {"1.scale": "colwise"}, r"1.scale, of shape \(\), is to be 'colwise'"),
    ({name: word for name, word in SINKS.items() if name != "1"}, "'1.sinks' is a parameter of Sequential; .* or local_params their param"),
])
def test_a_number_for_each_head_is_cut_by_its_first_dim_only(plan, said):
    with pytest.raises(ConfigError, match=said):
        rl.simulate(2, lambda world: rl.tensor_parallel(shaken(nn.Sequential(nn.Identity(), Sinking())), plan, world))


@pytest.mark.parametrize(("plan", "said"), [
    ({"experts": "moe_tp_experts", "experts.gate_up": "packed_colwise"}, "says nothing of their down that could be done"),
    (EXPERTS | {"experts.down": "rowwise_rep"}, "expected one of colwise, rowwise, packed_colwise, packed_rowwise"),
    ({name: word for name, word in EXPERTS.items() if "." in name}, "'experts.gate_up' is a parameter of Mixture; a plan names modules"),
    (EXPERTS | {"experts.*": "colwise"}, "experts.gate_up is to be both 'packed_colwise' and 'colwise'"),
])
def test_a_plan_that_says_half_of_experts_is_refused(plan, said):
    with pytest.raises(ConfigError, match=said):
        rl.simulate(2, lambda world: rl.tensor_parallel(shaken(Mixture()), plan, world))


def test_two_matrices_side_by_side_are_cut_by_rows_each():
    def body(world):
        model = rl.tensor_parallel(shaken(nn.Sequential(nn.Linear(8, 3))), {"0": "packed_rowwise"}, world)
        return model[0].weight.detach()

    whole = shaken(nn.Sequential(nn.Linear(8, 3)))[0].weight.detach()
    for rank, part in enumerate(rl.simulate(2, body)):
        assert torch.equal(part, torch.cat((whole[:, 2 * rank:2 * rank + 2], whole[:, 4 + 2 * rank:6 + 2 * rank]), dim=1))


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_norm_that_ranks_use_for_different_heads_gets_the_sum(ranks, finish):
    plan = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}
    if finish:
        expect_equals_plain(ranks, lambda: shaken(NormedHeads()), run, plan=plan)
        return
    for held in rl.simulate(ranks, lambda world: holdings(rl.tensor_parallel(shaken(NormedHeads()), plan, world, finish_gradients=False))):
        assert [name for name, holding in held.items() if holding.grad_partial] == ["norm.weight"]


@pytest.mark.parametrize("word", ["sequence_parallel_rep", "replicated_with_grad_allreduce"])
def test_gradients_of_what_is_inside_a_module_that_the_plan_names_are_summed_too(word):
    if word == "sequence_parallel_rep":
        make = lambda: shaken(Tower(8, nn.Sequential(nn.LayerNorm(12), nn.LayerNorm(12))))
        expect_equals_plain(3, make, run_tokens, plan={"embed": "embedding_rowwise", "rest.0": word})
        return

    def make_heads():
        model = NormedHeads()
        model.norm = nn.Sequential(model.norm, nn.PReLU())
        return shaken(model)

    expect_equals_plain(3, make_heads, run, plan={"up": "colwise", "norm": word, "down": "rowwise"})


def test_two_parameters_that_autograd_gives_one_gradient_are_summed_once_each():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.empty(12)), nn.Parameter(torch.empty(12))

        def forward(self, x):
            return x * (self.first + self.second)

    make = lambda: shaken(Tower(8, Scales(), nn.LayerNorm(12)))
    plan = {"embed": "embedding_rowwise", "rest.0": "replicated_with_grad_allreduce", "rest.1": "sequence_parallel_rep"}
    expect_equals_plain(3, make, run_tokens, plan=plan)


@pytest.mark.parametrize("word", ["embedding_rowwise", "embedding_colwise"])
@pytest.mark.parametrize("padding", [None, 0, 3, 6])
@pytest.mark.parametrize("ranks", RANKS)
def test_an_embedding_by_either_dim_with_or_without_a_padding_token(ranks, padding, word):
    expect_equals_plain(ranks, lambda: shaken(Tower(7, padding_idx=padding)), run_tokens, plan={"embed": word})


@pytest.mark.parametrize("word", ["embedding_rowwise", "embedding_colwise"])
def test_an_embedding_with_a_forward_of_its_own_keeps_it(word):
    def make():
        model = Tower(7)
        model.embed = Scaled(7, 12, padding_idx=1)
        return shaken(model)

    expect_equals_plain(3, make, run_tokens, plan={"embed": word})


@pytest.mark.parametrize("word", ["embedding_rowwise", "embedding_colwise"])
def test_an_embedding_may_be_called_by_name(word):
    class ByName(Tower):
        def forward(self, tokens):
            return self.rest(self.embed(input=tokens))

    expect_equals_plain(3, lambda: shaken(ByName(7)), run_tokens, plan={"embed": word})


def test_what_is_cut_by_tokens_may_be_passed_by_name_behind_another_tensor():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

        def forward(self, x, mask):
            return x + self.down(torch.tanh(self.up(self.norm(x))) * mask)

    class ByName(Tower):
        def __init__(self):
            super().__init__(7)
            self.blocks, self.norm = nn.ModuleList([Masked(), Masked()]), nn.LayerNorm(12)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(mask=torch.linspace(0, 1, 12, dtype=torch.float64)[:, None], x=x)
            return self.norm(x)

    plan = {"blocks.0": "sequence_split", "blocks.*.norm": "sequence_parallel", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
            "norm": "sequence_parallel_rep"}
    expect_equals_plain(2, lambda: shaken(ByName()), run_tokens, plan=plan)


CUT = "embed is a Embedding; only an nn.Embedding can be cut, without max_norm, sparse or scale_grad"


@pytest.mark.parametrize(("option", "said"), [({"max_norm": 1.0}, CUT), ({"scale_grad_by_freq": True}, CUT),
                                              ({"sparse": True}, "embed is an embedding with sparse=True; leave it out")])
def test_an_embedding_that_does_more_than_look_up_rows_is_refused(option, said):
    with pytest.raises(ConfigError, match=said):
        rl.simulate(1, lambda world: rl.tensor_parallel(Tower(7, **option), {"embed": "embedding_rowwise"}, world))


@pytest.mark.parametrize("ranks", RANKS)
def test_the_stream_may_be_cut_by_tokens_in_the_middle_and_biases_still_count_once(ranks):
    make = lambda: shaken(Tower(8, nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)))
    plan = {"rest.0": "sequence_parallel", "rest.1": "colwise", "rest.2": "rowwise", "rest.3": "sequence_parallel_rep"}
    expect_equals_plain(ranks, make, run_tokens, plan=plan | {"embed": "embedding_rowwise"})
    expect_equals_plain(ranks, make, run_tokens, plan=plan | {"rest": "sequence_split"})
    for word in ("embedding_colwise", "embedding_rowwise"):
        expect_equals_plain(ranks, make, run_tokens, plan=plan | {"embed": word, "rest": "sequence_split"})


@pytest.mark.parametrize(("plan", "said"), [
    ({"rest.3": "sequence_parallel"}, "tokens after rest.3 in group 'world': no split layer has read these"),
    ({"rest.0": "sequence_parallel_rep"}, "rest.1 in group 'world' reads a tensor that no sequence_parallel norm has gathered"),
])
def test_a_norm_before_the_wrong_kind_of_layer_is_refused_by_all_ranks(plan, said):
    make = lambda: shaken(Tower(8, nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)))
    words = {"embed": "embedding_rowwise", "rest.0": "sequence_parallel", "rest.1": "colwise", "rest.2": "rowwise",
             "rest.3": "sequence_parallel_rep"} | plan

    def body(world):
        with pytest.raises(ConfigError, match=said):
            run_tokens(rl.tensor_parallel(make(), words, world))[1].backward()

    rl.simulate(3, body)


def test_frozen_layers_stay_frozen():
    def make():
        model = shaken(PAIRS["linear"]())
        model.first.requires_grad_(False)
        return model

    expect_equals_plain(2, make, run, plan={"first": "colwise", "second": "rowwise"})
    split = lambda world: rl.tensor_parallel(make(), {"first": "colwise"}, world)
    assert rl.simulate(2, lambda world: [p.requires_grad for p in split(world).parameters()]) == [[False, False, True, True]] * 2


def make_pair() -> nn.Module:
    return shaken(nn.Sequential(Pair(nn.Linear(6, 12), nn.Linear(12, 5)), Pair(nn.Linear(5, 12), nn.Conv1d(3, 3, 1))))


@pytest.mark.parametrize(("plan", "said"), [
    ({"*.frist": "colwise"}, "pattern '*.frist' matches no module of Sequential. Did you mean '*.first'?"),
    ({"0.first": "colwise", "encoder.*.up": "rowwise"}, "pattern 'encoder.*.up' matches no module"),
    ({"first": "colwise"}, "pattern 'first' matches no module"),
    ({"*": "colwise"}, "0: colwise is for nn.Linear and Conv1D, but this is a Pair"),
    ({"1.second": "rowwise"}, "1.second: rowwise is for nn.Linear and Conv1D, but this is a Conv1d"),
    ({"*.first": "columnwise"}, "'*.first' is to be 'columnwise', which is no style. Did you mean 'colwise'?"),
    ({"*.first": None}, "'*.first' is to be None, which is no style. Known: all_reduce, colwise"),
    ({"*.first": "colwise", "0.first": "rowwise"}, "0.first is to be both 'colwise' and 'rowwise'"),
    ({"0.first.weight": "colwise"}, "'0.first.weight' is a parameter of Sequential; a plan names modules, here '0.first'"),
    ({"0.first": "embedding_rowwise"}, "0.first is a Linear; only an nn.Embedding can be cut"),
    ({"0.first": "vocabulary_output"}, "for an nn.Linear say colwise_rep"),
    ({"0.second": "colwise"}, "0.second: 5 features do not divide by 2 ranks"),
    ({"0.second": "packed_colwise"}, "0.second: 5 features are not 2 fused matrices of equal size"),
    ({"1.first": "rowwise"}, "1.first: 5 features do not divide by 2 ranks; choose a number of ranks that divides them, or leave"),
    ({"0.first": "packed_qkv_colwise"}, "0 does not say how wide its heads are; give it head_dim, or num_heads"),
    ({"0.first": "sequence_parallel"}, "nothing cuts the stream by tokens before them"),
    ({7: "colwise"}, "a pattern of the plan=7 is of type int, expected a text such as 'layers.*.mlp.up'"),
    ({}, "the plan is empty, so each of the 2 ranks would hold and compute the whole Sequential; give a plan, such as"),
    ("auto", "plan='auto' is of type str, expected name patterns and their words, as a dict, or None for the model's own tp_plan"),
])
def test_a_plan_that_cannot_be_followed_is_refused_by_all_ranks_with_the_reason(plan, said):
    refused = []

    def body(world):
        with pytest.raises(ConfigError) as caught:
            rl.tensor_parallel(make_pair(), plan, world)
        refused.append(str(caught.value))

    rl.simulate(2, body)
    assert len(refused) == 2 and all(said in text for text in refused), refused


def test_logits_that_would_stay_cut_are_refused_by_all_ranks():
    """A loss of whole logits would say that a target is out of bounds, or be another one on each rank."""
    plan = {"1.first": "colwise", "1.second": "rowwise", "2": "colwise"}
    refused = []

    def body(world):
        model = nn.Sequential(nn.Embedding(10, 6), Pair(nn.Linear(6, 12), nn.Linear(12, 6)), nn.Linear(6, 10))
        with pytest.raises(ConfigError) as caught:
            rl.tensor_parallel(model, plan, world)
        rl.tensor_parallel(model, plan | {"2": "colwise_rep"}, world)   # nothing was cut before
        refused.append(str(caught.value))

    rl.simulate(2, body)
    assert refused == ["plan: 2 is colwise, so each rank would have the logits of its own part of 10 tokens, and look for targets there; "
                       "say colwise_rep, which gathers them"] * 2


def test_a_rowwise_layer_that_gets_whole_features_says_what_to_name_it_instead():
    model = shaken(nn.Sequential(*(Pair(nn.Linear(6, 12), nn.Linear(12, 6)) for _ in range(2)), nn.Linear(6, 4)))
    split = lambda world: rl.tensor_parallel(copy.deepcopy(model), {"2": "rowwise"}, world)   # not in a block, of which copies are tried
    with pytest.raises(rl.ShapeMismatch, match="2 in group 'world': a rowwise layer reads .* 3 of 6, and got all, .*; say rowwise_rep"):
        rl.simulate(2, lambda world: run(split(world)))


@pytest.mark.parametrize("word", [None, "replicate", "replicated_with_grad_allreduce"])
def test_queries_are_not_cut_beside_keys_that_stay_whole(word):
    """With one key-value head the values would be right, and gradients on every rank another part of the whole ones."""
    model = shaken(InOneModule("num_heads", False, 20))
    model.k, model.v = nn.Linear(12, 3).double(), nn.Linear(12, 3).double()
    plan = {"q": "colwise", "o": "rowwise"} | ({"k": word, "v": word} if word else {})
    with pytest.raises(ConfigError, match="k stays whole beside queries that are cut, .* say colwise for it too"):
        rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(model), plan, world))
    rl.simulate(1, lambda world: rl.tensor_parallel(copy.deepcopy(model), plan, world))   # one rank has all queries


def test_a_table_of_positions_is_not_looked_up_for_a_rank_s_own_tokens_counted_from_0():
    class Learned(Tower):
        def __init__(self):
            super().__init__(8, nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12))
            self.positions = nn.Embedding(12, 12)

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.rest(x + self.positions(torch.arange(x.shape[1])))

    plan = {"embed": "embedding_rowwise", "rest.0": "sequence_parallel", "rest.1": "colwise", "rest.2": "rowwise",
            "rest.3": "sequence_parallel_rep"}
    with pytest.raises(ConfigError, match="positions may be one of positions: .* say sequence_split for the first block"):
        rl.simulate(2, lambda world: rl.tensor_parallel(shaken(Learned()), plan, world))
    expect_equals_plain(2, lambda: shaken(Learned()), run_tokens, plan=plan | {"rest": "sequence_split"})


def test_the_model_itself_is_named_in_errors():
    model = shaken(Fused(heads=6, kv_heads=2))
    fused = lambda world: rl.tensor_parallel(copy.deepcopy(model), {"qkv": "packed_qkv_colwise", "out": "rowwise"}, world)
    with pytest.raises(ConfigError, match="^the model: 2 key-value heads and 3 ranks: one must divide by the other"):
        rl.simulate(3, fused)
    with pytest.raises(ConfigError, match=r"Linear has no modules inside that a plan could name; .* nn.Sequential\(layer\)"):
        rl.simulate(2, lambda world: rl.tensor_parallel(nn.Linear(6, 4), {"": "colwise_rep"}, world))


def test_a_pattern_that_matches_nothing_in_numbered_modules_is_told_their_numbers():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no module of Sequential\. Known: 0, 1\."):
        rl.simulate(2, lambda world: rl.tensor_parallel(model, {"layers.*": "colwise"}, world))


def test_finish_gradients_is_true_or_false():
    with pytest.raises(ConfigError, match="finish_gradients='no' is of type str"):
        rl.simulate(2, lambda world: rl.tensor_parallel(make_pair(), {"*.first": "colwise"}, world, finish_gradients="no"))


def test_gate_and_up_in_one_matrix_are_not_cut_as_one():
    with pytest.raises(ConfigError, match="gate_up has 48 output features, and down takes 24: .* say packed_colwise"):
        rl.simulate(2, lambda world: rl.tensor_parallel(shaken(Gated()), {"gate_up": "colwise", "down": "rowwise"}, world))


def test_queries_keys_and_values_in_one_matrix_are_not_cut_as_one():
    with pytest.raises(ConfigError, match="qkv has 36 output features, and o takes 12: .* say packed_qkv_colwise"):
        rl.simulate(2, lambda world: rl.tensor_parallel(InOneModule("num_heads", True, 20), {"qkv": "colwise", "o": "rowwise"}, world))


def test_a_model_without_a_plan_needs_one():
    with pytest.raises(ConfigError, match="Sequential has no tp_plan of its own; give a plan"):
        rl.simulate(2, lambda world: rl.tensor_parallel(make_pair(), None, world))


def test_plans_that_differ_between_ranks_are_refused_by_all():
    def body(world):
        with pytest.raises(ModelMismatch, match="the plans of the ranks differ"):
            rl.tensor_parallel(make_pair(), {"0.first": "colwise" if world.rank else "colwise_rep"}, world)

    rl.simulate(2, body)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks", "said"), [
    (12, 4, 6, "4 key-value heads and 6 ranks: one must divide by the other, .*; choose tensor = 1, 2, 4 or 12"),
    (6, 6, 4, "6 query heads do not divide by 4 ranks"),
])
def test_fused_heads_that_do_not_divide_are_refused_with_the_reason(heads, kv_heads, ranks, said):
    with pytest.raises(ConfigError) as caught:
        rl.simulate(ranks, lambda world: rl.tensor_parallel(shaken(Fused(heads, kv_heads)), {"qkv": "packed_qkv_colwise"}, world))
    assert re.search(said, str(caught.value))


def test_a_matrix_tied_to_one_cut_otherwise_is_refused():
    def body(world):
        model = shaken(Pair(nn.Linear(6, 6), nn.Linear(6, 6)))
        model.second.weight = model.first.weight
        rl.tensor_parallel(model, {"first": "colwise", "second": "rowwise"}, world)

    with pytest.raises(ConfigError, match="tied parameter .* would be cut in two ways"):
        rl.simulate(2, body)


def test_a_matrix_tied_to_one_that_the_plan_does_not_name_is_refused():
    pair = Pair(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    pair.second.weight = pair.first.weight
    with pytest.raises(ConfigError, match="second.weight is tied to a parameter that the plan cuts, and would stay whole"):
        rl.simulate(1, lambda world: rl.tensor_parallel(pair, {"first": "colwise"}, world))


class HeadWithTwoNames(nn.Module):
    """The bias of its output layer has a second name that no forward reads, as in BERT."""

    def __init__(self):
        super().__init__()
        self.output = nn.Linear(6, 8)
        self.bias = self.output.bias

    def forward(self, x):
        return self.output(x)


def test_a_second_name_of_a_cut_bias_may_be_deleted_as_the_error_says():
    head, x = HeadWithTwoNames(), torch.randn(3, 6)
    whole, plan = head(x), {"output": "colwise_rep"}
    with pytest.raises(ConfigError, match="^bias is tied .* or delete that name of it first, if no forward reads it there"):
        rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(head), plan, world))
    del head.bias
    for result in rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(head), plan, world)(x)):
        torch.testing.assert_close(result, whole)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("word", ["colwise", "rowwise_rep"])
def test_a_weight_that_is_computed_from_other_parameters_is_refused(norm, word):
    pair = Pair(norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    with pytest.raises(ConfigError, match="first: its weight is computed from other parameters"):
        rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(pair), {"first": word}, world))


@pytest.mark.parametrize(("put_on", "said"), [
    (lambda layer: layer.register_forward_hook(lambda *_: None), "second has hooks"),
    (lambda layer: layer.register_forward_pre_hook(lambda *_: None), "second has hooks"),
    (lambda layer: layer.register_full_backward_hook(lambda *_: None), "second has hooks"),
    (lambda layer: layer.weight.register_hook(lambda gradient: None), "second: its weight has hooks"),
    (lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda param: None), "second: its bias has hooks"),
    (lambda layer: vars(layer).update(forward=lambda x: x), "second has a forward of its own"),
])
def test_hooks_that_would_be_lost_with_a_layer_are_refused(put_on, said):
    pair = Pair(nn.Linear(6, 6), nn.Linear(6, 6))
    put_on(pair.second)
    with pytest.raises(ConfigError, match=f"{said}.*put .* on .* afterwards"):
        rl.simulate(1, lambda world: rl.tensor_parallel(pair, {"first": "colwise", "second": "rowwise"}, world))


def make_shared() -> nn.Module:
    """The embedding stands under two names, a block too, and a layer in two blocks."""
    block, other = Pair(nn.Linear(12, 24), nn.Linear(24, 12)), Pair(nn.Linear(12, 24), nn.Linear(24, 12))
    other.first = block.first
    model = Tower(8, block, nn.LayerNorm(12), block, other)
    model.tokens = model.embed
    return shaken(model)


@pytest.mark.parametrize("words", [{"embed": "embedding_rowwise"}, {"embed": "embedding_colwise", "tokens": "embedding_colwise"}])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_module_under_two_names_is_cut_once(ranks, words):
    expect_equals_plain(ranks, make_shared, run_tokens, plan=words | {"rest.*.first": "colwise", "rest.*.second": "rowwise"})


def test_a_module_that_is_to_be_cut_in_two_ways_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="tokens is to be 'embedding_colwise', and the same module under another name 'embed"):
        rl.simulate(1, lambda world: rl.tensor_parallel(
            make_shared(), {"embed": "embedding_rowwise", "tokens": "embedding_colwise"}, world))


def test_every_word_is_documented_and_tested():
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for word in styles.STYLES:
        assert word in styles.__doc__ and f'"{word}"' in tests, word


def test_models_that_differ_are_made_those_of_rank_0():
    def body(world):
        model = shaken(PAIRS["linear"]())
        with torch.no_grad():
            model.first.weight.add_(world.rank)
        if world.rank == 0:
            with pytest.warns(UserWarning, match="differed from rank 0's"):
                rl.tensor_parallel(model, {"first": "colwise"}, world)
        else:
            rl.tensor_parallel(model, {"first": "colwise"}, world)
        return model.first.weight.detach()

    assert torch.equal(torch.cat(rl.simulate(2, body)), shaken(PAIRS["linear"]()).first.weight)


@functools.cache
def first_error() -> str:
    """What a rank says whose input has another width."""
    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world)
        model(torch.zeros(2, 7, dtype=torch.float64))

    with pytest.raises(RuntimeError) as caught:
        rl.simulate(2, body)
    return str(caught.value)


def test_a_wrong_width_fails_before_any_rank_waits():
    assert "mat1 and mat2 shapes cannot be multiplied" in first_error()
