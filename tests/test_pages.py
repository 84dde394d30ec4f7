"""The Python of docs/sharding.md, tensor.md, context.md and pipeline.md runs, and gives what one process gives."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.models.loss import language_model_loss

DOCS = Path(__file__).parent.parent / "docs"
CONFIG = rl.GPTConfig(vocab_size=32, seq_len=16, width=16, layers=4, heads=2, kv_heads=2, ffn=24)
MODEL = rl.GPT(CONFIG, dtype=torch.float64)
TOKENS, TARGETS = torch.randint(0, 32, (2, 2, 16), generator=torch.Generator().manual_seed(0))
MICROBATCHES = [(TOKENS, TARGETS)] * 8
adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)


def python_of(page: str) -> str:
    """The first block of Python of a page."""
    return re.search(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL).group(1)


def run(code: str, **names: object) -> dict:
    """Run code with these names; returns them with those that it made."""
    exec(compile(code, "docs", "exec"), names)
    return names


def test_the_model_of_the_sharding_page_that_no_rank_could_hold_has_the_loss_of_one_process():
    missing = "loss=language_model_loss, optimizer=adamw"
    code = python_of("sharding.md").replace("...", missing).replace("rl.init(rl.Mesh(pipe=2, shard=2, tensor=2))", "world")

    def body(world):
        engine = run(code, rl=rl, config=CONFIG, world=world, language_model_loss=language_model_loss, adamw=adamw)["engine"]
        return engine.evaluate([(TOKENS, TARGETS)]).loss

    total, count = rl.GPT(CONFIG, seed=0)(TOKENS, targets=TARGETS)
    assert rl.simulate(rl.Mesh(pipe=2, shard=2, tensor=2), body) == pytest.approx([total.item() / count.item()] * 8, rel=1e-5)   # fp32


def test_the_line_of_the_tensor_page_gives_the_logits_of_one_process():
    def body(world):
        model = copy.deepcopy(MODEL)
        run(python_of("tensor.md"), rl=rl, model=model, plan=None, world=world)
        return model(TOKENS).detach()

    for logits in rl.simulate(rl.Mesh(tensor=2), body):
        torch.testing.assert_close(logits, MODEL(TOKENS).detach(), rtol=1e-12, atol=1e-12)


def test_the_calls_of_the_context_page_add_up_to_the_loss_of_packed_rows_in_one_process():
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])

    def body(world):
        names = run(python_of("context.md"), model=copy.deepcopy(MODEL), world=world, tokens=TOKENS, targets=TARGETS, numbers=documents)
        return names["total"].item(), names["count"].item()

    losses, counts = zip(*rl.simulate(rl.Mesh(context=2), body))
    total, count = MODEL(TOKENS, targets=TARGETS, documents=documents)
    assert (sum(losses), sum(counts)) == (pytest.approx(total.item(), rel=1e-12), count.item())


def test_the_loop_of_the_pipeline_page_makes_the_clipped_step_of_one_process():
    update = re.search(r"then step\.\n\n(.*?)\n\n- ", (DOCS / "pipeline.md").read_text(), re.DOTALL).group(1)
    params, stepping = update.split("\n", 1)
    code = "\n".join((python_of("pipeline.md").replace("rl.GPT(config)", "copied()"), params.replace("      ", "    ", 1),
                      "    optimizer = sgd(params)", stepping.replace("      ", "    "), "    return model.state_dict()"))

    plain = copy.deepcopy(MODEL)
    optimizer, count = sgd(list(plain.parameters())), 0
    for tokens, targets in MICROBATCHES:
        total, items = plain(tokens, targets=targets)
        total.backward()
        count += items
    for param in plain.parameters():
        param.grad /= count
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    body = run(code, rl=rl, nn=nn, sgd=sgd, copied=lambda: copy.deepcopy(MODEL), batches=MICROBATCHES)["body"]
    first, last = rl.simulate(rl.Mesh(pipe=2), body)
    for name, value in plain.state_dict().items():
        mine = first if torch.equal(last[name], MODEL.state_dict()[name]) else last   # each rank has updated its own stages
        torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that does not magnify rounding."""
    return torch.optim.SGD(params, lr=0.1)
