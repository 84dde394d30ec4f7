"""What a forward leaves behind, and what it costs: against torch's own hooks, and against published formulas."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.train.blocks.forward_cost import FLOPS_PER_BYTE, Trace
from rankloom.train.blocks.selective import ATTENTION, KEPT, is_kept
from rankloom.train.recompute import recompute


def bytes_by_hooks(model, *inputs):
    """Bytes of the storages that autograd saves, parameters and inputs left out, the output counted: the other way to measure."""
    saved, outside = {}, {t.untyped_storage()._cdata for t in (*model.parameters(), *inputs)}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage()._cdata, t), lambda t: t):
        out = model(*inputs)
    saved[out.untyped_storage()._cdata] = out
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in outside)


def bytes_by_trace(model, *inputs):
    with Trace() as trace:
        out = model(*inputs)
    return trace.kept(out)


class GPT3Layer(nn.Module):
    """The layer of Korthikanti et al. 2022, section 4.1: LayerNorm, attention with visible scores, GeLU of 4 x width, dropout."""

    def __init__(self, h, a):
        super().__init__()
        self.a = a
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (t.reshape(b, s, self.a, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = F.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.1)
        x = x + F.dropout(self.out((scores @ v).transpose(1, 2).reshape(b, s, h)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


@pytest.mark.parametrize(("s", "b", "h", "a"), [(64, 2, 64, 4), (128, 1, 64, 8), (32, 4, 128, 2), (48, 1, 32, 1)])
def test_a_layer_of_gpt_3_keeps_the_bytes_of_the_published_formula(s, b, h, a):
    """sbh (34 + 5as/h), Korthikanti et al. 2022, Table 2, exactly, but for what it says it leaves out, and for dropout.

    Left out: mean and 1/deviation of two norms, 2 bytes each a token. torch keeps the mask of dropout on a CPU in the dtype of its
    input, so in 2 bytes an element where the formula has 1.
    """
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True) * 1
    statistics, masks = 2 * 2 * 2 * s * b, a * s * s * b + 2 * s * b * h
    assert bytes_by_trace(GPT3Layer(h, a).bfloat16(), x) == s * b * (34 * h + 5 * a * s) + statistics + masks


@pytest.mark.parametrize(("s", "b", "h", "a"), [(64, 2, 64, 4), (128, 1, 64, 8)])
def test_selective_keeps_nothing_of_a_layer_of_gpt_3_that_grows_with_the_square_of_its_length(s, b, h, a):
    """22 sbh: query, key, value 6, attention 2, its output matrix 2, up 8, down 2 (its dropout comes after it), the output 2. The
    published selective keeps 34 sbh, all but the attention; this one computes norms, GeLU, masks and sums again too.
    """
    def run(policy):
        torch.manual_seed(0)
        layers = nn.ModuleList([GPT3Layer(h, a).bfloat16()])
        recompute(layers, policy, blocks=(GPT3Layer,))
        for _ in range(2):
            x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True) * 1
            with Trace() as trace:
                out = layers[0](x)
            kept = trace.kept(out)
            out.square().sum().backward()
        return kept, [p.grad for p in layers.parameters()]

    (kept, grads), (_, wanted) = run("selective"), run("none")
    assert kept == 22 * s * b * h
    assert all(torch.equal(grad, reference) for grad, reference in zip(grads, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_what_is_kept_is_what_autograd_saves(dtype, kv_heads):
    model = GPT(GPTConfig(vocab_size=17, seq_len=32, width=32, layers=1, heads=4, kv_heads=kv_heads, ffn=48), dtype=dtype)
    x = torch.randn(2, 32, 32, dtype=dtype, requires_grad=True) * 1
    tables = model.rotary(0, 32)
    assert bytes_by_trace(model.blocks[0], x, *tables) == bytes_by_hooks(model.blocks[0], x, *tables)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_our_block_keeps_what_its_formula_says_to_a_thousandth(dtype):
    """Bytes over sbh, with e bytes an element, f = ffn / h, no dropout, and attention that never shows its scores (so no 5as/h):

    two norms:   in fp32 their normed inputs and outputs, and the second's input: 8 + 8 + 4; in bf16, on a CPU, copies in fp32 of
                 their inputs, the normed inputs in fp32, and the outputs: 10 + 10. (The first's input is the block's own.)
    attention:   query, key, value, and what it makes of them: 4e
    MLP:         gate, silu of it, up, their product: 4ef
    the output, in place of the block's input: e
    and one number a token for a norm, one a token and head for attention: 4 (2 + a) / h
    """
    s, b, h, a, ffn = 128, 2, 256, 4, 512
    model = GPT(GPTConfig(vocab_size=17, seq_len=s, width=h, layers=1, heads=a, kv_heads=a, ffn=ffn), dtype=dtype)
    x = torch.randn(b, s, h, dtype=dtype, requires_grad=True) * 1
    e = x.element_size()
    kept = bytes_by_trace(model.blocks[0], x, *model.rotary(0, s)) / (s * b * h)
    assert kept == pytest.approx(20 + 4 * e + 4 * e * ffn / h + e + 4 * (2 + a) / h, rel=1e-3)


def test_work_counts_flops_of_products_and_bytes_of_the_rest_and_views_are_free():
    x, w = torch.randn(8, 16), torch.randn(16, 32)
    with Trace() as trace:
        x @ w
    assert trace.work == trace.product_work == 2 * 8 * 16 * 32 // FLOPS_PER_BYTE["cpu"]
    with Trace() as trace:
        x.view(16, 8).t().exp()
    assert (trace.work, trace.product_work) == (2 * 4 * 8 * 16, 0)
    with Trace() as trace:
        x.mul_(2.0)
    assert trace.work == 4 * 2 * 8 * 16


def test_causal_attention_counts_as_two_products():
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    with Trace() as trace:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert trace.product_work == 2 * 2 * (2 * 4 * 16 * 16 * 8) // FLOPS_PER_BYTE["cpu"]


def test_what_nobody_holds_is_not_kept():
    x = torch.ones(100, requires_grad=True)
    with Trace() as trace:
        out = (x * 2 + 1).sum()      # neither needs what it made
    assert trace.kept(out) == 4
    with Trace() as trace:
        held = x * 2
        out = held.sum()
    assert trace.kept(out) == 404
    held.untyped_storage().resize_(0)     # as a sharded parameter does when it is released
    assert trace.kept(out) == 4


def test_autocast_s_copies_of_weights_count_where_backward_needs_them_only():
    """A linear saves its weight in bf16 when the input wants a gradient; without that the copy lives in autocast's cache alone."""
    linear, x = nn.Linear(64, 64, bias=False), torch.randn(2, 64)
    with torch.autocast("cpu", torch.bfloat16):
        with Trace() as trace:
            out = linear(x)
        assert trace.kept(out) == 2 * 2 * 64 * 2          # output and input, in bf16
        with Trace() as trace:
            out = linear(x.requires_grad_())
        assert trace.kept(out) == 2 * 2 * 64 * 2 + 2 * 64 * 64
        assert torch.is_autocast_cache_enabled()


def test_products_are_kept_but_for_the_scores_of_an_attention_written_out():
    bmm = torch.ops.aten.bmm.default
    heads, keys = torch.empty(8, 512, 64), torch.empty(8, 64, 512)
    assert not is_kept(bmm, (heads, keys))                                                  # scores
    assert is_kept(bmm, (torch.empty(8, 512, 512), torch.empty(8, 512, 64)))                # what they weigh
    assert is_kept(bmm, (torch.empty(8, 9000, 512), torch.empty(8, 512, 2048)))             # eight experts
    assert not is_kept(torch.ops.aten.baddbmm.default, (torch.empty(512), heads, keys))
    assert is_kept(torch.ops.aten.mm.default, (torch.empty(9000, 64), torch.empty(64, 9000)))
    assert not is_kept(torch.ops.aten.tanh.default, (heads,))


def test_all_that_selective_keeps_can_be_counted():
    assert {str(packet) for packet in KEPT - ATTENTION if packet not in flop_registry} == {"aten._grouped_mm"}
    rows, experts = torch.empty(64, 32, device="meta", dtype=torch.bfloat16), torch.empty(4, 32, 48, device="meta", dtype=torch.bfloat16)
    with Trace() as trace:
        torch._grouped_mm(rows, experts, offs=torch.empty(4, device="meta", dtype=torch.int32))
    assert trace.product_work == 2 * 64 * 32 * 48 // FLOPS_PER_BYTE["cuda"]


def test_attention_is_counted_by_the_heads_that_ask():
    query, key, value = torch.empty(2, 8, 16, 32), torch.empty(2, 2, 24, 32), torch.empty(2, 2, 24, 32)
    with Trace() as trace:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    assert trace.product_work == 2 * (2 * 8) * 16 * 24 * (32 + 32) // FLOPS_PER_BYTE["cpu"]
