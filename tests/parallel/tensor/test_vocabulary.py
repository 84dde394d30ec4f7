"""The loss over a cut vocabulary is torch's own of the whole logits, in value and gradient, whatever the logits and targets are."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from rankloom.base.errors import DataError, ShapeMismatch
from rankloom.parallel.tensor.holding import cut_padded
from rankloom.parallel.tensor.vocabulary import VocabularyShard, split_cross_entropy

RANKS = [1, 2, 3, 4]


def inputs(vocab: int, rows: int = 21, width: int = 6, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(vocab)
    hidden, weight = (torch.randn(n, width, generator=draw, dtype=torch.float64) for n in (rows, vocab))
    targets = torch.randint(0, vocab, (rows,), generator=draw)
    targets[::4] = -100
    return (hidden * scale).to(dtype), weight.to(dtype), targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=-100, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(3.0 * loss, (hidden, weight))]


def plain_of_wide_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss in fp32 of logits that were rounded to their dtype."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=-100, reduction="sum")


def split(world, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int | None = None) -> list[torch.Tensor]:
    """Loss and whole gradients, from one rank's part of the weight."""
    vocab = len(weight)
    length, spans = cut_padded(vocab, world.size)
    ((start, stop),) = spans[world.rank]
    mine = F.pad(weight[start:stop], (0, 0, 0, length - (stop - start))).requires_grad_()
    hidden = hidden.detach().requires_grad_()
    loss = split_cross_entropy(hidden, mine, targets, VocabularyShard.of(vocab, world), world, chunk=chunk)
    term, part = torch.autograd.grad(3.0 * loss, (hidden, mine))
    assert not part[stop - start:].any(), "padding has a gradient"
    return [loss.detach(), world.all_reduce(term.double()).to(term.dtype), world.all_gather(part)[:vocab]]


@pytest.mark.parametrize("chunk", [None, 1, 8, 21, 100])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(ranks, chunk):
    for vocab in (24, 13, 3):
        given = inputs(vocab)
        truth = plain(*given)
        for mine in rl.simulate(ranks, lambda world, given=given: split(world, *given, chunk)):
            torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e4, 1e-8, 0.0])
def test_logits_so_large_that_their_exponentials_overflow_or_all_alike(scale):
    given = inputs(10, scale=scale)
    truth = plain(*given)
    for mine in rl.simulate(3, lambda world: split(world, *given)):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


def test_targets_that_all_lie_on_one_rank_or_do_not_count_at_all():
    hidden, weight, targets = inputs(12)
    for special in (torch.zeros_like(targets), torch.full_like(targets, 11), torch.full_like(targets, -100)):
        truth = plain(hidden, weight, special)
        for mine in rl.simulate(4, lambda world, special=special: split(world, hidden, weight, special)):
            torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_16_and_32_bit_losses_are_off_by_their_roundings_only(dtype, rtol):
    given = inputs(26, rows=16, dtype=dtype)
    truth = plain(*(t.double() if t.is_floating_point() else t for t in given))
    for loss, *grads in rl.simulate(2, lambda world: split(world, *given, 8)):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), truth[0], rtol=rtol, atol=0)
        torch.testing.assert_close(loss, plain_of_wide_logits(*given), rtol=1e-5, atol=0)   # of the same logits, so in fp32 again
        for mine, grad in zip(grads, truth[1:]):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), grad, rtol=0, atol=rtol * grad.abs().max().item())


@pytest.mark.parametrize("chunk", [32, 512])
def test_a_loss_scale_cures_an_overflow_of_fp16_in_the_weights_gradient(chunk):
    """Unscaled, a row of it is 1,024 x 300 x 3/4: the sum of chunks is above 65,504, and so is each chunk of 512. Every number is exact."""
    def body(world):
        hidden = torch.full((1024, 2), 300.0, dtype=torch.float16, requires_grad=True)
        mine = torch.zeros(2, 2, dtype=torch.float16, requires_grad=True)
        total = split_cross_entropy(hidden, mine, torch.ones(1024, dtype=torch.long), VocabularyShard.of(4, world), world, chunk=chunk)
        (total * 2.0**-4).backward()
        return mine.grad.tolist()

    assert rl.simulate(2, body) == [[[64 * 300 * (0.25 - (token == 1))] * 2 for token in tokens] for tokens in ((0, 1), (2, 3))]


def test_the_loss_has_the_same_bits_on_every_rank():
    given = inputs(13, dtype=torch.float32)
    losses = [loss for loss, *_ in rl.simulate(4, lambda world: split(world, *given, 4))]
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def test_evaluation_makes_no_gradients(monkeypatch):
    hidden, weight, targets = inputs(12)

    def body(world):
        with torch.no_grad():
            mine = weight.chunk(world.size)[world.rank].contiguous()
            return split_cross_entropy(hidden, mine, targets, VocabularyShard.of(12, world), world)

    for loss in rl.simulate(2, body):
        torch.testing.assert_close(loss, plain(hidden, weight, targets)[0], rtol=1e-12, atol=0)
        assert not loss.requires_grad


@pytest.mark.parametrize("wrong", [12, -1])
def test_a_target_outside_the_vocabulary_is_refused_by_all_ranks(wrong):
    hidden, weight, targets = inputs(12)
    targets[3] = wrong

    def body(world):
        with pytest.raises(DataError, match="but the vocabulary is 0 to 11"):
            split(world, hidden, weight, targets)

    rl.simulate(2, body)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("grad", [True, False])
def test_the_loss_multiplies_once_for_each_chunk_and_once_more_for_each_gradient_that_is_needed(grad, trained):
    _, weight, targets = inputs(10, rows=8)
    each = 1 + grad * sum(trained)

    def body(world):
        mine = weight[world.rank * 5:(world.rank + 1) * 5].clone().requires_grad_(trained[1])
        hidden = inputs(10, rows=8)[0].requires_grad_(trained[0])
        with Products() as products, torch.set_grad_enabled(grad):
            split_cross_entropy(hidden, mine, targets, VocabularyShard.of(10, world), world, chunk=4)
        return products.count

    assert rl.simulate(2, body) == [2 * each] * 2


@pytest.mark.parametrize("count", [4, 16])
def test_more_or_fewer_targets_than_tokens_are_refused_by_all_ranks(count):
    targets = torch.ones(count, dtype=torch.long)

    def body(world):
        with pytest.raises(ShapeMismatch, match=rf"rank {world.rank}: .* targets of shape \({count},\) .* each of 8 tokens"):
            split_cross_entropy(torch.ones(8, 6), torch.ones(5, 6), targets, VocabularyShard.of(10, world), world, chunk=4)

    rl.simulate(2, body)
