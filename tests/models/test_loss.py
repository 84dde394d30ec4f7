"""The chunked loss is the plain loss: same sum, same gradients, and never more logits than one chunk."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rankloom.base.errors import ShapeMismatch
from rankloom.base.loss import add_sum_over_rows
from rankloom.models import loss as loss_module
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import (
    chunk_rows,
    chunked_cross_entropy,
    language_model_loss,
    loss_and_gradient,
    plain_cross_entropy,
    plain_language_model_loss,
)


def problem(n=23, width=7, vocab=11, dtype=torch.float64, ignored=(0, 5, 22)):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=g)
    targets[list(ignored)] = -100
    return hidden, weight, targets


def gradients(total, *inputs, scale=1.0):
    return torch.autograd.grad(total * scale, inputs)


@pytest.mark.parametrize("rows", [1, 4, 8, 23, 100])
@pytest.mark.parametrize("kernel", [None, loss_and_gradient])
def test_chunks_give_the_sum_and_the_gradients_of_the_whole(rows, kernel):
    hidden, weight, targets = problem()
    plain = plain_cross_entropy(F.linear(hidden, weight), targets)
    chunked = chunked_cross_entropy(hidden, weight, targets, rows=rows, kernel=kernel)
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=0)
    for ours, theirs in zip(gradients(chunked, hidden, weight, scale=0.37),
                            gradients(plain, hidden, weight, scale=0.37), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)    # fp64; sums in another order
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, rows=rows, kernel=kernel), plain, rtol=1e-12, atol=0)


def test_without_gradients_none_are_computed():
    with torch.no_grad():
        chunked_cross_entropy(*problem(), rows=4, kernel=lambda *_: pytest.fail("this kernel computes gradients, too"))


@pytest.mark.parametrize("kernel", [None, loss_and_gradient])
def test_no_rows_lose_nothing_and_have_gradients_of_zeros(kernel):
    hidden, weight, targets = problem(n=0, ignored=())
    total = chunked_cross_entropy(hidden, weight, targets, kernel=kernel)
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, targets, kernel=kernel) == total == 0
    assert [x.tolist() for x in gradients(total, hidden, weight)] == [[], [[0.0] * 7] * 11]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_low_precision_chunks_are_as_near_the_truth_as_the_plain_path(dtype):
    hidden64, weight64, targets = problem(300, ignored=(3,))
    exact = plain_cross_entropy(F.linear(hidden64, weight64), targets)
    true = gradients(exact, hidden64, weight64)
    hidden, weight, _ = problem(300, dtype=dtype)
    errors = []
    for total in (plain_cross_entropy(F.linear(hidden, weight), targets),
                  chunked_cross_entropy(hidden, weight, targets, rows=32)):
        assert total.dtype == torch.float32
        found = gradients(total, hidden, weight)
        assert [g.dtype for g in found] == [dtype, dtype]
        errors.append([((f.double() - t).norm() / t.norm()).item() for f, t in zip(found, true, strict=True)])
    for plain, chunked in zip(*errors, strict=True):
        assert chunked <= 1.3 * plain


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_over_rows_is_added_to_the_total_and_rounded_only_where_the_cpu_has_no_wider_product(dtype, device):
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, n, generator=draw).to(dtype).to(device) for n in (40, 24))
    total = torch.randn(40, 24, generator=draw).to(device)
    expected = total.double() + left.double().T @ right.double()
    size = total.double().abs() + left.double().abs().T @ right.double().abs()
    add_sum_over_rows(total, left, right)
    rounding = 2.0**-8 if device == "cpu" and dtype == torch.bfloat16 else 65 * 2.0**-24   # of each of 64 additions
    assert total.dtype == torch.float32 and ((total.double() - expected).abs() <= rounding * size).all()


@DEVICES
@pytest.mark.parametrize("rows", [32, 512])
def test_a_loss_scale_cures_an_overflow_of_fp16_in_the_weights_gradient(rows, device):
    """Unscaled, a row of it is 1,024 x 300 x 3/4: the sum of chunks is above 65,504, and so is each chunk of 512. Every number is exact."""
    hidden = torch.full((1024, 2), 300.0, dtype=torch.float16, device=device, requires_grad=True)
    weight = torch.zeros(4, 2, dtype=torch.float16, device=device, requires_grad=True)
    total = chunked_cross_entropy(hidden, weight, torch.ones(1024, dtype=torch.long, device=device), rows=rows)
    _, found = gradients(total, hidden, weight, scale=2.0**-4)
    assert found.dtype == torch.float16
    assert found.tolist() == [[64 * 300 * (0.25 - (token == 1))] * 2 for token in range(4)]


def test_all_targets_ignored_is_a_loss_of_zero_with_zero_gradients():
    hidden, weight, targets = problem()
    total = chunked_cross_entropy(hidden, weight, torch.full_like(targets, -100), rows=4)
    assert total.item() == 0
    assert all(g.abs().sum() == 0 for g in gradients(total, hidden, weight))


@pytest.mark.parametrize("target", [-1, 11])
@pytest.mark.parametrize("rows", [4, 100])
def test_a_target_that_is_no_token_is_an_error_in_chunks_too(target, rows):
    hidden, weight, targets = problem()
    targets[9] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(hidden, weight, targets, rows=rows)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("targets", [4, 7, 9, 16])
def test_more_or_fewer_targets_than_tokens_are_an_error_in_chunks_too(targets, trains):
    """With more, every chunk of tokens would find as many targets: those of other tokens, where rows are longer."""
    hidden, weight = torch.ones(2, 4, 3, requires_grad=True), torch.ones(5, 3)
    with torch.set_grad_enabled(trains), pytest.raises(ShapeMismatch, match=rf"targets of shape \({targets},\) .* each of 8 tokens"):
        chunked_cross_entropy(hidden, weight, torch.ones(targets, dtype=torch.long), rows=4)


def test_a_very_unlikely_target_has_a_large_loss_not_an_infinite_one():
    logits = torch.tensor([[0.0, 500.0]])
    total, gradient = loss_and_gradient(logits, torch.tensor([0]))
    assert total.item() == 500
    assert torch.equal(gradient, torch.tensor([[-1.0, 1.0]]))


def test_a_second_backward_through_chunks_is_an_error_not_a_wrong_number():
    hidden, weight, targets = problem()
    total = chunked_cross_entropy(hidden, weight, targets, rows=4)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        (2 * total).backward()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation gave back."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("training", [True, False])
def test_the_logits_never_exist_as_a_whole(training):
    hidden, weight, targets = problem(n=512, width=4, vocab=64)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
    with torch.set_grad_enabled(training), keep, LargestTensor() as seen:
        total = chunked_cross_entropy(hidden, weight, targets, rows=32)
        if training:
            total.backward()
    assert seen.largest == 512 * 4 == 32 * 64        # hidden states, and one chunk of logits; whole: 32,768
    assert sum(saved) == training * (512 * 4 + 64 * 4)   # for backward: their gradients only, of no chunk the logits


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_costs_no_gradient_and_the_other_is_the_same(frozen):
    """A frozen output matrix of 128,256 x 2,048 cost 1 GiB, and a third of the work of the loss."""
    *given, targets = problem(n=512, width=4, vocab=64)
    chunked_cross_entropy(*given, targets, rows=32).backward()
    alone, saved = [x.detach().requires_grad_(at != frozen) for at, x in enumerate(given)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        chunked_cross_entropy(*alone, targets, rows=32).backward()
    assert saved == [given[1 - frozen].numel()] and torch.equal(alone[1 - frozen].grad, given[1 - frozen].grad)


def test_the_chunk_fits_its_budget_whatever_the_vocabulary():
    for vocab in (257, 4096, 8192, 128256):
        rows = chunk_rows(vocab, "cuda")
        assert rows * vocab <= 1 << 28 < 2 * rows * vocab
    assert chunk_rows(1 << 30, "cuda") == 16
    assert chunk_rows(8192, "cpu") < chunk_rows(8192, "cuda")


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("rows", [3, 1 << 20])
def test_the_models_loss_is_the_plain_loss_with_all_gradients(tie, rows, monkeypatch):
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocab, device: rows)
    config = GPTConfig(vocab_size=29, seq_len=8, width=16, layers=2, heads=4, kv_heads=2, ffn=24, tie=tie)
    model = GPT(config, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 29, (2, 3, 8), generator=g)
    targets[0, 2:5] = -100
    sums, found = [], []
    for loss in (plain_language_model_loss, language_model_loss):
        model.zero_grad()
        total, count = loss(model, (tokens, targets))
        assert count.item() == 3 * 8 - 3 and not count.requires_grad
        (total / count).backward()
        sums.append(total.detach())
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-12, atol=0)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-12, atol=1e-14, msg=name)


def test_the_loss_goes_through_the_modules_call_so_that_wrappers_see_it():
    model = GPT(GPTConfig(vocab_size=29, seq_len=8, width=16, layers=1, heads=4, kv_heads=2, ffn=24))
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    language_model_loss(model, (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)))
    assert seen == [tuple]


def test_a_compiled_kernel_gives_the_same_bits_and_scatters_nothing():
    """What is scattered into must lie in memory: on a GPU 1 GB a chunk, written and read once more."""
    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    graphs: list[str] = []
    hidden, weight, targets = problem(dtype=torch.bfloat16)
    logits = F.linear(hidden, weight).detach()
    found = torch.compile(loss_and_gradient, backend=backend, fullgraph=True)(logits, targets)
    assert all(torch.equal(*pair) for pair in zip(found, loss_and_gradient(logits, targets), strict=True))
    assert len(graphs) == 1 and "scatter" not in graphs[0]


@pytest.mark.parametrize("frozen", [False, True])
def test_one_graph_holds_model_and_chunked_loss_when_compiled(frozen):
    model = GPT(GPTConfig(vocab_size=29, seq_len=8, width=16, layers=1, heads=4, kv_heads=2, ffn=24))
    model.loss_kernel = loss_and_gradient          # the custom function, also for one chunk
    model.embedding.requires_grad_(not frozen)     # the output matrix, too
    batch = tuple(torch.randint(0, 29, (2, 3, 8), generator=torch.Generator().manual_seed(1)))
    compiled = torch.compile(lambda b: language_model_loss(model, b), backend="aot_eager", fullgraph=True)
    found = []
    for run in (lambda b: language_model_loss(model, b), compiled):
        model.zero_grad()
        total, _ = run(batch)
        total.backward()
        found.append((total.detach(), [param.grad.clone() for param in model.parameters() if param.requires_grad]))
    torch.testing.assert_close(found[1], found[0])
