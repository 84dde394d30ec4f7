"""A run that was stopped goes on from its newest checkpoint on any mesh, with the losses of one that never stopped."""

import signal
from pathlib import Path

import pytest

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.events import Evaluated, Notice, Saved, StepDone
from rankloom.base.mesh import Mesh
from rankloom.checkpoint.files import MANIFEST
from rankloom.train import loop
from rankloom.train.resume import newest_checkpoint
from rankloom.world.join import init
from rankloom.world.simulate import simulate
from tiny_runs import maker_of_configs

TABLE = {
    "model": {"preset": "1M", "width": 32, "layers": 1, "ffn": 32, "heads": 2, "kv_heads": 2, "dropout": 0.1},
    "data": {"validation": 0.1},
    "train": {"steps": 6, "seq_len": 16, "global_batch_size": 12, "samples": 0, "precision": "fp64"},
    "schedule": {"warmup_steps": 2},
}


@pytest.fixture
def table(tmp_path):
    return maker_of_configs(tmp_path, TABLE)


def run(config, mesh=1):
    """(summary, events) of rank 0."""

    def body(world):
        events = []
        return loop.train(config, world, events.append), events

    return simulate(mesh, body)[0]


def losses(events):
    return [event.loss for event in events if isinstance(event, StepDone | Evaluated)]


def checkpoints(summary):
    return sorted(path.name for path in (Path(summary.folder) / "checkpoints").iterdir())


@pytest.mark.parametrize("mesh, stage", [(Mesh(replicate=3), 0), (Mesh(shard=2), 3), (Mesh(tensor=2), 0), (Mesh(pipe=2), 1)], ids=str)
def test_a_run_goes_on_where_another_had_its_newest_checkpoint(table, mesh, stage):
    plain = {"decay": "constant", "warmup_steps": 2}   # the rates of five steps are those of six
    stopped, _ = run(table(train={"steps": 5}, checkpoint={"interval": 2}, schedule=plain))
    assert checkpoints(stopped) == ["step-00000004", "step-00000005"], "the newest two: every second step, and the last"
    resume = f"{stopped.folder}/checkpoints/step-00000004"
    axes = {axis: ranks for axis, ranks in mesh.sizes().items() if ranks > 1}
    summary, events = run(table(mesh=axes, train={"stage": stage}, checkpoint={"resume": resume}, schedule=plain), mesh)
    _, straight = run(table(schedule=plain))
    assert [event.step for event in events if isinstance(event, StepDone)] == [5, 6]
    assert (summary.steps, summary.steps_before, summary.tokens) == (6, 4, 2 * 12 * 16), "tokens are those of the run itself"
    assert losses(events) == pytest.approx(losses(straight)[4:], rel=1e-12)   # two steps and the validation
    assert [event.text for event in events if isinstance(event, Notice) and "goes on from" in event.text] == [
        f"goes on from {resume}, after step 4"]
    assert summary.folder != stopped.folder and not (Path(summary.folder) / "checkpoints").exists()


def test_a_signal_leaves_a_checkpoint_of_the_step_it_came_after(table):
    events = []

    def sink(event):
        events.append(event)
        if isinstance(event, StepDone) and event.step == 3:
            signal.raise_signal(signal.SIGTERM)

    world = init(device="cpu")
    summary = loop.train(table(checkpoint={"interval": 100}), world, sink)
    world.close()
    assert summary.stopped_by == signal.SIGTERM and checkpoints(summary) == [f"step-{summary.steps:08}"]
    saved = [event.path for event in events if isinstance(event, Saved)]
    assert saved[0].endswith(f"checkpoints/step-{summary.steps:08}")
    _, more = run(table(checkpoint={"resume": summary.folder}))
    _, straight = run(table())
    assert losses(more) == losses(straight)[summary.steps:], "the very same bits"


def test_without_an_interval_no_checkpoint_is_written(table):
    summary, _ = run(table())
    with pytest.raises(DataError, match="holds no checkpoint to resume from; a run writes them with --checkpoint.interval"):
        newest_checkpoint(Path(summary.folder))


def test_half_a_checkpoint_is_none(table):
    summary, _ = run(table(checkpoint={"interval": 2}))
    folder = Path(summary.folder)
    assert newest_checkpoint(folder).name == "step-00000006"
    (newest_checkpoint(folder) / MANIFEST).unlink()
    assert newest_checkpoint(folder).name == "step-00000004"


def test_the_newest_checkpoint_has_the_greatest_step_and_not_the_last_name(tmp_path):
    for name in ("step-99999999", "step-100000000", "step-00000002", "step-99999999-kept-by-the-user"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / MANIFEST).write_text("{}")
    assert newest_checkpoint(tmp_path).name == "step-100000000"


@pytest.mark.parametrize("resume, kind, said", [
    ("runs/never", DataError, "no such run folder or checkpoint"), (None, ConfigError, "nothing is left to train"),
])
def test_what_cannot_be_resumed_is_told_on_all_ranks(table, resume, kind, said):
    summary, _ = run(table(train={"steps": 2}, checkpoint={"interval": 2}))
    with pytest.raises(kind, match=said):
        run(table(train={"steps": 2}, checkpoint={"resume": resume or summary.folder}), 2)
