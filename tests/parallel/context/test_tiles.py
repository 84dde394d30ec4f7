"""Tiles of attention add up to the whole: any cut, both kernels, forward and backward."""

import math

import pytest
import torch

from rankloom.base.errors import ShapeMismatch
from rankloom.parallel.context import tiles
from rankloom.parallel.context.tiles import SavedTile, TileGradients, merge, tile_backward, tile_forward

RTOL = 1e-12   # fp64: the same terms in another order


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(query, key, value, causal):
    """The textbook's attention, with its log-sum-exp; GQA by naming for each query head the head it reads."""
    reads = [head * key.shape[1] // query.shape[1] for head in range(query.shape[1])]
    scores = query @ key[:, reads].transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ value[:, reads], scores.logsumexp(-1)


@pytest.fixture(params=["the kernel of the CPU", "plain formulas", "plain formulas, a row at a time"])
def kernel(request, monkeypatch):
    if request.param != "the kernel of the CPU":
        monkeypatch.setattr(tiles, "_kernel", lambda query: "plain")
    if request.param.endswith("time"):
        monkeypatch.setattr(tiles, "SCORES", 1)
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_tile_is_the_textbook_s_attention_forward_and_backward(kernel, causal, kv_heads):
    query, key, value = draw(2, 4, 5, 6), draw(2, kv_heads, 5, 6, seed=1), draw(2, kv_heads, 5, 6, seed=2)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    truth, truth_lse = dense(*leaves, causal)
    grad = draw(2, 4, 5, 6, seed=3)
    truth.backward(grad)
    out, lse = tile_forward(query, key, value, causal)
    torch.testing.assert_close((out, lse), (truth.detach(), truth_lse.detach()), rtol=RTOL, atol=RTOL)
    grads = tile_backward(grad, SavedTile(query, key, value, out, lse), causal)
    torch.testing.assert_close(grads, TileGradients(*(leaf.grad for leaf in leaves)), rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_tiles_of_the_keys_add_up_in_any_order(kernel, order):
    query, key, value, grad = draw(1, 2, 4, 6), draw(1, 2, 9, 6, seed=1), draw(1, 2, 9, 6, seed=2), draw(1, 2, 4, 6, seed=3)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    truth, truth_lse = dense(*leaves, causal=False)
    truth.backward(grad)
    cuts = [slice(0, 2), slice(2, 3), slice(3, 9)]
    out, lse = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf, dtype=torch.float64)
    for cut in (cuts[i] for i in order):
        merge(out, lse, *tile_forward(query, key[:, :, cut], value[:, :, cut], causal=False))
    torch.testing.assert_close((out, lse), (truth.detach(), truth_lse.detach()), rtol=RTOL, atol=RTOL)
    of_query = torch.zeros_like(query)
    for cut in cuts:
        share = tile_backward(grad, SavedTile(query, key[:, :, cut], value[:, :, cut], out, lse), causal=False)
        of_query += share.query
        torch.testing.assert_close((share.key, share.value), (leaves[1].grad[:, :, cut], leaves[2].grad[:, :, cut]), rtol=RTOL, atol=RTOL)
    torch.testing.assert_close(of_query, leaves[0].grad, rtol=RTOL, atol=RTOL)


def test_scores_far_apart_neither_overflow_nor_lose_the_smaller_tile():
    query, value = torch.ones(1, 1, 1, 1, dtype=torch.float64), draw(1, 1, 2, 1)
    key = torch.tensor([-800.0, 800.0], dtype=torch.float64).view(1, 1, 2, 1)
    for first in (0, 1):
        out, lse = torch.zeros_like(query), torch.full((1, 1, 1), -torch.inf, dtype=torch.float64)
        for at in (first, 1 - first):
            merge(out, lse, *tile_forward(query, key[:, :, at:at + 1], value[:, :, at:at + 1], causal=False))
        assert out.item() == value[0, 0, 1, 0].item() and lse.item() == 800.0


def test_16_bit_tiles_are_added_up_in_32_bits(kernel):
    query, key, value = (draw(1, 2, 8, 16, seed=i, dtype=torch.bfloat16) for i in range(3))
    out, lse = tile_forward(query, key, value, causal=True)
    truth = dense(query.double(), key.double(), value.double(), causal=True)
    assert lse.dtype == torch.float32
    # weights, products and the result are rounded to 8 bits of bf16, a few times; the log-sum-exp is not
    torch.testing.assert_close(out.double(), truth[0], rtol=2 ** -6, atol=2 ** -6)
    # on a processor without AVX-512 torch's exponential for 16 bits is a polynomial that is off by up to 2^-13, and so is the sum of them
    coarse = kernel == "the kernel of the CPU" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    torch.testing.assert_close(lse.double(), truth[1], rtol=1e-5, atol=2 ** -13 if coarse else 1e-5)


def test_the_kernels_of_a_gpu_are_called_as_torch_declares_them(monkeypatch):
    monkeypatch.setattr(tiles, "_kernel", lambda query: "gpu")
    query, key, value = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    out, lse = tile_forward(query, key, value, causal=True)
    assert (out.shape, lse.shape, lse.dtype) == (query.shape, (2, 4, 8), torch.float32)
    grads = tile_backward(out, SavedTile(query, key, value, out, lse), causal=True)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]


def test_plain_formulas_hold_few_scores_at_a_time(monkeypatch):
    monkeypatch.setattr(tiles, "SCORES", 64)
    blocks = tiles._row_blocks(draw(1, 2, 100, 4), draw(1, 2, 16, 4))
    assert {2 * 16 * (block.stop - block.start) for block in blocks} == {64}
    assert [at for block in blocks for at in range(100)[block]] == list(range(100))


def test_key_value_heads_that_do_not_divide_the_query_heads_are_refused():
    with pytest.raises(ShapeMismatch, match="3 key-value heads do not divide 4 query heads"):
        tile_forward(draw(1, 4, 2, 2), draw(1, 3, 2, 2), draw(1, 3, 2, 2), causal=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_a_gpu_gives_the_tiles_of_the_cpu(dtype, causal):
    inputs = [draw(2, heads, 64, 16, seed=i, dtype=dtype) for i, heads in enumerate((4, 2, 2))]
    grad = draw(2, 4, 64, 16, seed=3, dtype=dtype)
    wide = [x.double() for x in inputs]
    truth = tile_forward(*wide, causal)
    gradients = tile_backward(grad.double(), SavedTile(*wide, *truth), causal)
    there = [x.cuda() for x in inputs]
    found = tile_forward(*there, causal)
    found += tile_backward(grad.cuda(), SavedTile(*there, *found), causal)
    bound = 2 ** -5 if dtype == torch.bfloat16 else 1e-4   # roundings of 8 bits; of 24 bits, with sums of 64 terms
    for mine, ref in zip(found, (*truth, *gradients), strict=True):
        torch.testing.assert_close(mine.double().cpu(), ref, rtol=bound, atol=bound)
