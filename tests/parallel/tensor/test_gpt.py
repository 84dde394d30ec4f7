"""Our own GPT over tensor ranks is the plain one: logits, loss, every gradient, whatever does not divide."""

import copy
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from closeness import error, expect_close
from gradients import gradients
from noting import late
from rankloom.base.errors import ConfigError, DataError, ShapeMismatch
from rankloom.models.config import MoEConfig
from rankloom.models.generate import generate
from rankloom.parallel.model_split import load_full_state_dict
from split_model import RTOL, expect_equals_plain, whole_gradients


def make(seed: int = 3, dtype: torch.dtype = torch.float64, **shape) -> rl.GPT:
    numbers = dict(vocab_size=40, seq_len=12, width=48, layers=2, heads=12, kv_heads=12, ffn=48, tie=False) | shape
    model = rl.GPT(rl.GPTConfig(**numbers), seed=seed, dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():   # norms of ones would hide a gradient that is summed too often
            param.mul_(1.0 + 0.1 * torch.arange(param.shape[0], dtype=dtype).view(-1, *[1] * (param.dim() - 1)) / param.shape[0])
    return model


def tokens(vocab: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(5))


def run(model: rl.GPT) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in eval, then the loss of the same tokens, some of which do not count."""
    ids = tokens(model.config.vocab_size)
    targets = ids.roll(-1, 1).masked_fill(ids % 5 == 0, -100)
    with torch.no_grad():
        logits = model(ids)
    total, count = model(ids, targets=targets)
    return logits, total / count


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_split_gpt_is_the_plain_one(ranks, tie):
    expect_equals_plain(ranks, lambda: make(tie=tie), run)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_gpt_split_by_tokens_too_is_the_plain_one(ranks, tie):
    expect_equals_plain(ranks, lambda: make(tie=tie), run, plan=make(tie=tie).tp_sequence_plan)


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 1), (4, 1), (3, 1), (4, 2), (2, 2), (4, 4), (6, 2), (6, 3)])
def test_fewer_key_value_heads_than_query_heads_or_ranks(ranks, kv_heads, plan):
    shape = dict(kv_heads=kv_heads, layers=1)
    expect_equals_plain(ranks, lambda: make(**shape), run, plan=getattr(make(**shape), plan))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("vocab", [37, 5, 2])
def test_a_vocabulary_that_does_not_divide_is_padded_and_the_padding_is_not_seen(vocab, tie):
    for plan in ("tp_plan", "tp_sequence_plan"):
        expect_equals_plain(4, lambda: make(vocab_size=vocab, tie=tie, layers=1), run, plan=getattr(make(tie=tie), plan))


def test_padding_stays_zero_however_long_it_is_trained():
    def body(world):
        model = rl.tensor_parallel(make(vocab_size=37), None, world)
        update = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            update.zero_grad()
            run(model)[1].backward()
            update.step()
        return model.embedding.weight[7:], model.head.weight[7:]   # 4 ranks hold 10 rows each, the last one 7

    for part in rl.simulate(4, body)[3]:
        assert part.shape == (3, 48) and not part.any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_accumulate_over_micro_batches(ranks):
    def twice(model):
        first = run(model)[1]
        first.backward()
        return None, run(model)[1] * 0.5

    for plan in ("tp_plan", "tp_sequence_plan"):
        shape = dict(kv_heads=1, layers=1)
        expect_equals_plain(ranks, lambda shape=shape: make(**shape), twice, plan=getattr(make(**shape), plan))


def test_recomputed_activations_change_nothing():
    def recompute(model):
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
        return run(model)

    for plan in ("tp_plan", "tp_sequence_plan"):
        expect_equals_plain(2, make, recompute, plan=getattr(make(), plan))


def test_a_sequence_that_does_not_split_over_the_ranks_is_refused_by_all():
    def body(world):
        rl.tensor_parallel(make(), make().tp_sequence_plan, world)(tokens(40, length=7))

    with pytest.raises(ShapeMismatch, match=r"embedding: forward.*7 tokens of .* cannot be split over 2 ranks; pad to 8"):
        rl.simulate(2, body)


def test_a_mixture_of_experts_has_no_plan_by_tokens_for_its_routers_look_at_whole_rows():
    with pytest.raises(ConfigError, match="routers of a mixture of experts look at whole rows; use tp_plan"):
        dict(make(moe=MoEConfig(experts=4, ffn=8)).tp_sequence_plan)


@pytest.mark.parametrize(("ranks", "shape", "said"), [
    (4, dict(heads=6, kv_heads=6), "6 query heads do not divide by 4 ranks, and a head is never cut; choose tensor = 1, 2, 3 or 6"),
    (5, dict(heads=12), "12 query heads do not divide by 5 ranks"),
    (4, dict(heads=12, kv_heads=3), "3 key-value heads and 4 ranks: one must divide by the other"),
    (4, dict(heads=12, kv_heads=6), "choose tensor = 1, 2, 3, 6 or 12"),
    (4, dict(ffn=50), "blocks.0.mlp.gate: 50 features do not divide by 4 ranks"),
])
def test_what_does_not_divide_is_refused_with_the_reason(ranks, shape, said):
    with pytest.raises(ConfigError) as caught:
        rl.simulate(ranks, lambda world: rl.tensor_parallel(make(**shape), None, world))
    assert said in str(caught.value)


@pytest.mark.parametrize("where", ["tokens", "targets"])
def test_a_token_outside_the_vocabulary_is_refused_by_all_ranks(where):
    def body(world):
        model = rl.tensor_parallel(make(), None, world)
        ids = tokens(40)
        wrong = ids.clone()
        wrong[1, 2] = 40
        model(wrong if where == "tokens" else ids, targets=wrong if where == "targets" else ids)

    with pytest.raises(DataError, match=r"tokens from \d+ to 40, but the vocabulary is 0 to 39"):
        rl.simulate(3, body)


def test_a_loss_kernel_is_refused_because_no_rank_holds_whole_logits():
    def body(world):
        model = rl.tensor_parallel(make(), None, world)
        model.loss_kernel = lambda logits, targets: None
        run(model)

    with pytest.raises(ConfigError, match="set it to None"):
        rl.simulate(2, body)


@pytest.mark.parametrize("kv_heads", [12, 1])
def test_a_split_model_writes_the_same_text(kv_heads):
    prompt = tokens(40, length=4)
    write = lambda model: generate(model, prompt, max_new_tokens=12, temperature=0.8, seed=1)
    truth = write(make(kv_heads=kv_heads))
    for ranks in (2, 4):
        for text in rl.simulate(ranks, lambda world: write(rl.tensor_parallel(make(kv_heads=kv_heads), None, world))):
            assert torch.equal(text, truth)


def pause_before_collectives(world: rl.World) -> None:
    world._collect = late(world._collect, random.Random(world.rank), 0.002)


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_late_ranks_change_nothing(plan):
    expect_equals_plain(3, lambda: make(kv_heads=1), run, plan=getattr(make(), plan), before=pause_before_collectives)


def split_and_run(world: rl.World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """At the top of the module, so that a process can be told to run it."""
    model = rl.tensor_parallel(make(kv_heads=1, vocab_size=37), make().tp_sequence_plan, world)
    loss = run(model)[1]
    loss.backward()
    return loss.detach(), whole_gradients(model, world)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_processes_are_one_process(backend):
    plain = make(kv_heads=1, vocab_size=37)
    loss = run(plain)[1]
    loss.backward()
    for value, grads in rl.spawn(2, split_and_run, backend=backend):
        assert error(value, loss) < RTOL
        expect_close(grads, gradients(plain), RTOL)


def test_experts_stay_whole_where_attention_is_split():
    expect_equals_plain(3, lambda: make(moe=MoEConfig(experts=4, top_k=2, ffn=12)), run)


def test_fp32_and_bf16_are_off_by_their_roundings_only():
    truth = run(make())[1]
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        def body(world, dtype=dtype):
            model = rl.tensor_parallel(make(dtype=dtype), None, world)
            loss = run(model)[1]
            loss.backward()
            assert all(p.grad.dtype == dtype for p in model.parameters())
            return loss.detach()

        for loss in rl.simulate(2, body):
            torch.testing.assert_close(loss.double(), truth.detach(), rtol=rtol, atol=0)


def thaw(model, world):
    split = rl.tensor_parallel(model.requires_grad_(False), model.tp_sequence_plan, world)
    return split.requires_grad_(True)


def fill_from_meta(model, world):
    split = rl.tensor_parallel(rl.GPT(model.config, device="meta").double(), model.tp_sequence_plan, world).to_empty(device="cpu")
    load_full_state_dict(split, model.state_dict(), world)
    return split


def assign(model, world):
    split = rl.tensor_parallel(model, model.tp_sequence_plan, world)
    split.load_state_dict(split.state_dict(), assign=True)
    return split


@pytest.mark.parametrize("change", [thaw, fill_from_meta, assign])
def test_parameters_that_are_thawed_or_made_anew_after_the_cut_finish_their_gradients_too(change):
    plain = make(kv_heads=1)
    run(plain)[1].backward()

    def body(world):
        model = change(make(kv_heads=1), world)
        run(model)[1].backward()
        return whole_gradients(model, world)

    for grads in rl.simulate(2, body):
        expect_close(grads, gradients(plain), RTOL)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_a_copy_of_a_split_model_is_split_alike_and_finishes_its_gradients(plan, overlap):
    plain = make(kv_heads=1)
    loss = run(plain)[1]
    loss.backward()

    def body(world):
        first = rl.tensor_parallel(make(kv_heads=1), getattr(plain, plan), world, overlap=overlap)
        model = copy.deepcopy(first)
        with torch.no_grad():
            for param in first.parameters():
                param.zero_()
        run(model)[1].backward()
        return whole_gradients(model, world)

    for grads in rl.simulate(2, body):
        expect_close(grads, gradients(plain), RTOL)


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_compiled_blocks_leave_out_of_their_graphs_what_ranks_say_to_each_other(plan):
    def compiled(model):
        for block in model.blocks:
            block.compile(backend="eager")
        return run(model)

    expect_equals_plain(2, make, compiled, plan=getattr(make(), plan))
