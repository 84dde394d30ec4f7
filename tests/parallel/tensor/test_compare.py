"""In debug mode what the layouts say is checked: a tensor that should be the same on all ranks and is not, is named."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import CollectiveMismatch
from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.moves import BY_TOKENS, WHOLE
from split_model import expect_equals_plain

from .test_gpt import make, run, tokens
from .test_styles import PAIRS, shaken


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")


@pytest.mark.parametrize(("ranks", "overlap"), [(2, 1), (2, 3), (4, 1), (4, 2)])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_a_model_that_is_right_passes(plan, ranks, overlap):
    shape = dict(layers=1, kv_heads=2, vocab_size=37)   # heads that ranks share, padding
    expect_equals_plain(ranks, lambda: make(**shape), run, plan=getattr(make(), plan), overlap=overlap)


@pytest.mark.parametrize("overlap", [1, 2])
def test_dropout_that_differs_between_ranks_is_named_by_all(overlap):
    where = (r"output of blocks.0.attention_dropout .* laid out as \[..., tokens, width\], alike on all ranks, "
             r"but ranks \[2\] hold another than rank 0")

    class Disturbed(nn.Module):
        def __init__(self, rank: int):
            super().__init__()
            self.rank = rank

        def forward(self, x):
            return x * (2.0 if self.rank == 2 else 1.0)

    def body(world):
        model = make()
        model.blocks[0].attention_dropout = Disturbed(world.rank)
        rl.tensor_parallel(model, model.tp_plan, world, overlap=overlap)
        with pytest.raises(CollectiveMismatch, match=where):
            run(model)

    rl.simulate(3, body)


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_a_batch_that_differs_between_ranks_is_named_by_all(what):
    def body(world):
        model = rl.tensor_parallel(make(layers=1), None, world)
        ids = tokens(40)
        other = ids.flip(0) if world.rank == 1 else ids   # the same tokens in another order
        with pytest.raises(CollectiveMismatch, match=rf"{what} .* laid out as \[..., tokens\], alike on all ranks, but ranks \[1\]"):
            model(other if what == "tokens" else ids, targets=other if what == "targets" else ids)

    rl.simulate(2, body)


def test_a_gradient_that_differs_between_ranks_is_named_by_all():
    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world)
        y = model(torch.ones(2, 4, 6, dtype=torch.float64))
        with pytest.raises(CollectiveMismatch, match=r"gradient of the output of second .* ranks \[1\] hold another than rank 0"):
            (y.sum() * (1 + world.rank)).backward()

    rl.simulate(2, body)


def test_values_that_are_no_numbers_are_alike():
    def body(world):
        model = rl.tensor_parallel(make(layers=1), None, world)
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
            return model(tokens(40)).isnan().all().item()

    assert rl.simulate(2, body) == [True, True]


BITS = {
    "the last bit of one number": lambda x: torch.nextafter(x, x + (torch.arange(x.numel()) == 4000)),
    "the places of two rows": lambda x: x.view(-1, 2048).flip(0).flatten(),
    "the sign of a zero": lambda x: torch.where(x == 0.0, -x, x),
    "the shape": lambda x: x.view(2, -1),
}


@pytest.mark.parametrize("other", BITS)
def test_alike_is_every_bit(other):
    x = (torch.arange(8192) // 2048).double() * 2.0 ** 40   # few numbers, most bits of which are zeros

    def body(world):
        expect_alike(x, WHOLE, world, "same")
        with pytest.raises(CollectiveMismatch, match=r"other in group 'world'.* ranks \[1\] hold another than rank 0"):
            expect_alike(BITS[other](x) if world.rank == 1 else x, WHOLE, world, "other")

    rl.simulate(3, body)


def test_what_is_conjugated_or_negated_when_read_is_compared_as_it_reads():
    def body(world):
        x = torch.tensor([1 + 2j, 3 - 4j])
        for lazy in (x.conj(), torch._neg_view(x), x.conj().imag):
            expect_alike(lazy if world.rank == 1 else lazy.clone(), WHOLE, world, "same")
            with pytest.raises(CollectiveMismatch):
                expect_alike(lazy + 1.0 if world.rank == 1 else lazy, WHOLE, world, "other")

    rl.simulate(2, body)


def test_ranks_that_differ_are_named_by_their_numbers_in_the_world():
    def body(world):
        with pytest.raises(CollectiveMismatch) as error:
            expect_alike(torch.tensor([world.rank]), WHOLE, world.group("tensor"), "other")
        return str(error.value)

    for rank, said in enumerate(rl.simulate(rl.Mesh(replicate=2, tensor=2), body)):
        first = rank // 2 * 2
        assert said.startswith(f"rank {rank}: ") and f"ranks [{first + 1}] hold another than rank {first}." in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_numbers_of_any_dtype_are_compared(dtype):
    def body(world):
        x = torch.arange(6).to(torch.float32).to(dtype)
        expect_alike(x, WHOLE, world, "same")
        with pytest.raises(CollectiveMismatch):
            expect_alike(x.roll(world.rank), WHOLE, world, "other")

    rl.simulate(2, body)


def test_of_what_is_cut_the_shape_is_compared():
    def body(world):
        expect_alike(torch.full((2, 3), float(world.rank)), BY_TOKENS, world, "parts")
        with pytest.raises(CollectiveMismatch, match=r"of one shape on all ranks, but ranks \[1\]"):
            expect_alike(torch.zeros(2, 3 - world.rank), BY_TOKENS, world, "parts")

    rl.simulate(2, body)
