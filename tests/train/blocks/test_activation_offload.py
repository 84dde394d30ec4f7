"""Activation offload on a CPU, where it copies from buffer to buffer: the same bits, and nothing travels that should stay."""

import copy
import gc

import pytest
import torch
from torch import nn

import rankloom as rl
from gradients import expect_equal, gradients
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train.blocks.activation_offload import SMALL, offload_activations
from rankloom.train.blocks.forward_cost import Trace
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.recompute import recompute

WIDTH, ROWS, LENGTH = 32, 2, 32
STREAM = 4 * ROWS * LENGTH * WIDTH     # bytes of what goes from block to block, in fp32


def tokens(seed=0):
    ids = torch.randint(0, 37, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def prepared(policy="none", layers=5, dropout=0.2, offload=True, small=1024):
    config = GPTConfig(vocab_size=37, seq_len=LENGTH, width=WIDTH, layers=layers, heads=4, kv_heads=2, ffn=96, dropout=dropout)
    model, key = GPT(config), DropoutKey(5)
    key_dropout(model, key)
    recompute(model, policy)
    return model, key, offload_activations(model, small=small) if offload else None


def loss_of(model, seed=0):
    return language_model_loss(model, tokens(seed))[0]


@pytest.mark.parametrize("order", ["one by one", "first in first out", "last in first out"])
@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_gradients_are_the_same_bits_whatever_the_order_of_micro_batches(policy, order):
    def run(offload):
        model, key, _ = prepared(policy, offload=offload)
        for step in range(2):
            losses = []
            for micro in range(2):
                key.set_rows(step, range(micro, micro + 1))
                losses.append(loss_of(model, micro))
                if order == "one by one":
                    losses.pop().backward()
            for loss in losses if order.startswith("first") else losses[::-1]:
                loss.backward()
        return gradients(model)

    expect_equal(run(True), run(False))


@pytest.mark.parametrize("layers", [2, 3, 6])
def test_the_inputs_of_recomputed_blocks_travel_once_each_way_and_those_of_the_last_two_stay(layers):
    model, _, offload = prepared("full", layers)
    loss = loss_of(model)
    assert (offload.bytes_out, offload.bytes_back) == (layers * STREAM, 0)
    loss.backward()
    assert (offload.bytes_out, offload.bytes_back) == (layers * STREAM, max(0, layers - 2) * STREAM)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_what_has_travelled_is_not_on_the_device_between_forward_and_backward(policy):
    """Here the device is the CPU too, so the copies are subtracted: what is left is what a device would hold."""
    def held(layers, offload):
        model, _, copies = prepared(policy, layers, offload=offload)
        with Trace() as trace:
            loss = loss_of(model)
        return trace.kept(loss) - (copies.bytes_out if copies else 0), copies.bytes_out if copies else 0

    (with_6, out_6), (with_5, out_5), (without_6, _), (without_5, _) = held(6, True), held(5, True), held(6, False), held(5, False)
    block = out_6 - out_5                                         # what one block sends
    small = without_6 - without_5 - block                         # statistics of norms, which stay
    assert with_6 - with_5 == small < 1024 * 4 + STREAM // 8
    assert without_6 - with_6 == 4 * block, "all but two blocks"


def test_everything_is_freed_when_the_graph_is():
    model, _, _ = prepared()
    with Trace() as trace:
        loss = loss_of(model)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
    own = {g.untyped_storage()._cdata: g.untyped_storage().nbytes() for g in (*grads, loss)}
    del loss
    gc.collect()
    assert trace.kept(grads) <= sum(own.values())
    with Trace() as trace:
        loss_of(model)                      # dropped without a backward
    assert trace.kept(None) == 0


class Block(nn.Module):
    """Saves its weight as it is, turned, and cut; a table it is given and one of its own; a view of its input; and its input twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 20) / 4)
        self.inner = nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(1, 2, 64 * 16).view(64, 16))

    def forward(self, x, *, table):
        left = x[:, :16] @ self.weight[:, :16].t()
        right = x[:, 16:] @ self.weight[:, 3:19]
        return self.inner(left * right * table * self.table).repeat(1, 2) * x


def test_parameters_their_views_buffers_and_tables_given_to_all_blocks_never_travel():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(4))
    twin, offload = copy.deepcopy(blocks), offload_activations(blocks, small=1)
    table, start = torch.linspace(0, 1, 64 * 16).view(64, 16), torch.randn(64, 32).requires_grad_()
    sent = []
    for model in (twin, blocks):
        x = start * 1
        for block in model:
            before = offload.bytes_out
            x = block(x, table=table)
            sent.append(offload.bytes_out - before)
        x.square().sum().backward()
    # x once though saved three times; left, right, the linear layer's input, and what is multiplied by x
    expected = 4 * 64 * (32 + 16 + 16 + 16 + 32)
    assert sent == [0] * 4 + [expected] * 4
    expect_equal(gradients(blocks), gradients(twin))


class Turned(nn.Module):
    """Saves views that are conjugated and negated only when they are read."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Linear(16, 16)

    def forward(self, x):
        turn = torch.complex(self.angle(x), x)
        return (turn.conj() * turn.conj().exp()).real + turn.conj().imag * x


def test_views_that_are_conjugated_or_negated_come_back_so():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Turned() for _ in range(4))
    twin, _ = copy.deepcopy(blocks), offload_activations(blocks, small=1)
    for model in (blocks, twin):
        nn.Sequential(*model)(torch.linspace(0, 0.1, 64).view(4, 16)).sum().backward()
    expect_equal(gradients(blocks), gradients(twin))


class Recurrent(nn.Module):
    """Its gates are parts of one storage, changed in place one after the other, and each has a version of its own."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True, dtype=torch.float64)   # a CPU has a kernel for fp32

    def forward(self, x):
        return x + self.lstm(x)[0]


def test_parts_of_a_storage_that_change_one_after_the_other_come_back_as_they_were_saved():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Recurrent() for _ in range(4))
    twin, _ = copy.deepcopy(blocks), offload_activations(blocks, small=1)
    for model in (blocks, twin):
        nn.Sequential(*model)(torch.linspace(0, 1, 3 * 5 * 16, dtype=torch.float64).view(3, 5, 16)).sum().backward()
    expect_equal(gradients(blocks), gradients(twin))


def test_what_is_small_stays():
    for small, travels in ((STREAM, True), (STREAM + 1, False)):
        model, _, offload = prepared("full", small=small)
        loss_of(model).backward()
        assert (offload.bytes_out > 0) is travels
    assert SMALL == 1 << 20


def test_copies_come_back_one_block_ahead():
    """When the backward of block i begins, what block i - 1 saved is on its way, and nothing of block i - 2."""
    model, _, offload = prepared("full", 6)
    loss, seen = loss_of(model), []
    for i, block in enumerate(model.blocks):
        block.attention_norm.register_forward_pre_hook(lambda *_, i=i: seen.append((i, offload.bytes_back // STREAM)))
    loss.backward()
    assert seen == [(5, 0), (4, 1), (3, 2), (2, 3), (1, 4), (0, 4)]


def test_without_gradients_nothing_travels():
    model, _, offload = prepared()
    with torch.no_grad():
        loss_of(model)
    assert offload.bytes_out == 0


def test_backward_may_run_twice():
    def run(offload):
        model, _, _ = prepared(offload=offload)
        out = model(tokens()[0]).square().sum()
        out.backward(retain_graph=True)
        out.backward()
        return gradients(model)

    expect_equal(run(True), run(False))


def test_a_parameter_that_changes_before_backward_is_an_error_as_it_is_without():
    model, _, _ = prepared()
    loss = loss_of(model)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"shape \(32, 96\) that backward needs was changed in place after forward: it is at version"):
        loss.backward()


class Overwriting(nn.Module):
    """Changes in place what its exponential has saved."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def forward(self, x):
        return self.layers(x).exp().mul_(0.5)


@pytest.mark.parametrize("layers", [1, 4])
def test_a_saved_tensor_that_changes_before_backward_is_an_error_as_it_is_without(layers):
    blocks = nn.ModuleList(Overwriting() for _ in range(layers))
    offload_activations(blocks, small=1)
    with pytest.raises(RuntimeError, match="was changed in place after forward"):
        nn.Sequential(*blocks)(torch.ones(4, 16)).sum().backward()


def test_second_derivatives_pass():
    def run(offload):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        if offload:
            offload_activations(model, small=1)
        x = start = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        for block in model:
            x = block(x)
        first, = torch.autograd.grad(x.square().sum(), start, create_graph=True)
        first.square().sum().backward()
        return gradients(model)

    expect_equal(run(True), run(False))


def test_offload_is_put_on_after_recompute_and_once():
    model = prepared()[0]
    with pytest.raises(rl.ConfigError, match="recompute comes first, then offload_activations, .* each once"):
        recompute(model, "full")
    with pytest.raises(rl.ConfigError, match="each once"):
        offload_activations(model)


def test_with_a_number_of_bytes_to_fit_it_is_refused():
    model = prepared(offload=False)[0]
    recompute(model, "1 GiB")
    with pytest.raises(rl.ConfigError, match="blocks.0: recompute was given a number of bytes"):
        offload_activations(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", ["none", "full"])
def test_on_a_gpu_memory_falls_and_bits_stay(policy):
    """Eight blocks of 64 MiB activations each; two may be on the device when the forward is over."""
    def run(offload):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)) for _ in range(8)).cuda()
        recompute(model, policy)
        if offload:
            offload_activations(model)
        x = torch.randn(8192, 1024, device="cuda").requires_grad_()
        for _ in range(2):
            before, out = torch.cuda.memory_allocated(), x
            for block in model:
                out = block(out)
            held = torch.cuda.memory_allocated() - before
            out.square().mean().backward()
            del out
        torch.cuda.synchronize()
        return held, gradients(model)

    (held, grads), (wanted, reference) = run(True), run(False)
    expect_equal(grads, reference)
    blocks = 8 * (64 if policy == "none" else 32) * 2**20
    assert wanted >= blocks - 32 * 2**20 and held <= blocks / 4 + 64 * 2**20
