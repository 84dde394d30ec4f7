"""The contract: every layout equals one process with the whole batch, after five steps, in fp64 to 1e-12 relative.

Why 1e-12: gradients are the same terms added in another order. A sum of n terms in another order differs by at most about
n * 2**-53 of the sum of their sizes; n is below 200 here and AdamW divides by the gradient's own size, so a bound of
200 * 1.1e-16 * (a condition number below 50) is 1.1e-12. Where the order is the same the tolerance is zero.
"""

import random

import pytest
import torch

import rankloom as rl
from awkward import adamw, fingerprint, loss_sum, make_batches, make_model, share, train_plainly
from closeness import expect_close
from noting import late

pytestmark = pytest.mark.gloo

RTOL = 1e-12


def train(world: rl.World, accumulate: int = 1, clip: float | None = 1.0, all_reduce: str = "backend") -> dict:
    """Five steps with the engine; everything that must equal `train_plainly`."""
    model = make_model()
    engine = rl.prepare(model, loss=loss_sum, optimizer=adamw, world=world, accumulate=accumulate, clip=clip, all_reduce=all_reduce)
    reports = [engine.step(share(batch, world.rank, world.size)) for batch in make_batches()]
    state = engine.full_state_dict()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"params": state["model"], "optimizer": state["optimizer"]["state"], "grads": grads,
            "losses": [r.loss for r in reports], "norms": [r.grad_norm for r in reports], "counts": [r.count for r in reports]}


def train_with_delays(world: rl.World) -> dict:
    """The same, with a random pause before every collective: a missing wait shows."""
    world._collect = late(world._collect, random.Random(world.rank), 0.004)
    return train(world, accumulate=3)


def expect_equal(mine: dict, reference: dict) -> None:
    """Parameters, optimizer state, losses and norms, name by name; and gradients, but of those that are gone once they are used."""
    for part in ("params", *{"grads"} & mine.keys()):
        expect_close(mine[part], reference[part], RTOL)
    assert mine["optimizer"].keys() == reference["optimizer"].keys()
    for name, held in reference["optimizer"].items():
        expect_close(mine["optimizer"][name], held, RTOL)
    for part in ("losses", "norms"):
        assert mine[part] == pytest.approx(reference[part], rel=RTOL)


@pytest.fixture(scope="module")
def reference() -> dict:
    torch.set_num_threads(1)
    return train_plainly(clip=1.0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_equals_one_process(ranks, accumulate, reference):
    for mine in rl.simulate(ranks, lambda world: train(world, accumulate)):
        expect_equal(mine, reference)


def test_training_without_clipping_equals_one_process():
    for mine in rl.simulate(3, lambda world: train(world, clip=None)):
        expect_equal(mine, train_plainly(clip=None))


def test_the_reported_count_is_the_number_of_tokens_that_were_not_padding():
    expected = [float((targets != -100).sum()) for _, targets in make_batches()]
    assert rl.simulate(2, train)[1]["counts"] == expected


def test_training_in_processes_equals_one_process(reference):
    for mine in rl.spawn(2, train):
        expect_equal(mine, reference)


def test_training_with_random_delays_before_every_collective_equals_one_process(reference):
    for mine in rl.simulate(3, train_with_delays):
        expect_equal(mine, reference)


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_on_the_ring_equals_one_process(ranks, reference):
    for mine in rl.simulate(ranks, lambda world: train(world, 3, all_reduce="ring")):
        expect_equal(mine, reference)


def train_for_its_hash(world: rl.World, precision: str, rows: int = 25) -> str:
    """Five deterministic steps with dropout on; the hash of all that came out."""
    engine = rl.prepare(make_model(torch.float32, dropout=0.2), loss=loss_sum, optimizer=adamw, world=world, clip=1.0,
                        precision=precision, deterministic=True)
    losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_batches(rows=rows)]
    return fingerprint(engine.full_state_dict(), losses)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_training_has_one_hash_for_1_to_8_ranks(precision):
    hashes = {h for ranks in range(1, 9) for h in rl.simulate(ranks, lambda world: train_for_its_hash(world, precision))}
    assert len(hashes) == 1


def test_deterministic_training_in_processes_has_the_same_hash():
    assert set(rl.spawn(2, train_in_fp32)) == set(rl.simulate(1, train_in_fp32))


@pytest.mark.parametrize("lie", [torch.clone, lambda x: x.t().clone().t()], ids=["rows", "columns"])
def test_deterministic_training_on_numbers_has_the_same_bits_wherever_they_lie_in_memory(lie):
    """Kernels for few rows may round by address and stride, and a rank's rows begin where its neighbour's end."""
    draw = torch.Generator().manual_seed(0)
    weight, x, y = (torch.randn(n, 6, generator=draw) for n in (6, 24, 24))

    def body(world):
        model = torch.nn.Linear(6, 6, bias=False)
        model.weight = torch.nn.Parameter(weight.clone())
        engine = rl.prepare(model, loss=lambda m, b: ((m(b[0]) - b[1]).square().sum(), len(b[0])), world=world, optimizer=adamw,
                            deterministic=True)
        losses = [engine.step(share((lie(x), y), world.rank, world.size)).loss for _ in range(3)]
        return fingerprint(engine.full_state_dict(), losses)

    assert len({print_ for ranks in range(1, 9) for print_ in rl.simulate(ranks, body)}) == 1


def train_in_fp32(world: rl.World) -> str:
    """At the top of the module, so that a process can be told to run it."""
    return train_for_its_hash(world, "fp32")


def test_a_batch_of_fewer_rows_than_logical_shards_is_still_deterministic():
    assert len({h for ranks in (1, 2, 3, 5) for h in rl.simulate(ranks, lambda w: train_for_its_hash(w, "fp32", rows=5))}) == 1


def test_the_free_order_does_depend_on_the_number_of_ranks():
    """Otherwise the tests above would prove nothing."""
    def free(world):
        engine = rl.prepare(make_model(torch.float32), loss=loss_sum, optimizer=adamw, world=world, clip=1.0)
        losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_batches()]
        return fingerprint(engine.full_state_dict(), losses)

    assert len({rl.simulate(ranks, free)[0] for ranks in (1, 2, 3, 4, 5)}) > 1


def test_deterministic_training_equals_one_process_in_fp64():
    def body(world):
        engine = rl.prepare(make_model(), loss=loss_sum, optimizer=adamw, world=world, clip=1.0, deterministic=6)
        losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_batches()]
        return losses, engine.full_state_dict()["model"]

    truth = train_plainly(clip=1.0)
    for losses, params in rl.simulate(4, body):
        assert losses == pytest.approx(truth["losses"], rel=RTOL)
        for name, expected in truth["params"].items():
            torch.testing.assert_close(params[name], expected, rtol=RTOL, atol=RTOL)


def test_these_ranks_meet_over_gloo():
    assert rl.simulate(2, lambda world: world.backend) == ["gloo", "gloo"]
