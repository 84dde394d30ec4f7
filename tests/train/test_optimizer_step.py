"""From summed gradients to an update: one factor, the same in a fused optimizer's pass and in one of our own."""

import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import rankloom as rl
from rankloom.shard.optimizer import Optimizers
from rankloom.train import optimizer_step
from rankloom.train.memory_report import peak_memory
from rankloom.train.optimizer_step import apply_gradients, global_norm

OPTIMIZERS = {
    "sgd": lambda params, **more: torch.optim.SGD(params, lr=0.1, momentum=0.9, **more),
    "adam": lambda params, **more: torch.optim.Adam(params, lr=0.1, **more),
    "adamw": lambda params, **more: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, **more),
}


def make(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (3, 8)) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Parameters and the flat buffers that their gradients are views of."""
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=draw).to(dtype)) for n in sizes]
    flats = [torch.zeros(n, dtype=dtype) for n in sizes]
    for param, flat in zip(params, flats):
        param.grad = flat
    return params, flats


def fill(flats: list[torch.Tensor], step: int, scale: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(100 + step)
    for flat in flats:
        flat.copy_(torch.randn(flat.shape, generator=draw) * scale)


def totals(loss: float = 6.0, count: float = 4.0) -> torch.Tensor:
    return torch.tensor([loss, count], dtype=torch.float64)


def step_on(optimizer, params, flats, steps: int, *, scale: float = 1.0, clip: float | None = None, before=lambda step: None):
    """Steps with gradients of their own, and what the last one said. before: called with the number of each"""
    for step in range(steps):
        before(step)
        for param, flat in zip(params, flats):
            param.grad = flat
        fill(flats, step, scale)
        said = apply_gradients(optimizer, flats, global_norm(flats), totals(), scale=scale, clip=clip)
    return said


def run(name: str, fused: bool, clip: float | None, steps: int = 4, scale: float = 1.0, dtype: torch.dtype = torch.float32):
    params, flats = make(dtype)
    optimizer = OPTIMIZERS[name](params, **({"fused": True} if fused else {}))
    said = step_on(optimizer, params, flats, steps, scale=scale, clip=clip)
    return params, [p.grad.clone() for p in params], said


def plain(name: str, clip: float | None, dtype: torch.dtype, steps: int = 4):
    """torch's own way: divide, clip, step."""
    params, flats = make(dtype)
    optimizer = OPTIMIZERS[name](params)
    for step in range(steps):
        fill(flats, step)
        for param, flat in zip(params, flats):
            param.grad = flat / 4.0
        norm = nn.utils.clip_grad_norm_(params, clip or math.inf).item()
        optimizer.step()
    return params, [p.grad for p in params], norm


@pytest.mark.parametrize("clip", [None, 0.3, 100.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_that_of_torch_after_dividing_and_clipping(name, clip):
    params, grads, (total, count, norm, finite) = run(name, fused=False, clip=clip, dtype=torch.float64)
    theirs, their_grads, their_norm = plain(name, clip, torch.float64)
    assert (total, count, finite) == (6.0, 4.0, True) and norm == pytest.approx(their_norm, rel=1e-14)
    for mine, reference in zip(params + grads, theirs + their_grads):
        torch.testing.assert_close(mine, reference, rtol=1e-13, atol=1e-15)   # one factor in place of two: a rounding each


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fused_way_leaves_the_same_parameters_and_the_same_mean_clipped_gradients(name, clip, scale):
    """The fused kernel divides by 1/factor, the plain way multiplies: two roundings of 2**-24 a step, and Adam's quotient is as exact."""
    fused = run(name, fused=True, clip=clip, scale=scale)
    unfused = run(name, fused=False, clip=clip, scale=scale)
    for mine, reference in zip(fused[0] + fused[1], unfused[0] + unfused[1]):
        torch.testing.assert_close(mine, reference, rtol=4 * 8 * 2**-24, atol=4 * 8 * 2**-24)
    if clip:
        norm = torch.cat(fused[1]).norm().item()
        assert norm == pytest.approx(clip, rel=1e-5), "gradients are left as they were clipped"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fused_step_on_gradients_in_fp64_is_that_of_torch_to_fp64(name):
    """torch hands a fused kernel the factor in fp32, which would round every update of a run in fp64."""
    mine, _, _ = run(name, fused=True, clip=0.3, scale=3.0, dtype=torch.float64)
    reference, _, _ = run(name, fused=False, clip=0.3, scale=3.0, dtype=torch.float64)
    for param, wanted in zip(mine, reference, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-12)


class Clipping(torch.optim.AdamW):
    """Looks at gradients before torch does."""

    def step(self, closure=None):
        clip_each(self)
        return super().step(closure)


def clip_each(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.grad.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("derived", [False, True])
def test_whoever_reads_gradients_before_a_fused_step_reads_the_mean(derived):
    """They were sums, as the kernel takes them: what clips each gradient clipped nearly all of it. A hook may come later, too."""
    found = {}
    for fused in (False, True):
        params, flats = make()
        optimizer = (Clipping if derived else torch.optim.AdamW)(params, lr=0.1, fused=fused)
        step_on(optimizer, params, flats, 3, before=lambda step: step == 1 and not derived and optimizer.register_step_pre_hook(clip_each))   # noqa: B023
        found[fused] = params
    for one, other in zip(found[False], found[True]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)   # two roundings of 2**-24 a step, and Adam's quotient


@pytest.mark.parametrize("register", ["register_step_post_hook", "register_step_pre_hook", register_optimizer_step_post_hook,
                                      register_optimizer_step_pre_hook], ids=["post", "pre", "post of all", "pre of all"])
def test_hooks_around_a_fused_step_run_in_no_step_that_is_skipped_and_see_mean_gradients(register):
    """A bound on weights in such a hook would change them; and gradients were sums for hooks of all optimizers."""
    params, flats = make()
    optimizer, seen = torch.optim.AdamW(params, lr=0.1, fused=True), []
    hook = lambda one, *_: seen.append(torch.cat([param.grad for param in one.param_groups[0]["params"]]))
    handle = getattr(optimizer, register)(hook) if isinstance(register, str) else register(hook)
    try:
        step_on(optimizer, params, flats, 1)
        fill(flats, 0)
        torch.testing.assert_close(seen, [torch.cat(flats) / 4.0], rtol=2**-23, atol=0)   # 1/4 is exact: one rounding
        flats[0][0] = math.inf
        assert not apply_gradients(optimizer, flats, global_norm(flats), totals(), scale=1.0, clip=None)[3] and len(seen) == 1
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_of_several_fused_optimizers_may_get_a_hook_between_two_steps(kind):
    """What the kernel scaled by in the step before was kept, and the gradients were scaled twice."""
    found = {}
    for hooked in (False, True):
        params, flats = make()
        one, other = (kind([param], lr=0.1, fused=True) for param in params)
        optimizer = Optimizers([one, other])
        step_on(optimizer, params, flats, 3, before=lambda step: step == 1 and hooked and one.register_step_pre_hook(lambda *_: None))   # noqa: B023
        found[hooked] = params
    for one, other in zip(found[False], found[True]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)   # as above


def test_a_hook_that_comes_after_a_skipped_step_skips_no_other():
    params, flats = make()
    optimizer = torch.optim.AdamW(params, lr=0.1, fused=True)
    fill(flats, 0)
    assert not apply_gradients(optimizer, flats, torch.tensor(math.inf), totals(), scale=1.0, clip=None)[3]
    optimizer.register_step_post_hook(lambda *_: None)
    before = params[0].detach().clone()
    step_on(optimizer, params, flats, 1)
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_the_norm_is_that_of_the_mean_gradient_whatever_the_loss_scale(scale):
    params, flats = make(torch.float64)
    fill(flats, 0, scale)
    expected = torch.cat(flats).norm().item() / scale / 4.0
    _, _, norm, _ = apply_gradients(OPTIMIZERS["sgd"](params), flats, global_norm(flats), totals(), scale=scale, clip=None)
    assert norm == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 1e8), (torch.bfloat16, 3.0)])
def test_the_factor_of_gradients_in_16_bits_is_not_rounded_to_them(dtype, count):
    params, flats = make(dtype, sizes=(1000,))
    fill(flats, 0, scale=1000.0)
    expected = flats[0] / count
    apply_gradients(torch.optim.SGD(params, lr=0.0), flats, global_norm(flats), totals(count=count), scale=1.0, clip=None)
    assert expected.any() and (params[0].grad == expected).float().mean() > 0.99   # times 1/count, or divided: a tie may fall otherwise


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", ["nan gradient", "inf gradient", "nan loss", "inf loss", "no count", "nan count", "inf count"])
def test_nothing_is_updated_when_anything_is_not_finite(bad, name, fused):
    params, flats = make()
    optimizer = OPTIMIZERS[name](params, **({"fused": True} if fused else {}))
    fill(flats, 0)
    assert apply_gradients(optimizer, flats, global_norm(flats), totals(), scale=1.0, clip=1.0)[3]
    before = [p.detach().clone() for p in params]
    state = [{key: value.clone() for key, value in optimizer.state[p].items() if torch.is_tensor(value)} for p in params]
    fill(flats, 1)
    numbers = totals()
    if "gradient" in bad:
        flats[1][5] = math.nan if "nan" in bad else math.inf
    else:
        numbers[0 if "loss" in bad else 1] = {"no count": 0.0}.get(bad, math.nan if "nan" in bad else math.inf)
    assert not apply_gradients(optimizer, flats, global_norm(flats), numbers, scale=1.0, clip=1.0)[3]
    assert all(torch.equal(p, b) for p, b in zip(params, before))
    for param, held in zip(params, state):
        assert all(torch.equal(optimizer.state[param][key], value) for key, value in held.items())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_that_is_skipped_leaves_nothing_to_remember(name, fused, together):
    """torch's fused SGD takes momentum from memory as it comes, and calls it momentum although the kernel skipped."""
    params, flats = make()
    parts = [OPTIMIZERS[name]([param], **({"fused": True} if fused else {})) for param in params]
    optimizer = Optimizers(parts) if together else OPTIMIZERS[name](params, **({"fused": True} if fused else {}))
    fill(flats, 0)
    flats[0][0] = math.inf
    assert not apply_gradients(optimizer, flats, global_norm(flats), totals(), scale=1.0, clip=None)[3]
    assert not optimizer.state
    fill(flats, 0)
    assert apply_gradients(optimizer, flats, global_norm(flats), totals(), scale=1.0, clip=None)[3]
    for mine, never_skipped in zip(params, run(name, fused, clip=None, steps=1)[0], strict=True):
        torch.testing.assert_close(mine, never_skipped, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_buffers_of_different_dtype_have_one_norm(dtypes):
    flats = [torch.full((4,), 3.0, dtype=dtypes[0]), torch.full((4,), 4.0, dtype=dtypes[1])]
    assert global_norm(flats).item() == 10.0 and global_norm(flats).dtype == torch.float64


def test_a_norm_that_overflows_sixteen_bits_does_not_overflow():
    assert global_norm([torch.full((4,), 60000.0, dtype=torch.float16)]).item() == 120000.0


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_ranks_that_share_the_work_of_a_norm_get_the_norm_of_one(p, monkeypatch):
    """Uneven slices, fewer elements than ranks, one buffer empty."""
    monkeypatch.setattr(optimizer_step, "SHARE_NORM_ABOVE", 0)
    flats = [torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (37, 2, 0, 5)]
    for norm, calls in rl.simulate(p, lambda w: (global_norm(flats, w).item(), w.ledger.calls)):
        assert norm == pytest.approx(torch.cat(flats).norm().item(), rel=1e-14)
        assert calls == (p > 1)


def test_a_small_norm_is_not_worth_a_message():
    assert rl.simulate(2, lambda w: (global_norm([torch.ones(4)], w).item(), w.ledger.calls)) == [(2.0, 0)] * 2


def test_peak_memory_is_the_peak_of_the_process_in_bytes():
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(48 << 20, dtype=torch.uint8)
    assert before > 50 << 20 and peak_memory(torch.device("cpu")) >= before
    del block
    assert peak_memory(torch.device("cpu")) >= before
