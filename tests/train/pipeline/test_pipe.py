"""What a pipeline makes of a user's own loss and model: it trains as one process does. The bound is that of test_equivalence.py."""

import copy
from collections import namedtuple
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from closeness import expect_close
from rankloom.base.nested import map_tensors
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.models.pieces import gpt_pieces
from rankloom.models.sequence_part import WHOLE
from rankloom.parallel.context.apply import own_tokens
from rankloom.parallel.context.rows import KINDS
from rankloom.parallel.pipeline.cut import balance, multiplied_parameters, sequential_pieces
from rankloom.train.precision import precision_named
from token_rows import token_batches

BOUND = 1e-12
ROWS, TOKENS, VOCAB = 8, 12, 40


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=1e-4)


def trained(world, model, loss, batches, **options):
    """Three steps and an evaluation: the numbers they report, and the state at the end."""
    more = {"accumulate": 2} | options if world.mesh.pipe > 1 else {"accumulate": 2}
    engine = rl.prepare(copy.deepcopy(model), loss=loss, optimizer=adamw, world=world, clip=0.5, **more)
    group = engine.group
    mine = [map_tensors(lambda t: t.tensor_split(group.size)[group.rank], batch) for batch in batches]
    reports = [engine.step(batch) for batch in mine] + [engine.evaluate(mine[:1])]
    return [number for report in reports for number in (report.loss, report.count)], engine.full_state_dict()["model"]


def expect_equal(mesh, model, loss, batches, **options):
    (truth,) = rl.simulate(1, lambda world: trained(world, model, loss, batches))
    for numbers, state in rl.simulate(mesh, lambda world: trained(world, model, loss, batches, **options)):
        assert numbers == pytest.approx(truth[0], rel=BOUND)
        expect_close(state, truth[1], BOUND)


# ------------------------------------------------------------------ our GPT and any loss


def gpt(**options):
    config = rl.GPTConfig(**dict(vocab_size=VOCAB, width=16, layers=3, heads=4, kv_heads=2, ffn=32, seq_len=TOKENS) | options)
    return rl.GPT(config, seed=2, dtype=torch.float64)


def of_logits(model, batch):
    """As anybody would write it for one process, with a term that needs the logits themselves."""
    tokens, targets = batch
    logits = model(tokens)
    counted = (targets != -100)[..., None]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total + 0.01 * (logits * counted).square().sum(), counted.sum()


def of_targets(model, batch):
    total, count = model(batch[0], targets=batch[1])
    return 2.0 * total, count


def targets_by_position(model, batch):
    return model(*batch)


@pytest.mark.parametrize("loss", [of_logits, of_targets, targets_by_position])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_our_gpt_in_stages_takes_any_loss_of_one_process(loss, tie):
    expect_equal(rl.Mesh(pipe=2), gpt(tie=tie), loss, token_batches(ROWS, TOKENS, VOCAB))


def test_a_frozen_matrix_may_be_in_two_stages_which_exchange_no_gradient_of_it(monkeypatch):
    monkeypatch.setattr("rankloom.train.pipeline.stages.sum_tied", None)
    model = gpt(tie=True)
    model.embedding.requires_grad_(False)
    expect_equal(rl.Mesh(pipe=2, shard=2), model, of_targets, token_batches(ROWS, TOKENS, VOCAB), stage=3)


@pytest.mark.parametrize(("mesh", "words"), [
    (rl.Mesh(pipe=2, tensor=2), {"stage": 1}), (rl.Mesh(pipe=2, tensor=2), {"tensor_plan": gpt().tp_sequence_plan}),
    (rl.Mesh(pipe=2, shard=2), {"stage": 3}), (rl.Mesh(pipe=2), {"pipe": "zb-v"})], ids=["tensor", "tokens", "shard", "zb-v"])
def test_so_it_does_on_other_axes(mesh, words):
    expect_equal(mesh, gpt(), of_logits, token_batches(ROWS, TOKENS, VOCAB), **words)


def test_with_context_ranks_a_loss_of_a_stage_sees_this_rank_s_tokens_and_targets():
    seen = []

    def loss(model, batch):
        if model.__class__ is not rl.GPT:
            seen.append(tuple(batch[1].shape))
        return model(batch[0], targets=batch[1])

    expect_equal(rl.Mesh(pipe=2, context=2), gpt(), loss, token_batches(ROWS, TOKENS, VOCAB))
    assert set(seen[-8:]) == {(ROWS // 2, TOKENS // 2), (ROWS, TOKENS // 2)}   # of two ranks: the last micro-batches, and an evaluation


def test_without_stages_it_has_whole_targets_and_an_error_of_torch_s_says_how_to_cut_them():
    with pytest.raises(ValueError, match="batch_size") as caught:
        rl.simulate(rl.Mesh(context=2), lambda world: trained(world, gpt(), of_logits, token_batches(ROWS, TOKENS, VOCAB)))
    (note,) = (note for note in caught.value.__notes__ if "context" in note)
    assert note.startswith("with 2 context ranks") and "own_tokens(targets, world.group('context'))" in note

    def of_own_logits(model, batch, group):
        logits, targets = model(batch[0]), own_tokens(batch[1], group)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()

    def body(world, **words):
        return trained(world, gpt(), partial(of_own_logits, group=world.group("context")), token_batches(ROWS, TOKENS, VOCAB), **words)

    (truth,) = rl.simulate(1, body)
    for kind in KINDS:   # they cut other tokens
        for numbers, _ in rl.simulate(rl.Mesh(context=2), partial(body, context=kind)):
            assert numbers == pytest.approx(truth[0], rel=BOUND)


def of_the_last_token(model, batch):
    return F.cross_entropy(model(batch[0])[:, -1], batch[1][:, 0].clamp(min=0), reduction="sum"), len(batch[0])


def of_mean_logits(model, batch):
    return model(batch[0]).mean(1).square().sum(), len(batch[0])


def of_the_next_token(model, batch):
    logits, targets = model(batch[0])[:, :-1], batch[0][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()[:logits.shape[1] * len(targets)], reduction="sum"), targets.numel()


def of_all_tokens(model, batch):
    """Right in one process; but the model gives each rank the logits of its own tokens, and this counts all."""
    return model(batch[0]).logsumexp(-1).square().sum(), batch[0].numel()


def of_the_tokens_here(model, batch):
    penalty = model(batch[0]).logsumexp(-1).square()
    return penalty.sum(), penalty.numel()


@pytest.mark.parametrize(("mesh", "loss", "says"), [
    (rl.Mesh(context=2), of_the_last_token, "it gives .* and counts 4, of their halves .* and 4 and .* and 4"),
    (rl.Mesh(pipe=2, context=2), of_the_last_token, "counts 4"), (rl.Mesh(context=3), of_mean_logits, "counts 4"),
    (rl.Mesh(pipe=2, context=2), of_the_next_token, "counts 44, of their halves .* and 20 and .* and 20"),
    (rl.Mesh(context=2), of_all_tokens, "counts 48, of their halves .* and 48 and .* and 48")],
    ids=["last", "last, stages", "mean", "next", "all"])
def test_with_context_ranks_a_loss_that_is_no_sum_over_tokens_is_refused_before_the_first_step(mesh, loss, says):
    with pytest.raises(rl.LossError, match=f"each computes the loss of its own tokens, but this is no sum over tokens: .*{says}"):
        rl.simulate(mesh, lambda world: trained(world, gpt(), loss, token_batches(ROWS, TOKENS, VOCAB)))


def of_weighted_tokens(model, batch):
    weights = (batch[1] + 101).double() / 7
    losses = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].clamp(min=0).flatten(), reduction="none")
    return (losses * weights.flatten()).sum(), weights.sum()


@pytest.mark.parametrize(("mesh", "loss"), [(rl.Mesh(context=3), of_the_tokens_here), (rl.Mesh(pipe=2, context=2), of_the_tokens_here),
                                            (rl.Mesh(pipe=2, context=2), of_all_tokens),
                                            (rl.Mesh(pipe=2, context=2), of_weighted_tokens)],
                         ids=["here", "here, stages", "all, stages", "weights"])
def test_and_one_that_is_trains_as_in_one_process(mesh, loss):
    expect_equal(mesh, gpt(), loss, token_batches(ROWS, TOKENS, VOCAB))


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=2, context=2)])
def test_a_loss_of_packed_rows_gets_the_documents_that_it_passes_on(mesh):
    documents = (torch.arange(TOKENS) >= TOKENS // 3).long().expand(ROWS, -1).contiguous()
    batches = [((tokens, documents), targets) for tokens, targets in token_batches(ROWS, TOKENS, VOCAB)]

    def loss(model, batch):
        (tokens, documents), targets = batch
        logits = model(tokens, documents=documents)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()

    expect_equal(mesh, gpt(), loss, batches)


def test_the_auxiliary_losses_of_experts_belong_to_any_loss():
    expect_equal(rl.Mesh(pipe=2), gpt(moe=MoEConfig(experts=4, top_k=2, ffn=16)), of_logits, token_batches(ROWS, TOKENS, VOCAB))


@pytest.mark.parametrize(("loss", "reason"), [
    (lambda model, batch: model(batch[0][:, 1:], targets=batch[1][:, 1:]), "first part of the micro-batch"),
    (lambda model, batch: model(batch[0], targets=batch[1], documents=batch[1]), "documents="),
    (lambda model, batch: (model(batch[0], batch[1])[0] + model(batch[0]).sum(), 1), "called the model 2 times")])
def test_a_loss_that_calls_our_gpt_with_something_else_is_refused(loss, reason):
    with pytest.raises(rl.LossError, match=reason):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, gpt(), loss, token_batches(ROWS, TOKENS, VOCAB)))


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=2, context=2), rl.Mesh(pipe=2, tensor=2)], ids=str)
def test_a_loss_that_returns_a_mean_is_refused_in_stages_too(mesh):
    def mean(model, batch):
        total, count = model(batch[0], targets=batch[1])
        return total / count, count

    with pytest.raises(rl.LossError, match="seems to return their mean, not their sum"):
        rl.simulate(mesh, lambda world: trained(world, gpt(), mean, token_batches(ROWS, TOKENS, VOCAB)))


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=2, context=2)], ids=str)
def test_a_model_of_which_one_stage_alone_is_compiled_trains_as_in_one_process(mesh):
    """One stage tried the loss as a sum, the other did not; so one of them took the other's messages for its own, or waited."""
    batches = token_batches(ROWS, TOKENS, VOCAB)

    def body(world):
        model = gpt()
        model.blocks[0].compile(disable=True)   # as far as it can be seen; a copy would not be
        engine = rl.prepare(model, loss=of_targets, optimizer=adamw, world=world, accumulate=2)
        return [engine.step(batch).loss for batch in batches]

    (truth,) = rl.simulate(1, body)
    for losses in rl.simulate(mesh, body, timeout=20.0):
        assert losses == pytest.approx(truth, rel=BOUND)


class Halved(rl.GPT):
    """Its own way through the blocks."""

    def hidden(self, tokens, caches=None, part=WHOLE):
        return super().hidden(tokens, caches, part) / 2


def test_a_gpt_with_a_forward_of_its_own_is_cut_by_what_it_does():
    model = Halved(gpt(tie=False).config, seed=2, dtype=torch.float64)
    with pytest.raises(rl.ConfigError, match="Halved"):   # its stages would need the matrix of the head
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_targets, token_batches(ROWS, TOKENS, VOCAB)))


@pytest.mark.parametrize("method", ["forward", "hidden"])
def test_a_method_that_was_set_on_the_model_itself_is_not_passed_over(method):
    model = gpt(tie=False)
    plain = getattr(model, method)
    setattr(model, method, lambda *args, **options: plain(*args, **options))
    says = r"the model has a forward of its own \(model.forward = ...\), and no rank" if method == "forward" else "say where to cut"
    with pytest.raises(rl.ConfigError, match=says):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_targets, token_batches(ROWS, TOKENS, VOCAB)))


# ------------------------------------------------------------------ models of no tokens


WIDTH, CLASSES = 6, 3


def float_batches():
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64), torch.randint(0, CLASSES, (ROWS,), generator=draw))
            for _ in range(3)]


def of_classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def plain_sequence():
    torch.manual_seed(4)
    return nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), nn.Flatten(), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(),
                         nn.LayerNorm(16), nn.Linear(16, CLASSES)).double()


class Layered(nn.Module):
    """Layers of vectors, in a list or in a sequence, with modules before and behind."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(5)
        self.widen, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList(layers) if kind == "list" else nn.Sequential(*layers)
        self.double()

    def forward(self, x):
        x = self.widen(x)
        if isinstance(self.layers, nn.Sequential):
            return self.out(self.layers(x))
        for layer in self.layers:
            x = self.after(layer, x)
        return self.out(x)

    def after(self, layer, x):
        return layer(x)


class Residual(Layered):
    """Adds behind its layers what went into them, so a stage that has only the layer's output cannot go on."""

    def after(self, layer, x):
        return x + layer(x)


class Bare(nn.Module):
    """Nothing before its layers, nothing behind them; between them shapes change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(("pipe", "schedule"), [(2, "1f1b"), (3, "zb-h1"), (2, "zb-v"), (4, "gpipe")])
def test_a_sequence_of_modules_is_cut_between_them(pipe, schedule):
    expect_equal(rl.Mesh(pipe=pipe), plain_sequence(), of_classes, float_batches(), pipe=schedule)


def test_a_forward_that_was_set_on_a_sequence_is_not_passed_over():
    model = plain_sequence()
    model.forward = lambda x: 2 * nn.Sequential.forward(model, x)
    with pytest.raises(rl.ConfigError, match="the model has a forward of its own"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_classes, float_batches()))


@pytest.mark.parametrize(("pipe", "schedule"), [(2, "1f1b"), (3, "zb-h1"), (2, "zb-v"), (4, "gpipe")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_may_stand_in_a_sequence_twice(tied, pipe, schedule):
    """One activation function for all layers, or a layer that is tied to another."""
    torch.manual_seed(4)
    act, first, second, third = nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
    layers = nn.Linear(WIDTH, 16), first, second, first if tied else third, nn.Linear(16, CLASSES)
    model = nn.Sequential(*(module for layer in layers for module in (layer, act)))
    expect_equal(rl.Mesh(pipe=pipe), model.double(), of_classes, float_batches(), pipe=schedule)


def test_stages_may_have_the_same_layers_in_another_order():
    torch.manual_seed(4)
    first, second, act = nn.Linear(16, 16), nn.Linear(16, 16), nn.Tanh()
    model = nn.Sequential(nn.Linear(WIDTH, 16), first, act, second, act, second, act, first, act, nn.Linear(16, CLASSES)).double()
    expect_equal(rl.Mesh(pipe=2), model, of_classes, float_batches(), pipe=rl.Pipe(sizes=[3, 3]))


class Boxes(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.box = box

    def forward(self, x):
        return self.box(x)


class Opens(nn.Linear):
    """Takes what may be a tensor in a box."""

    def forward(self, x):
        return super().forward(x[0])


Pair = namedtuple("Pair", "plain same")


class OpensPair(nn.Linear):
    def forward(self, pair):
        assert type(pair) is Pair
        return super().forward(pair.plain) + pair.same


class Grows(nn.Linear):
    """Adds to a list."""

    def forward(self, found):
        return found + [super().forward(found[-1])]


class Sums(nn.Linear):
    """Adds up what it is given."""

    def forward(self, found):
        return super().forward(sum(found))


class Sorts(nn.Linear):
    def forward(self, x):
        return super().forward(x).sort(-1)


class OpensSorted(nn.Linear):
    def forward(self, found):
        return super().forward(found.values) * (1 + found.indices)


BOXED = {"a tuple of one": (Boxes(lambda x: (x,)), Opens(16, 16)), "a list of one": (Boxes(lambda x: [x]), Opens(16, 16)),
         "a list": (Boxes(lambda x: [x, x]), Grows(16, 16), Sums(16, 16)), "a tuple": (Boxes(lambda x: (x, x)), Sums(16, 16)),
         "a namedtuple": (Boxes(lambda x: Pair(x, x)), OpensPair(16, 16)), "one of torch's": (Sorts(16, 16), OpensSorted(16, 16))}


@pytest.mark.parametrize(("pipe", "cut"), [(2, None), (4, "zb-h1"), (2, rl.Pipe(example=float_batches()[0]))], ids=["2", "4", "measured"])
@pytest.mark.parametrize("boxed", BOXED)
def test_between_pieces_of_a_sequence_a_container_stays_what_it_is(boxed, pipe, cut):
    """A tuple of one element would become the element, and the next module would take its first row."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 16), *copy.deepcopy(BOXED[boxed]), nn.Linear(16, 16), nn.Linear(16, CLASSES)).double()
    expect_equal(rl.Mesh(pipe=pipe), model, of_classes, float_batches(), pipe=cut)


def test_a_list_that_a_sequence_begins_with_is_a_list_in_its_first_stage():
    torch.manual_seed(4)
    model = nn.Sequential(Grows(WIDTH, WIDTH), Sums(WIDTH, 16), nn.Linear(16, CLASSES)).double()
    expect_equal(rl.Mesh(pipe=2), model, of_classes, [([x, 1 + x], classes) for x, classes in float_batches()])


def test_a_class_that_no_other_rank_can_find_is_refused_between_pieces():
    own = namedtuple("own", "plain same")
    own.__qualname__ = "make.<locals>.own"
    model = nn.Sequential(nn.Linear(WIDTH, 16), Boxes(lambda x: own(x, x)), Sums(16, 16), nn.Linear(16, CLASSES)).double()
    with pytest.raises(rl.ConfigError, match="a Boxes hands on a make.<locals>.own .* top of its module"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_classes, float_batches()))


class Scaled(nn.Sequential):
    """A sequence with a buffer of its own."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES))
        self.register_buffer("scale", torch.ones(1))


def hidden_tanh(model):
    first, second, third = model
    return [({"0": first}, lambda x: second(first(x)).tanh()), ({"2": third}, third)]


@pytest.mark.parametrize(("make", "pipe", "name"), [
    (Scaled, None, "scale"),
    (lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)), rl.Pipe(pieces=hidden_tanh), "1.weight")])
def test_a_parameter_or_buffer_that_no_piece_has_is_named(make, pipe, name):
    model = make().double()
    constant = "a constant buffer may be registered with persistent=False" if name == "scale" else r": module}, function\)\n"
    with pytest.raises(rl.ConfigError, match=f"^{name} of .* is in no piece, so no stage would train and save it.*{constant}"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_classes, float_batches(), pipe=pipe))


def test_a_constant_that_is_not_saved_may_be_in_no_piece():
    torch.manual_seed(4)
    model = Scaled().double()
    model.register_buffer("scale", torch.ones(1), persistent=False)
    expect_equal(rl.Mesh(pipe=2), model, of_classes, float_batches())


@pytest.mark.parametrize(("policy", "kinds"), [("none", "IW"), ("full", "B")])
def test_weight_gradients_wait_until_the_input_gradient_is_sent_unless_memory_is_spared(policy, kinds):
    """They would keep their factors meanwhile, which recompute has just made again."""
    def body(world):
        engine = rl.prepare(gpt(), loss=of_logits, optimizer=adamw, world=world, accumulate=2, recompute=policy)
        return {action.kind for action in engine.pipeline.schedule.ranks[1] if action.kind in ("B", "I", "W")}

    assert rl.simulate(rl.Mesh(pipe=2), body) == [set(kinds)] * 2


@pytest.mark.parametrize("mode", [True, False])   # either way it is trained in training mode
def test_a_norm_whose_statistics_several_ranks_would_keep_is_refused(mode):
    """Each followed what it saw itself, and an evaluation used the averages of a part of the uses."""
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm,
                          nn.Linear(WIDTH, CLASSES)).double()
    with pytest.raises(rl.ConfigError, match=r"^1, a BatchNorm1d, is used on pipe ranks \[0, 1\], and each would count"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, copy.deepcopy(model).train(mode), of_classes, float_batches()))


@pytest.mark.parametrize("counts", [True, False])
def test_a_norm_that_counts_nothing_or_is_held_in_evaluation_mode_may_be_used_on_several_ranks(counts):
    norm = nn.BatchNorm1d(WIDTH, track_running_stats=counts)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, CLASSES)).double()
    if counts:
        norm.running_mean.fill_(0.1)
        norm.eval()
    expect_equal(rl.Mesh(pipe=2), model, of_classes, float_batches())


class DropsSome(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return x + self.dropout(self.linear(x).tanh())


def sharing_dropout(p):
    torch.manual_seed(3)
    shared = DropsSome(p)
    return nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, CLASSES)).double()


@pytest.mark.parametrize("pipe", [rl.Pipe(sizes=[2, 2]), rl.Pipe(sizes=[1, 1, 1, 1], schedule="interleaved", chunks=2)],
                         ids=["another rank", "another stage of this rank"])
def test_dropout_that_several_stages_use_is_refused_as_each_would_begin_with_the_first_mask(pipe):
    with pytest.raises(rl.ConfigError, match=r"dropout 2.dropout is used in several stages.*give each use its own"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, sharing_dropout(0.5), of_classes, float_batches(), pipe=pipe))


@pytest.mark.parametrize(("sizes", "p", "mode"), [([2, 2], 0.0, True), ([2, 2], 0.5, False), ([3, 1], 0.5, True)])
def test_dropout_that_drops_nothing_or_is_used_in_one_stage_may_be_shared(sizes, p, mode):
    model = sharing_dropout(p)
    model[0].dropout.train(mode)
    expect_equal(rl.Mesh(pipe=2), model, of_classes, float_batches(), pipe=rl.Pipe(sizes=sizes))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_an_example_may_have_another_dtype_than_the_precision(precision):
    model, batches = plain_sequence().float(), [(rows.float(), targets) for rows, targets in float_batches()]
    found = []
    for pipe in (None, rl.Pipe(example=batches[0])):
        body = lambda world: trained(world, model, of_classes, batches, precision=precision, pipe=pipe)   # noqa: B023
        found.append(rl.simulate(rl.Mesh(pipe=2), body)[0][0])
    assert found[0] == pytest.approx(found[1], rel=1e-12)   # cut at another place, the same arithmetic


@pytest.mark.parametrize("mesh", [rl.Mesh(replicate=2), rl.Mesh(pipe=2)])
def test_a_model_that_comes_in_evaluation_mode_is_trained_in_training_mode_on_any_mesh(mesh):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double().eval()
    expect_equal(mesh, model, of_classes, float_batches())


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_values_of_a_stage_may_lie_in_any_order(rank):
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)).double()
    model[0].register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    model[2].register_parameter("frozen", nn.Parameter(torch.arange(6.0).view(2, 3).t(), requires_grad=False))

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=of_classes, optimizer=adamw, world=world, accumulate=2)
        return engine.full_state_dict(rank)["model"]

    for at, state in enumerate(rl.simulate(rl.Mesh(pipe=2), body)):
        if rank in (None, at):
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


class Fork(nn.Linear):
    """Gives two tensors."""

    def forward(self, x):
        return x, super().forward(x)


class Join(nn.Linear):
    """Takes two, as one argument."""

    def forward(self, pair):
        return pair[0] + super().forward(pair[1])


@pytest.mark.parametrize("pipe", [2, 3, 4])
def test_a_tuple_between_two_modules_of_a_sequence_is_one_argument(pipe):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 16), Fork(16, 16), Join(16, 16), nn.Linear(16, CLASSES)).double()
    expect_equal(rl.Mesh(pipe=pipe), model, of_classes, float_batches())


def test_so_it_is_where_the_first_module_of_a_sequence_takes_it():
    torch.manual_seed(4)
    model = nn.Sequential(Join(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    expect_equal(rl.Mesh(pipe=2), model, of_classes, [((x, 1 + x), classes) for x, classes in float_batches()])


@pytest.mark.parametrize("wrap", [list, tuple])
def test_the_last_output_reaches_the_loss_as_it_is(wrap):
    class Wrapped(nn.Linear):
        def forward(self, x):
            return wrap([super().forward(x)])

    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 16), Wrapped(16, CLASSES)).double()
    loss = lambda model, batch: (F.cross_entropy(model(batch[0])[0], batch[1], reduction="sum"), len(batch[1]))
    expect_equal(rl.Mesh(pipe=2), model, loss, float_batches())


class Noted(nn.Linear):
    """Has extra state, a tensor, and shows copies of its values."""

    def __init__(self, *widths):
        super().__init__(*widths)
        self._register_state_dict_hook(lambda module, state, prefix, meta: state.update({k: v.clone() for k, v in state.items()}))

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        assert state.tolist() == [1.0]


def test_extra_state_and_copies_in_a_state_dict_are_no_missing_parameters():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 16), Noted(16, 16), nn.Linear(16, CLASSES)).double()
    rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_classes, float_batches()))


class FrozenFirst(nn.Module):
    """Its first layer is frozen, and called without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table, self.out = nn.Embedding(VOCAB, 8).requires_grad_(False), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.double()

    def forward(self, tokens):
        with torch.no_grad():
            x = self.layers[0](self.table(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.out(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_frozen_layers_may_be_called_without_gradients(schedule):
    expect_equal(rl.Mesh(pipe=2), FrozenFirst(), of_logits, token_batches(ROWS, TOKENS, VOCAB), pipe=schedule)


def test_modules_without_parameters_stay_with_the_one_before():
    assert [list(modules) for modules, _ in sequential_pieces(plain_sequence())] == [["0", "1", "2", "3"], ["4", "5"], ["6"], ["7"]]


@pytest.mark.parametrize(("wrong", "says"), [
    (dict(pieces=3), r"pieces=3 cannot be called, expected a function of the model"),
    (dict(loss="mse"), r"loss='mse' cannot be called, expected a function of the model"),
    (dict(pieces=lambda model: []), "2 stages for a model of 0 pieces"),
    (dict(pieces=lambda model: None), r"pieces=None is of type NoneType, expected a list of \({name: module}, function\)"),
    (dict(pieces=lambda model: model), "piece 0 is a Linear, expected"),
    (dict(chunks="2"), "a schedule for chunks='2': expected a whole number"),
    (dict(loss=lambda model: None), r"pipe=rl.Pipe\(loss=...\): what it returns=None cannot be called, expected a function of the output"),
    (dict(example=float_batches()[0], memory="1 GiB"), "memory='1 GiB' is of type str, expected a number of bytes"),
])
def test_a_pipe_that_is_told_nonsense_says_so(wrong, says):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prepare = lambda world: rl.prepare(copy.deepcopy(model), loss=of_logits, optimizer=adamw, world=world, pipe=rl.Pipe(**wrong))
    with pytest.raises(rl.ConfigError, match=says):
        rl.simulate(rl.Mesh(pipe=2), prepare)


def test_the_modules_of_a_rank_are_no_model_to_call():
    """The first rank would return hidden states of a stage."""
    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=of_classes, optimizer=adamw, world=world)
        with pytest.raises(rl.ConfigError, match=r"cannot call it: `step` and `evaluate` .*full_state_dict\(\)"):
            engine.model(float_batches()[0][0])

    model = plain_sequence()
    rl.simulate(rl.Mesh(pipe=2), body)


@pytest.mark.parametrize("mesh", [rl.Mesh(), rl.Mesh(pipe=2), rl.Mesh(pipe=2, context=2), rl.Mesh(pipe=2, tensor=2)], ids=str)
def test_rows_longer_than_our_gpt_reads_are_refused_in_stages_as_in_one_process(mesh):
    model, rows = gpt(), torch.zeros(ROWS, TOKENS + 2, dtype=torch.long)
    step = lambda world: rl.prepare(copy.deepcopy(model), loss=language_model_loss, optimizer=adamw, world=world).step((rows, rows))
    with pytest.raises(rl.DataError, match=rf"a sequence of {TOKENS + 2} tokens, but the model reads at most {TOKENS}"):
        rl.simulate(mesh, step)


def test_a_sequence_of_too_few_modules_for_the_stages_is_refused():
    model = plain_sequence()
    with pytest.raises(rl.ConfigError, match="6 stages for a model of 4 pieces"):
        rl.simulate(rl.Mesh(pipe=6), lambda world: trained(world, model, of_classes, float_batches()))


@pytest.mark.parametrize("model", [Layered("list"), Layered("sequence"), Bare()], ids=["list", "sequence", "bare"])
@pytest.mark.parametrize(("pipe", "schedule"), [(2, "1f1b"), (2, "zb-v")])
def test_a_model_of_vectors_is_cut_by_what_it_does_with_an_example(model, pipe, schedule):
    expect_equal(rl.Mesh(pipe=pipe), model, of_classes, float_batches(), pipe=rl.Pipe(schedule=schedule, example=float_batches()[0]))


def test_what_cannot_be_cut_so_is_refused_with_what_to_do():
    def attempt(pipe, kind):
        model = kind("list")
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_classes, float_batches(), pipe=pipe))

    with pytest.raises(rl.ConfigError, match=r"Layered has no nn.Embedding.*pipe=rl.Pipe\(example=...\)"):
        attempt(None, Layered)
    with pytest.raises(rl.ConfigError, match="Residual gives another output when it is cut into its layers.*pipe=rl.Pipe\\(pieces="):
        attempt(rl.Pipe(example=float_batches()[0]), Residual)


class GatedInside(nn.Module):
    """Every layer also gets what came before the first, through a gate that may begin at zero."""

    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(7)
        self.table, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(GatedLayer(gate) for _ in range(4))
        self.double()

    def forward(self, tokens):
        x = first = self.table(tokens)
        for layer in self.layers:
            x = layer(x, first)
        return self.out(x)


class GatedLayer(nn.Linear):
    def __init__(self, gate):
        super().__init__(8, 8)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x, first):
        return x + super().forward(x).tanh() + self.gate * first


class Checkpointing(nn.Module):
    """Runs its layers again in backward, by itself."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(7)
        self.reentrant, self._require_grads_hooks = reentrant, ["as `transformers` keeps them"]
        self.table, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.double()

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if torch.is_grad_enabled() else layer(x)
        return self.out(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_model_that_checkpoints_the_layer_at_a_border_is_told_of_recompute(reentrant, schedule):
    model = Checkpointing(reentrant)
    with pytest.raises(rl.ConfigError, match=r"Checkpointing checkpoints layers.\d, a layer at the border .* give `prepare` recompute="):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_logits, token_batches(ROWS, TOKENS, VOCAB), pipe=schedule))


@pytest.mark.parametrize("gate", [0.0, 0.5])
def test_what_layers_get_beside_the_stream_is_found_even_if_it_counts_for_nothing_yet(gate):
    model = GatedInside(gate)
    with pytest.raises(rl.ConfigError, match=r"GatedInside gives another output .* layers.\d, or what comes behind it, gets more than"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: trained(world, model, of_logits, token_batches(ROWS, TOKENS, VOCAB)))
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def from_meta(world):
        with torch.device("meta"):
            made = GatedInside(gate)
        return trained(world, made, of_logits, token_batches(ROWS, TOKENS, VOCAB), initialize=lambda name, into: into.copy_(values[name]))

    with pytest.raises(rl.ConfigError, match=r"GatedInside gives another output"):
        rl.simulate(rl.Mesh(pipe=2), from_meta)


# ------------------------------------------------------------------ where a language model is cut


def test_stages_of_a_language_model_multiply_with_equally_many_parameters():
    """An embedding costs nothing, and a large output matrix as much as some layers."""
    model = gpt(tie=True, layers=6, vocab_size=400)
    pieces = gpt_pieces(model)
    whole = {name: param.numel() for name, param in model.named_parameters(remove_duplicate=False)}
    costs = multiplied_parameters(pieces, whole, {"embedding.weight"})
    block = sum(param.numel() for param in model.blocks[0].parameters())
    assert costs == [0.0, *[block] * 6, 16 + 400 * 16]
    assert balance(costs, 2) == [5, 3]

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=language_model_loss, optimizer=adamw, world=world, accumulate=2)
        return sorted({name.split(".")[1] for name, _ in engine.model.named_parameters() if name.startswith("blocks")})

    assert rl.simulate(rl.Mesh(pipe=2, tensor=2), body) == [["0", "1", "2", "3"]] * 2 + [["4", "5"]] * 2


def test_a_tied_parameter_is_counted_whole_under_each_of_its_names():
    """One that is left out counts as what a tensor rank holds of it, and these may hold unequal parts."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    chosen = rl.Pipe.of(None, model, of_classes, precision_named(None))
    assert chosen.numels == {"0.weight": 12, "0.bias": 4, "1.weight": 12, "1.bias": 4}


def test_pieces_that_begin_without_a_table_count_alike():
    pieces = sequential_pieces(plain_sequence())
    assert multiplied_parameters(pieces, {}, frozenset()) == [1.0] * 4
    assert all(a[0].keys().isdisjoint(b[0]) for a, b in pairwise(pieces))
