"""The same promises on a CUDA device. Run there with `pytest -m gpu`; without one they are not collected as passed, but skipped."""

import pytest
import torch

import rankloom as rl
from awkward import adamw, fingerprint, loss_sum, make_batches, make_model, train_plainly
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def world():
    joined = rl.init(device="cuda")
    yield joined
    joined.close()


def test_training_on_a_gpu_equals_the_cpu(world):
    engine = rl.prepare(make_model(), loss=loss_sum, optimizer=adamw, world=world, accumulate=3, clip=1.0)
    losses = [engine.step(batch).loss for batch in make_batches()]
    truth = train_plainly(clip=1.0)
    assert losses == pytest.approx(truth["losses"], rel=1e-12)   # the bound of test_equivalence.py: another order of the same sums
    for name, expected in truth["params"].items():
        torch.testing.assert_close(engine.full_state_dict()["model"][name].cpu(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_training_on_a_gpu_repeats_its_bits(world, precision):
    def run() -> str:
        engine = rl.prepare(make_model(torch.float32, dropout=0.2), loss=loss_sum, optimizer=adamw, world=world, precision=precision,
                            deterministic=True)
        losses = [engine.step(batch).loss for batch in make_batches()]
        state = engine.full_state_dict()
        state["model"] = {name: t.cpu() for name, t in state["model"].items()}
        state["optimizer"]["state"] = {n: {k: v.cpu() for k, v in held.items()} for n, held in state["optimizer"]["state"].items()}
        return fingerprint(state, losses)

    assert run() == run()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_compiled_gpt_learns_on_a_gpu(world, precision):
    model = GPT(preset("1M", vocab_size=256, seq_len=64), device="cuda")
    for block in model.blocks:
        block.compile()
    engine = rl.prepare(model, loss=language_model_loss, world=world, clip=1.0, precision=precision,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True))
    text = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0))
    losses = [engine.step((text[:, :-1].contiguous(), text[:, 1:].contiguous())).loss for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0], "eight rows are learned by heart"
