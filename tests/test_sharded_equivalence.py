"""The contract for sharding: every stage on every mesh equals one process after five steps, in fp64 to 1e-12 relative.

The bound is that of test_equivalence.py: the same terms, added in another order. The model is tests/blocky.py.
"""

import random
from functools import partial

import pytest
import torch

import rankloom as rl
from awkward import adamw, fingerprint, loss_sum, share, train_plainly
from blocky import Block, Inner, loss_with_penalty, make_blocky, make_turns
from noting import late
from rankloom.train import rules
from rankloom.train.sharded import CanonicalShardedPlacement
from test_equivalence import expect_equal

MESHES = {"1": 1, "2": 2, "3": 3, "4": 4, "(2,2)": rl.Mesh(replicate=2, shard=2), "(3,1)": rl.Mesh(replicate=3), "(1,2)": rl.Mesh(shard=2),
          "(2,3)": rl.Mesh(replicate=2, shard=3)}


def train(world: rl.World, stage: int, optimizer=adamw, clip: float | None = 1.0, loss=loss_sum, **options) -> dict:
    """Five steps with the engine; everything that must equal `plainly`."""
    engine = rl.prepare(make_blocky(), loss=loss, optimizer=optimizer, world=world, clip=clip, stage=stage, **options)
    reports = [engine.step(share(batch, world.rank, world.size)) for batch in make_turns()]
    state = engine.full_state_dict()
    return {"params": state["model"], "optimizer": state["optimizer"]["state"],
            "losses": [r.loss for r in reports], "norms": [r.grad_norm for r in reports]}


def plainly(clip: float | None = 1.0, **options) -> dict:
    """The same steps of plain torch."""
    return train_plainly(clip, model=make_blocky(), batches=make_turns(), **options)


@pytest.fixture(scope="module")
def reference() -> dict:
    torch.set_num_threads(1)
    return plainly()


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_on_every_mesh_equals_one_process(stage, mesh, backend, reference):
    for mine in rl.simulate(MESHES[mesh], lambda world: train(world, stage), backend=backend):
        expect_equal(mine, reference)


@pytest.mark.parametrize("options", [
    {"accumulate": 3}, {"accumulate": 3, "gradient_memory": 1 << 30}, {"accumulate": 3, "gradient_memory": 5000},
    {"reshard_after_forward": False},
    {"recompute": "full"}, {"recompute": "selective", "accumulate": 2}, {"offload_activations": True}, {"recompute": "1 MiB"},
    {"offload": True}, {"offload": True, "accumulate": 3}, {"reshard_after_forward": 1},
    {"ahead": 0}, {"ahead": 3}, {"units": Block}, {"units": Inner}, {"units": (Block, Inner)}, {"units": 500},
    {"units": lambda name, module: name.endswith("inner.lift")}, {"clip": None}], ids=lambda options: "-".join(options))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_option_equals_one_process(stage, options, reference):
    if any(stage not in rules.HAS_EFFECT.get(option, (0, (1, 2, 3)))[1] for option in options):
        with pytest.raises(rl.ConfigError, match="has no meaning at stage"):
            rl.simulate(2, lambda world: train(world, stage, **options))
        return
    expected = plainly(clip=None) if "clip" in options else reference
    for mine in rl.simulate(3, lambda world: train(world, stage, **options)):
        expect_equal(mine, expected)


@pytest.mark.parametrize("first", [True, False], ids=["before the forward", "after it"])
@pytest.mark.parametrize(("stage", "backend"), [(0, "gloo"), (1, "gloo"), (2, "gloo"), (3, "rankloom")])
def test_a_loss_may_read_parameters_itself_where_they_stay_in_memory(stage, backend, first):
    penalty = partial(loss_with_penalty, first=first)
    expected = plainly(loss=penalty)
    for mine in rl.simulate(3, lambda world: train(world, stage, loss=penalty), backend=backend):
        expect_equal(mine, expected)


def test_parameters_that_stay_cut_over_neighbours_equal_one_process(reference):
    for mine in rl.simulate(rl.Mesh(shard=4), lambda world: train(world, 3, reshard_after_forward=2, accumulate=2)):
        expect_equal(mine, reference)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_processes_equal_one_process(stage, reference):
    for mine in rl.spawn(2, STAGES[stage]):
        expect_equal(mine, reference)


def train_at_1(world: rl.World) -> dict:
    """At the top of the module, so that a process can be told to run it."""
    return train(world, 1)


def train_at_2(world: rl.World) -> dict:
    """See `train_at_1`."""
    return train(world, 2, accumulate=2)


def train_at_3(world: rl.World) -> dict:
    """See `train_at_1`."""
    return train(world, 3)


STAGES = {1: train_at_1, 2: train_at_2, 3: train_at_3}


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_delays_before_every_collective_change_nothing(stage, backend, reference):
    def train_with_delays(world):
        draw = random.Random(world.rank)
        for group in (world, world.group("shard"), world.group("replicate")):
            group._launch = late(group._launch, draw, 0.003)
        return train(world, stage)

    for mine in rl.simulate(rl.Mesh(replicate=2, shard=2), train_with_delays, backend=backend):
        expect_equal(mine, reference)


def train_for_its_hash(world: rl.World, stage: int, precision: str = "fp32") -> str:
    """Three deterministic steps with dropout on, in which blocks change places and back; the hash of all that came out."""
    engine = rl.prepare(make_blocky(torch.float32, dropout=0.2), loss=loss_sum, optimizer=fused_adamw, world=world, clip=1.0, stage=stage,
                        precision=precision, deterministic=True)
    assert stage == 0 or isinstance(engine.placement, CanonicalShardedPlacement)
    losses = [engine.step(share(batch, world.rank, world.size)).loss for batch in make_turns(3)]
    return fingerprint(engine.full_state_dict(), losses)


def fused_adamw(params):
    """Fused, as training runs use it."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_training_has_one_hash_for_all_stages_and_meshes(precision):
    hashes = {h for stage in (0, 1, 2, 3) for mesh in (1, 2, 3, 5, rl.Mesh(replicate=2, shard=2), rl.Mesh(replicate=2, shard=3))
              for h in rl.simulate(mesh, lambda world, stage=stage: train_for_its_hash(world, stage, precision))}
    assert len(hashes) == 1


def test_a_parameter_without_elements_changes_no_bit_of_a_deterministic_norm_between_stages():
    """Sums of several numbers are rounded by their places."""
    class WithNothing(torch.nn.Sequential):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(*(torch.nn.Linear(5, 5) for _ in range(6)))
            self[0].nothing = torch.nn.Parameter(torch.zeros(0, 5))
            self.double()

        def forward(self, x):
            return self[0].nothing.sum() + sum(layer(x + number) for number, layer in enumerate(self))

    models, draw = [WithNothing() for _ in range(4)], torch.Generator().manual_seed(0)
    batches = torch.randn(20, 8, 5, dtype=torch.float64, generator=draw)

    def norms(world, stage):
        engine = rl.prepare(models[stage], loss=lambda m, x: (m(x).square().sum(), len(x)), optimizer=adamw, world=world, stage=stage,
                            deterministic=True)
        return [engine.step(batch).grad_norm for batch in batches]

    at_0, *others = [rl.simulate(1, lambda world, stage=stage: norms(world, stage))[0] for stage in range(4)]
    assert others == [at_0] * 3


def test_two_optimizers_one_of_them_for_whole_matrices_equal_one_process():
    def muon_and_adamw(params):
        matrices = [p for p in params if p.ndim == 2]
        return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-2)]

    expected = plainly(optimizer=muon_and_adamw)
    for stage in (1, 2, 3):
        for mine in rl.simulate(3, lambda world, stage=stage: train(world, stage, optimizer=muon_and_adamw)):
            # Muon orthogonalises in bf16, so that rounding of its input may turn a bf16 digit: 2**-8 of an update of 0.01, five times.
            for name, value in expected["params"].items():
                torch.testing.assert_close(mine["params"][name], value, rtol=0, atol=5 * 1e-2 * 2**-8)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2, "accumulate": 3}, {"stage": 3}, {"stage": 3, "offload": True}], ids=str)
def test_gradients_that_a_hook_of_the_optimizer_clips_tensor_by_tensor_equal_one_process(options):
    """It is given whole tensors: of slices, each rank would clip by a norm of its own."""
    def clip_each(optimizer, *_):
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_((0.01 / (param.grad.norm() + 1e-6)).clamp(max=1.0))

    def hooked(params):
        made = adamw(params)
        made.register_step_pre_hook(clip_each)
        return made

    expected = plainly(optimizer=hooked, clip=None)
    for mine in rl.simulate(3, lambda world: train(world, optimizer=hooked, clip=None, **options)):
        expect_equal(mine, expected)
