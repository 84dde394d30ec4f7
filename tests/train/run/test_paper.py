"""What is said on paper is what real ranks hold: the same elements of every parameter, and the same bytes after a step."""

import pytest
import torch

import rankloom as rl
from rankloom.base.ranks import ParameterPart, RankPart
from rankloom.models.gpt import GPT
from rankloom.train.run.config import make_config
from rankloom.train.run.loop import build_engine
from rankloom.train.run.paper import ranks_on_paper
from rankloom.train.run.schema import Config

pytestmark = pytest.mark.gloo

ROWS, TOKENS, VOCAB = 8, 12, 37   # a vocabulary that nothing divides
MODEL = {"preset": "1M", "width": 16, "layers": 2, "heads": 4, "kv_heads": 2}
DENSE, EXPERTS = {"ffn": 24}, {"moe": {"experts": 4, "ffn": 12, "shared": 1}}


def config_of(mesh: dict, stage: int, *, model: dict = DENSE, tie: bool = True, **train) -> Config:
    """A run of that mesh."""
    comm = {"compress": train.pop("compress", "none")}
    sizes = {"global_batch_size": ROWS, "seq_len": TOKENS, "stage": stage, "precision": "fp64"} | train
    data = {"tokenizer": "bpe", "vocab_size": VOCAB}
    model = MODEL | model | {"tie": tie}
    return make_config({"mesh": {"replicate": 1} | mesh, "data": data, "model": model, "train": sizes, "comm": comm}, "test")


def on_paper(config: Config) -> list[RankPart]:
    return ranks_on_paper(config, config.gpt(VOCAB))


def real(config: Config) -> list[tuple]:
    """Of each rank: the slices that its optimizer updates, bytes after a step, its rows, its stages, its tokens."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=draw)

    def body(world):
        engine = build_engine(config, config.gpt(VOCAB), world)
        owners = {name: owner.detach().clone() for name, owner in engine.placement.owners.items()}
        rows = engine.group
        mine = [t.tensor_split(rows.size)[rows.rank].contiguous() for t in (text[:, :-1], text[:, 1:])]
        engine.step(tuple(mine))
        stages = tuple(engine.pipeline.stages) if world.mesh.pipe > 1 else (0,)
        return owners, engine.held(), (rows.rank, rows.size), stages

    return rl.simulate(config.mesh.as_mesh(), body)


def elements(part: ParameterPart, whole: torch.Tensor) -> torch.Tensor:
    """The elements that a rank is said to own, cut out of the whole by what is said, and by nothing else."""
    assert whole.shape == part.whole
    for dim, spans in enumerate(part.spans):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in spans], dim)
    held = whole.new_zeros(part.local)
    held[tuple(slice(n) for n in whole.shape)] = whole
    return held.reshape(-1)[slice(*part.owned)]


MESHES = [
    ({}, 0, {}), ({"replicate": 3}, 0, {"global_batch_size": 9}), ({"shard": 2}, 1, {}), ({"replicate": 2, "shard": 2}, 2, {}),
    ({"shard": 7}, 1, {"global_batch_size": 7}),   # the last rank owns less
    ({"shard": 4}, 3, {}), ({"tensor": 2}, 0, {}), ({"tensor": 4}, 0, {"tie": False}), ({"shard": 2, "tensor": 2}, 3, {}),
    ({"shard": 2, "tensor": 4}, 1, {}), ({"context": 2, "replicate": 2}, 0, {}), ({"pipe": 2}, 0, {"accumulate": 2, "tie": False}),
    ({"pipe": 2, "shard": 2, "tensor": 2}, 1, {"accumulate": 2}), ({"pipe": 3, "shard": 2}, 3, {"accumulate": 2}),
    ({"pipe": 2}, 0, {"accumulate": 2, "pipe": "zb-v", "tie": False}),
    ({"expert": 2}, 0, {"model": EXPERTS}), ({"expert": 4, "shard": 2}, 3, {"model": EXPERTS}),
    ({"expert": 2, "tensor": 2, "shard": 2}, 2, {"model": EXPERTS}), ({"shard": 2}, 2, {"deterministic": 4}),
    ({"replicate": 2}, 0, {"deterministic": True}), ({"shard": 2, "tensor": 2}, 3, {"precision": "bf16"}),
    *((mesh, stage, {"precision": "fp32", "compress": compress}) for mesh, stage, compress in (
        ({"replicate": 2}, 0, "topk"), ({"replicate": 2}, 0, "powersgd:1"), ({"replicate": 2, "tensor": 2}, 0, "powersgd:1"),
        ({"replicate": 2, "shard": 2}, 1, "topk"), ({"shard": 2}, 3, "int8"))),
]


@pytest.mark.parametrize(("mesh", "stage", "more"), MESHES, ids=str)
def test_paper_says_which_elements_every_real_rank_owns_and_how_many_bytes_it_holds(mesh, stage, more):
    config = config_of(mesh, stage, **more)
    plain = dict(GPT(config.gpt(VOCAB), seed=0).named_parameters())
    said, found = on_paper(config), real(config)
    assert [part.rank for part in said] == list(range(config.mesh.as_mesh().size))
    for part, (owners, held, (row_rank, row_ranks), stages) in zip(said, found, strict=True):
        params = {parameter.name: parameter for parameter in part.parameters}
        assert {name: params[name].owned[1] - params[name].owned[0] if name in params else 0 for name in owners} == {
            name: owner.numel() for name, owner in owners.items()}
        for name, parameter in params.items():
            expected = elements(parameter, plain[name].detach()).to(owners[name].dtype)
            torch.testing.assert_close(owners[name].view(-1), expected, rtol=0, atol=0, msg=f"rank {part.rank}: {name}")
        assert part.stages == stages
        each = config.batch().global_ // row_ranks
        assert part.rows == range(row_rank * each, (row_rank + 1) * each)
        padding = 64 * (len(owners) + 1) if stage == 0 else 0   # which buckets lie where is learned there, from a real backward
        for kind, nbytes in part.held.items():
            assert abs(nbytes - getattr(held, kind)) <= padding, f"rank {part.rank}: {kind}"


@pytest.mark.parametrize("mesh", [{"context": 2}, {"context": 3, "replicate": 2}, {"context": 2, "pipe": 2}], ids=str)
def test_paper_says_which_tokens_a_real_rank_computes(mesh):
    config = config_of(mesh, 0, accumulate=2 if "pipe" in mesh else 1)
    rows = torch.arange(TOKENS).expand(config.batch().global_, TOKENS).contiguous()   # each token is its own position

    def body(world):
        seen = []
        engine = build_engine(config, config.gpt(VOCAB), world)
        for name, module in engine.placement.model.named_modules():
            if name == "embedding" and world.mesh.coords(world.rank)["pipe"] == 0:
                # a look at a few tokens comes first, without gradients (parallel/context/tokens_apart.py)
                module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0].tolist()) if torch.is_grad_enabled() else None)
        engine.step((rows.tensor_split(engine.group.size)[0], rows.tensor_split(engine.group.size)[0]))
        return seen

    for part, seen in zip(on_paper(config), rl.simulate(config.mesh.as_mesh(), body), strict=True):
        assert all(tokens == [at for span in part.tokens for at in span] for tokens in seen)
        assert seen or part.coords["pipe"]


def test_only_ranks_with_other_stages_need_an_engine_of_their_own(monkeypatch):
    built = []
    monkeypatch.setattr("rankloom.train.run.paper.build_engine", lambda *given: built.append(build_engine(*given)) or built[-1])
    assert len(on_paper(config_of({"pipe": 2, "shard": 4, "tensor": 2}, 3, global_batch_size=16, accumulate=2))) == 16
    assert len(built) == 2


def test_a_mesh_that_cannot_be_is_refused_as_in_a_run():
    with pytest.raises(rl.ConfigError, match="heads = 4 cannot be shared evenly by .* tensor 3"):
        on_paper(config_of({"tensor": 3}, 0))
    with pytest.raises(rl.ConfigError, match="5 stages for a model of 4 pieces"):
        on_paper(config_of({"pipe": 5}, 0))


def test_paper_takes_no_memory_for_a_model_that_no_machine_holds():
    config = make_config({"mesh": {"tensor": 8, "replicate": 1}, "model": {"preset": "70B", "layers": 2, "vocab_size": 10**9},
                          "train": {"local_batch_size": 1}}, "test")
    parts = ranks_on_paper(config, config.gpt(VOCAB))
    assert parts[0].total > 2**44 and len(parts) == 8   # 16 TiB
