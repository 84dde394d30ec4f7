"""Compressed gradients at every stage and on every axis: near the exact run, equal copies, fewer bytes, nothing accepted and ignored."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.tensors import bytes_of
from rankloom.comm.compress import Summing
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.parallel.zero import step_bill
from rankloom.train.run.config import load_config

SHAPE = GPTConfig(vocab_size=64, seq_len=16, width=32, layers=2, heads=4, kv_heads=2, ffn=64)
DATA = [(rl.Mesh(shard=2), 1), (rl.Mesh(shard=3), 2), (rl.Mesh(shard=2), 3), (rl.Mesh(replicate=2, shard=2), 1),
        (rl.Mesh(replicate=2, shard=2), 3)]
SPLIT = [(rl.Mesh(replicate=2, tensor=2), 0), (rl.Mesh(shard=2, tensor=4), 2), (rl.Mesh(replicate=2, pipe=2), 0),
         (rl.Mesh(shard=2, pipe=2), 1), (rl.Mesh(shard=2, context=2), 3), (rl.Mesh(replicate=2, expert=2), 0),
         (rl.Mesh(shard=2, expert=2), 3)]
MESHES = pytest.mark.parametrize(("mesh", "stage"), DATA + SPLIT, ids=str)


def gpt(mesh: rl.Mesh) -> rl.GPT:
    """Embedding and output are one matrix, which the first and the last stage of a pipeline hold."""
    moe = MoEConfig(experts=4, top_k=2, ffn=32) if mesh.expert > 1 else None
    return rl.GPT(replace(SHAPE, moe=moe, tie=True), seed=0)


def batch(world: rl.World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = world.group("replicate", "shard", "expert")
    tokens = torch.randint(0, 64, (12, 17), generator=torch.Generator().manual_seed(step)).tensor_split(rows.size)[rows.rank]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(world: rl.World, stage: int, steps: int = 4, **more) -> rl.Engine:
    engine = rl.prepare(gpt(world.mesh), loss=language_model_loss, world=world, stage=stage,
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.5), **more)
    for step in range(steps):
        engine.step(batch(world, step))
    return engine


def weights(engine: rl.Engine) -> torch.Tensor:
    return torch.cat([value.flatten() for value in engine.full_state_dict()["model"].values()])


@MESHES
def test_int8_ends_near_the_exact_run_at_every_stage_and_on_every_axis(mesh, stage):
    """Rounding to 1/127 of a block's largest value is noise of 1/127/sqrt(12), and that value is some 5 times the root mean square: 1 %
    for each rounding, of which sums over 2 or 3 ranks have up to 4, so 2 %; 5 % with what other gradients have made of it after 4 steps.
    """
    def body(world):
        first, exact, near = (weights(trained(world, stage, steps, compress=name))
                              for steps, name in ((0, "none"), (4, "none"), (4, "int8")))
        return ((near - exact).norm() / (exact - first).norm()).item()

    for off in rl.simulate(mesh, body):
        assert 0 < off < 0.05, "0 would mean that nothing was compressed"


@MESHES
def test_gradients_are_weighed_by_the_items_of_the_step_on_every_axis(mesh, stage):
    factors = rl.simulate(mesh, lambda world: trained(world, stage, steps=1, compress="int8").placement.summing.factor)
    assert factors == [1 / (12 * 16)] * mesh.size


@MESHES
@pytest.mark.parametrize("compress", ["1bit", "int4"])
def test_copies_of_parameters_keep_the_same_bits_on_all_ranks(mesh, stage, compress):
    """Blocks of other values round a copy differently: norms of tensor ranks, the tied embedding of a pipeline, replicas."""
    def body(world):
        parts = trained(world, stage, compress=compress).placement.parts()
        return {(part.name, str(part.box)): bytes_of(part.values).tolist() for part in parts}

    found = rl.simulate(mesh, body)
    several = 0
    for key in {key for parts in found for key in parts}:
        copies = [parts[key] for parts in found if key in parts]
        several += len(copies) > 1
        assert all(copy == copies[0] for copy in copies), key
    assert several or mesh.product() == f"shard {mesh.shard}", "only slices have no copies"


@pytest.mark.parametrize(("mesh", "stage"), DATA, ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compress", ["bf16", "int8", "1bit"])
def test_a_step_sends_what_its_bill_says_and_gradients_only_once(mesh, stage, accumulate, compress):
    def body(world, name):
        groups = [world.group(axis) for axis in mesh.sizes() if mesh.sizes()[axis] > 1]
        engine = trained(world, stage, 1, compress=name, accumulate=accumulate)
        before = sum(group.ledger.bytes for group in groups)
        engine.step(batch(world, 1))
        once = sum(gradient.sums.bill().sent for gradient in engine.placement.sharding.gradients())
        gathers = step_bill(engine.placement.sharding, 1).sent - once if stage < 3 else None
        bill = step_bill(engine.placement.sharding, accumulate).sent
        assert name == "none" or gathers is None or bill == gathers + once, "reduced in every backward"
        return sum(group.ledger.bytes for group in groups) - before, bill

    exact, lossy = (rl.simulate(mesh, lambda world, name=name: body(world, name)) for name in ("none", compress))
    ranks = [size for size in (mesh.replicate, mesh.shard) if size > 1]
    count = sum(2 * 8 * (p - 1) // p for p in ranks)   # an all-reduce of one number tells how many items the step has
    for (sent, bill), (fewer, lower) in zip(exact, lossy):
        assert lower < bill
        assert sent - fewer == bill - lower - count


@pytest.mark.parametrize(("mesh", "stage"), [*DATA, *SPLIT[:2]], ids=str)
def test_exact_steps_first_are_those_of_the_exact_run_to_the_bit(mesh, stage):
    def body(world):
        exact, later, compressed = (weights(trained(world, stage, steps, **more)) for steps, more in (
            (2, {}), (2, {"compress": "1bit", "compress_after": 2}), (3, {"compress": "1bit", "compress_after": 2})))
        return torch.equal(exact, later), torch.equal(weights(trained(world, stage, 3)), compressed)

    assert rl.simulate(mesh, body) == [(True, False)] * mesh.size


@pytest.mark.parametrize(("mesh", "stage"), [(rl.Mesh(replicate=2), 0), DATA[0], DATA[2], DATA[4], SPLIT[0]], ids=str)
@pytest.mark.parametrize("path", ["state dict", "checkpoint"])
def test_a_state_begins_without_what_the_engine_that_loads_it_remembers_of_other_steps(mesh, stage, path, tmp_path):
    def body(world):
        fresh, used = (trained(world, stage, steps, compress="1bit") for steps in (0, 3))
        if path == "checkpoint":
            fresh.save(tmp_path)
        state = fresh.full_state_dict()
        losses = []
        for engine in (fresh, used):
            engine.load(tmp_path) if path == "checkpoint" else engine.load_full_state_dict(state)
            losses.append([engine.step(batch(world, step)).loss for step in range(4)])
        return losses[0] == losses[1]

    assert all(rl.simulate(mesh, body))


def remembered(summing: Summing) -> int:
    """Bytes of all tensors that its compressions reach, and nothing else."""
    reached, found = list(summing._lossy), {}
    while reached:
        thing = reached.pop()
        if isinstance(thing, torch.Tensor):
            found[id(thing)] = thing.nbytes
        elif isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("rankloom.comm"):
            reached += [part for part in gc.get_referents(thing) if not callable(part)]
    return sum(found.values())


@pytest.mark.parametrize(("compress", "mesh", "stage"), [
    ("int8", rl.Mesh(replicate=2), 0), ("topk", rl.Mesh(replicate=2), 0), ("powersgd:2", rl.Mesh(replicate=2), 0), *(
        ("1bit", *data) for data in DATA), ("int4", *SPLIT[0]), ("topk", rl.Mesh(replicate=2, shard=2), 3)], ids=str)
def test_what_compression_remembers_is_told_with_the_gradients_that_a_rank_holds(compress, mesh, stage):
    def body(world):
        exact, lossy = (trained(world, stage, 1, compress=name) for name in ("none", compress))
        summing = lossy.placement.summing
        return lossy.held().gradients - exact.held().gradients, remembered(summing)

    for told, found in rl.simulate(mesh, body):
        assert told == found > 0


def test_a_state_that_is_refused_takes_nothing_away_of_what_is_remembered():
    def body(world):
        tried, plain = (trained(world, 2, 3, compress="1bit") for _ in range(2))
        with pytest.raises(rl.ModelMismatch):
            tried.placement.load({"other": torch.zeros(1)})
        return [[engine.step(batch(world, step)).loss for step in range(4)] for engine in (tried, plain)]

    for tried, plain in rl.simulate(rl.Mesh(shard=2), body):
        assert tried == plain


class Parts(nn.Module):
    """Sizes that leave gaps in a flat buffer, and a matrix that is not used in every step."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.first, self.second, self.idle = (nn.Parameter(torch.randn(n, generator=draw)) for n in (5, 37, 50))
        self.uses_idle = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = (x[:, :5] * self.first).sum(1) + (x[:, :37] * self.second).sum(1)
        return out + (x * self.idle).sum(1) if self.uses_idle else out


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mesh", [rl.Mesh(shard=2), rl.Mesh(shard=2, replicate=2)], ids=str)
def test_slices_hold_nothing_but_gradients(mesh, stage):
    """One bit has no zero: it writes something between tensors, and to parameters that no rank has used."""
    def body(world):
        model = Parts()
        engine = rl.prepare(model, loss=lambda model, x: (model(x).square().sum(), len(x)), world=world, stage=stage, compress="1bit",
                            optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        found = []
        for model.uses_idle in (True, False):
            norm = engine.step(torch.randn(3, 50, generator=torch.Generator().manual_seed(world.rank))).grad_norm
            grads = {name: owner.grad for name, owner in engine.placement.owners.items() if owner.grad is not None}
            square = sum(grad.double().square().sum() for grad in grads.values())
            square = world.group("shard").all_reduce(torch.as_tensor(square, dtype=torch.float64))
            found.append((norm / square.sqrt().item(), "idle" in grads))
        return found

    for (first, _), (second, used_again) in rl.simulate(mesh, body):
        assert first == pytest.approx(1, rel=1e-6) and second == pytest.approx(1, rel=1e-6)
        assert not used_again


@pytest.mark.parametrize(("mesh", "more", "said"), [
    (rl.Mesh(shard=2), {"stage": 1, "compress": "powersgd"}, "compress='powersgd' needs whole matrices"),
    (rl.Mesh(shard=2, replicate=2), {"stage": 3, "compress": "powersgd:2"}, "compress='powersgd:2' needs whole matrices"),
    (rl.Mesh(shard=2), {"stage": 2, "compress": "topk"}, "compress='topk' has no reduce-scatter"),
    (rl.Mesh(shard=2), {"stage": 2, "compress": "int8", "gradient_memory": 5}, "gradient_memory=5 has no meaning with compress='int8'"),
    (rl.Mesh(shard=2), {"stage": 2, "compress": "int8", "deterministic": True}, "no meaning with deterministic"),
    (rl.Mesh(shard=2), {"stage": 2, "compress": "int8", "all_reduce": "hierarchical"}, "all_reduce=.* has no meaning at stage 2"),
], ids=str)
def test_what_has_no_meaning_is_refused_with_the_reason(mesh, more, said):
    def body(world):
        with pytest.raises(rl.ConfigError, match=said):
            trained(world, **more)

    rl.simulate(mesh, body)


@pytest.mark.parametrize(("mesh", "stage", "compress"), [
    (rl.Mesh(replicate=2, shard=2), 2, "topk"), (rl.Mesh(replicate=2), 1, "powersgd"),
    (rl.Mesh(replicate=2, tensor=2), 0, "powersgd")], ids=str)
def test_sums_over_replicas_may_be_compressed_in_every_way_that_their_shapes_allow(mesh, stage, compress):
    def body(world):
        return torch.equal(weights(trained(world, stage, compress=compress)), weights(trained(world, stage)))

    assert not any(rl.simulate(mesh, body)), "nothing was compressed"


def test_config_files_refuse_the_same_with_the_same_reasons(tmp_path):
    (tmp_path / "train.toml").write_text("[train]\nlocal_batch_size = 2\n")
    load = lambda *flags: load_config(tmp_path / "train.toml", list(flags))
    sharded = ("--train.stage=2", "--mesh.shard=2")
    with pytest.raises(rl.ConfigError, match=r'\[comm\] compress = "powersgd" needs whole matrices'):
        load(*sharded, "--comm.compress=powersgd")
    with pytest.raises(rl.ConfigError, match=r'\[comm\] compress = "topk" has no reduce-scatter'):
        load(*sharded, "--comm.compress=topk", "--mesh.replicate=1")
    for replicate in ((), ("--mesh.replicate=2",)):   # left out, it is not known yet
        assert load(*sharded, "--comm.compress=topk", *replicate).comm.compress == "topk"
    assert load(*sharded, "--comm.compress=int8", "--mesh.pipe=2").comm.compress == "int8"


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(pipe=2)], ids=str)
def test_ranks_that_only_split_the_model_have_nothing_to_compress(mesh):
    def body(world):
        with pytest.raises(rl.ConfigError, match="compress='int8' has nothing to compress where ranks only split the model"):
            trained(world, 0, compress="int8")
        return True

    assert rl.simulate(mesh, body) == [True] * 2


def test_a_file_with_such_a_mesh_is_refused_before_a_rank_starts(tmp_path):
    (tmp_path / "train.toml").write_text("[train]\nglobal_batch_size = 8\n"
                                         "[mesh]\npipe = 2\nreplicate = 1\nshard = 1\n[comm]\ncompress = 'int8'\n")
    with pytest.raises(rl.ConfigError, match=r"\[comm\] compress = \"int8\" has nothing to compress"):
        load_config(tmp_path / "train.toml")
    assert load_config(tmp_path / "train.toml", ["--mesh.shard", "2"]).comm.compress == "int8"
    (tmp_path / "free.toml").write_text("[train]\nglobal_batch_size = 8\n[mesh]\npipe = 2\nshard = 1\n[comm]\ncompress = 'int8'\n")
    assert load_config(tmp_path / "free.toml").comm.compress == "int8", "replicate gets the ranks that are left"
