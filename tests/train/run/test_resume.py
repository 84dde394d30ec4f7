"""A run that was stopped goes on from its newest checkpoint on any mesh, with the losses of one that never stopped."""

import shlex
import signal
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from full_disk import fill_disk_of_rank_1
from patience import AT_ONCE
from rankloom.base.errors import ConfigError, DataError, ModelMismatch, StorageError
from rankloom.base.events import Evaluated, Notice, Saved, StepDone
from rankloom.base.mesh import Mesh
from rankloom.checkpoint.files import MANIFEST, read_manifest, reading
from rankloom.checkpoint.manifest import to_json
from rankloom.train.run import facts, loop, resume
from rankloom.train.run.config import load_config
from rankloom.train.run.finish import Summary, describe_end
from rankloom.train.run.folder import write_json
from rankloom.train.run.resume import expect_steps_left, newest_checkpoint
from rankloom.train.run.weights import load_model
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
    saved = [Path(event.path).name for event in events if isinstance(event, Saved)]
    assert saved == ["model.safetensors", f"step-{summary.steps:08}"], "the weights first: they take less time, and less room"
    _, more = run(table(checkpoint={"resume": summary.folder}))
    _, straight = run(table())
    assert losses(more) == losses(straight)[summary.steps:], "the very same bits"


@pytest.mark.parametrize(("number", "said"), [
    (signal.SIGINT, ["stopping after this step; Ctrl-C again quits at once, without saving"]),
    (signal.SIGTERM, ["stopping after this step; SIGTERM again quits at once, without saving"]), (signal.SIGHUP, []),
])
def test_a_signal_is_acknowledged_on_one_rank_before_the_step_has_ended(table, number, said):
    events, acknowledged = [], threading.Event()

    def sink(event):
        events.append(event)
        if isinstance(event, Notice) and event.text.startswith("stopping"):
            acknowledged.set()
        if isinstance(event, StepDone) and event.step == 3:
            signal.raise_signal(number)
            assert not said or acknowledged.wait(AT_ONCE), "while the step's own thread is busy"

    world = init(device="cpu")
    loop.train(table(train={"steps": 50}), world, sink)
    world.close()
    assert [text for text in notices(events) if text.startswith("stopping")] == said


def test_a_run_that_goes_on_without_an_interval_says_that_it_writes_no_checkpoints(table):
    summary, _ = run(table(train={"steps": 2}, checkpoint={"interval": 2}))
    for interval in (0, 2):
        _, events = run(table(train={"steps": 4}, checkpoint={"resume": summary.folder, "interval": interval}))
        assert any("writes no checkpoints itself; --checkpoint.interval N" in text for text in notices(events)) == (not interval)


def test_the_end_of_a_stopped_run_has_the_command_that_resumes_it_or_what_to_set(table):
    plain, _ = run(table(train={"steps": 2}))
    kept, _ = run(table(run={"name": "kept"}, train={"steps": 2}, checkpoint={"interval": 2}))
    assert describe_end(plain, 2)[0].startswith("2 steps, "), "nothing of resuming after a run that has ended"
    stopped = lambda summary: describe_end(replace(summary, stopped_by=signal.SIGINT), 6)
    assert stopped(plain)[:2] == ["stopped by SIGINT after 2 steps; the weights are saved",
                                  "there is no checkpoint to resume from; --checkpoint.interval N writes one every N steps, and at a stop"]
    command = stopped(kept)[1].removeprefix("resume with: rankloom train ")
    assert command == f"{kept.folder}/config.toml --checkpoint.resume {kept.folder}"
    file, *words = shlex.split(command)
    again = load_config(file, [*words, "--train.steps", "6"])
    assert again.checkpoint.interval == 2 and run(again)[0].steps == 6


def test_the_end_of_a_run_that_went_on_counts_its_own_steps():
    summary = Summary(folder="", parameters=1, steps=6, steps_before=4, tokens=200, training_seconds=2.0, training_loss=1.0,
                      validation_loss=None, trigram_loss=None, stopped_by=0)
    assert describe_end(summary, 6) == ["steps 5 to 6, 200 tokens in 2.00 s (100 tokens/s)"]


def test_all_ranks_resume_from_what_the_first_has_found(tmp_path, monkeypatch):
    """Another run may write a newer one while they look."""
    found = iter([tmp_path / "1", tmp_path / "2"])
    monkeypatch.setattr(resume, "newest_checkpoint", lambda place: next(found))
    monkeypatch.setattr(resume, "read_manifest", lambda path: ("", SimpleNamespace(facts={"about_run": {"name": path.name}})))
    one, other = simulate(2, lambda world: resume._find(SimpleNamespace(world=world), tmp_path))
    assert one == other


def test_a_full_disk_ends_a_checkpoint_with_a_storage_error_and_no_empty_folder(table, tmp_path, monkeypatch):
    """On both ranks, whichever fails: the last one to leave takes the folders with it."""
    fill_disk_of_rank_1(monkeypatch)
    with pytest.raises(StorageError, match=r"checkpoints/step-00000002/.*: cannot be written \(No space left on device\)"):
        run(table(run={"name": "full"}, checkpoint={"interval": 2}), 2)
    assert not (tmp_path / "runs" / "full" / "checkpoints").exists()


def test_an_old_checkpoint_stays_while_a_new_one_cannot_be_written_even_where_one_is_kept(table, tmp_path, monkeypatch):
    def sink(event):
        if isinstance(event, Saved) and event.path.endswith("step-00000002"):
            fill_disk_of_rank_1(monkeypatch)

    config = table(run={"name": "full"}, checkpoint={"interval": 2, "keep_latest": 1})
    with pytest.raises(StorageError, match=r"checkpoints/step-00000004/.*: cannot be written \(No space left on device\)"):
        simulate(2, lambda world: loop.train(config, world, sink))
    monkeypatch.undo()
    assert run(table(checkpoint={"resume": str(tmp_path / "runs" / "full")}), 2)[0].steps_before == 2


def test_what_has_no_steps_left_is_known_before_a_run_has_a_folder_wherever_its_name_begins(table, tmp_path, monkeypatch):
    summary, _ = run(table(train={"steps": 2}, checkpoint={"interval": 2}))
    expect_steps_left(table(train={"steps": 3}, checkpoint={"resume": summary.folder}))
    checkpoint = Path(summary.folder) / "checkpoints" / "step-00000002"
    for inside, name in ((tmp_path, summary.folder), (checkpoint.parent, "step-00000002"), (checkpoint, "."), (checkpoint, "..")):
        monkeypatch.chdir(inside)
        with pytest.raises(ConfigError, match="is of step 2, and .train. steps = 2: nothing is left to train"):
            expect_steps_left(table(train={"steps": 2}, checkpoint={"resume": name}))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_run_that_did_not_get_to_its_end_after_the_last_step_is_finished_by_the_next(table, how):
    """It was refused as one with nothing left to train, and its weights could be had only by training further."""
    whole, _ = run(table(checkpoint={"interval": 3}))
    folder = Path(whole.folder)
    if how == "killed":
        (folder / "summary.json").unlink()
    else:
        write_json(folder / "summary.json", asdict(replace(whole, stopped_by=signal.SIGTERM)))
    (folder / "model.safetensors").unlink()
    config = table(train={"samples": 1}, checkpoint={"resume": whole.folder})
    expect_steps_left(config)
    summary, _ = run(config, 2)
    assert summary.steps_before == summary.steps == whole.steps and summary.validation_loss == pytest.approx(whole.validation_loss)
    assert (Path(summary.folder) / "model.safetensors").exists() and (Path(summary.folder) / "samples.txt").exists()
    assert describe_end(summary, whole.steps) == [f"nothing was left to train after step {whole.steps}"]


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


def test_a_checkpoint_that_another_run_resumes_from_is_removed_by_a_later_save(table, monkeypatch):
    real, there = loop.save_in_run, []

    def save(job, engine):
        with reading(job.run / "checkpoints" / "step-00000001") if engine.steps_done < 3 else nullcontext():
            real(job, engine)
        there.append(sorted(path.name[-1] for path in (job.run / "checkpoints").iterdir()))

    monkeypatch.setattr(loop, "save_in_run", save)
    run(table(train={"steps": 3}, checkpoint={"interval": 1, "keep_latest": 1}))
    assert there == [["1"], ["1", "2"], ["3"]]


def test_a_checkpoint_whose_removal_ends_half_way_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(resume.shutil, "rmtree", lambda *_, **__: None)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / MANIFEST).touch()
    resume._remove(tmp_path / "step-1")
    assert not resume.whole_checkpoints(tmp_path)


def test_a_checkpoint_that_was_moved_away_and_linked_is_kept(table, tmp_path):
    def sink(event):
        if isinstance(event, Saved) and event.path.endswith("step-00000002"):
            Path(event.path).rename(tmp_path / "archive")
            Path(event.path).symlink_to(tmp_path / "archive")

    (summary,) = simulate(1, lambda world: loop.train(table(checkpoint={"interval": 2, "keep_latest": 1}), world, sink))
    assert checkpoints(summary) == ["step-00000002", "step-00000006"] and read_manifest(tmp_path / "archive")[1].facts["run"]["step"] == 2


@pytest.mark.parametrize("damage", [bytes.swapcase, lambda data: data[1:]], ids=["changed", "shorter"])
def test_for_a_damaged_checkpoint_the_one_before_it_is_named(table, damage):
    summary, _ = run(table(train={"steps": 4}, checkpoint={"interval": 2}))
    newest = newest_checkpoint(Path(summary.folder))
    (file,) = newest.glob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))
    before = newest.with_name("step-00000002")
    with pytest.raises(DataError, match=f"damaged; copy it again .*; the one before it: --checkpoint.resume {before}"):
        run(table(checkpoint={"resume": summary.folder}), 2)
    assert run(table(checkpoint={"resume": str(before)}))[0].steps_before == 2
    (oldest,) = before.glob("*.safetensors")
    oldest.write_bytes(damage(oldest.read_bytes()))
    with pytest.raises(DataError, match="damaged; copy it again") as error:
        run(table(checkpoint={"resume": str(before)}))
    assert "the one before" not in str(error.value), "there is none; a newer one is no earlier one"


def test_a_tilde_is_the_home_folder_for_a_run_and_for_what_it_resumes_from(table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    summary, _ = run(table(run={"folder": "~/in home", "name": "a"}, train={"steps": 2}, checkpoint={"interval": 2}))
    assert summary.folder == str(tmp_path / "in home" / "a") and load_model(Path("~/in home/a"))
    assert run(table(checkpoint={"resume": "~/in home/a"}))[0].steps_before == 2


def test_the_newest_checkpoint_has_the_greatest_step_and_not_the_last_name(tmp_path):
    for name in ("step-99999999", "step-100000000", "step-00000002", "step-99999999-kept-by-the-user"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / MANIFEST).write_text("{}")
    assert newest_checkpoint(tmp_path).name == "step-100000000"


@pytest.mark.parametrize("resume, kind, said", [
    ("runs/never", DataError, "^runs/never: no such run folder or checkpoint"), (None, ConfigError, "nothing is left to train"),
])
def test_what_cannot_be_resumed_is_told_on_all_ranks(table, resume, kind, said):
    summary, _ = run(table(train={"steps": 2}, checkpoint={"interval": 2}))
    with pytest.raises(kind, match=said):
        run(table(train={"steps": 2}, checkpoint={"resume": resume or summary.folder}), 2)


def test_the_folder_of_the_checkpoints_names_the_newest_of_them_too(table):
    summary, _ = run(table(checkpoint={"interval": 2}))
    assert newest_checkpoint(Path(summary.folder) / "checkpoints").name == "step-00000006"


def test_a_folder_that_may_not_be_read_is_told(table, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(DataError, match=r"locked: cannot be read \(Permission denied\), to resume from"):
        newest_checkpoint(tmp_path / "locked")


# ---------------------------------------------------------------------- what the run before was, and this one is


@pytest.fixture
def source(table):
    """The folder of a run of four steps, and a checkpoint after the last."""
    summary, _ = run(table(train={"steps": 4}, checkpoint={"interval": 2}))
    return summary.folder


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


def test_a_tokenizer_that_has_learned_from_other_text_is_refused_until_that_of_the_run_is_given(table, tmp_path):
    pytest.importorskip("tokenizers")
    bpe = {"tokenizer": "bpe", "vocab_size": 270}
    before, _ = run(table(data=bpe, train={"steps": 4}, checkpoint={"interval": 2}))
    (tmp_path / "text.txt").write_text("jived fox nymph grabs quick waltz\n" * 200)
    resume = {"resume": before.folder}
    tokenizer = f"{before.folder}/tokenizer.json"
    with pytest.raises(ModelMismatch, match=f"step-00000004: was trained with another tokenizer .*give --data.tokenizer {tokenizer}"):
        run(table(data=bpe, checkpoint=resume), 2)
    summary, events = run(table(data={"tokenizer": tokenizer}, checkpoint=resume))
    assert summary.steps == 6 and "unlike the run of that checkpoint: train.steps 4 -> 6" in notices(events)


def test_the_tokenizer_of_the_run_is_taken_whatever_the_library_that_hashed_it(table, monkeypatch):
    pytest.importorskip("tokenizers")
    with monkeypatch.context() as older:   # a release that writes the same tokenizer otherwise
        older.setattr(facts, "tokenizer_hash", lambda tokenizer: "0" * 64)
        before, _ = run(table(data={"tokenizer": "bpe", "vocab_size": 270}, train={"steps": 4}, checkpoint={"interval": 2}))
    summary, _ = run(table(data={"tokenizer": f"{before.folder}/tokenizer.json"}, checkpoint={"resume": before.folder}))
    assert summary.steps_before == 4


def test_the_tokenizer_comes_with_the_first_checkpoint_and_not_only_with_the_weights(table):
    there = []

    def sink(event):
        if isinstance(event, Saved) and "step-" in event.path:
            there.append({path.name for path in Path(event.path).parents[1].iterdir()})

    simulate(1, lambda world: loop.train(table(checkpoint={"interval": 4}), world, sink))
    assert "tokenizer.json" in there[0] and "model.safetensors" not in there[0], "after a kill there is no more"


@pytest.mark.parametrize("key, here, there", [("heads", 4, "2"), ("kv_heads", 1, "2"), ("rope_base", 500.0, "10000.0"),
                                              ("norm_eps", 1e-3, "1e-05"), ("tie", False, "true")])
def test_a_model_that_computes_otherwise_from_such_weights_is_refused_with_the_setting(table, source, key, here, there):
    with pytest.raises(ModelMismatch, match=f"is of a model with .model. {key} = .*; give --model.{key} {there}"):
        run(table(model={key: here}, checkpoint={"resume": source}), 2)


def test_a_run_with_another_optimizer_is_refused_with_the_checkpoint_and_the_key(table, source):
    with pytest.raises(ModelMismatch, match=r"step-\d+: has the state of .optimizer. name = adamw, .*; give --optimizer.name adamw"):
        run(table(optimizer={"name": "sgd"}, checkpoint={"resume": source}), 2)


def test_experts_and_how_many_of_them_a_token_goes_through_are_part_of_the_model(table):
    moe, none = {"experts": 4, "top_k": 1, "ffn": 16}, {"ffn": None}
    summary, _ = run(table(model=none | {"moe": moe}, train={"steps": 2}, checkpoint={"interval": 2}))
    resume = {"resume": summary.folder}
    with pytest.raises(ModelMismatch, match=r"moe.top_k = 1, and this one has 2; give --model.moe.top_k 1"):
        run(table(model=none | {"moe": moe | {"top_k": 2}}, checkpoint=resume))
    with pytest.raises(ModelMismatch, match=r"moe.experts = 4, and this one has none; give --model.moe.experts 4"):
        run(table(checkpoint=resume))
    assert run(table(model=none | {"moe": moe | {"balance_loss": 0.5}}, checkpoint=resume))[0].steps == 6, "which is no part of it"


@pytest.mark.parametrize("there, here", [(0.0, 0.01), (0.01, 0.0)], ids=str)
def test_routers_keep_their_biases_or_get_none_and_the_rate_of_biases_may_change(table, there, here):
    """It was "the state dict of another model", of which tensors were missing, without the setting."""
    def model(rate):
        return {"ffn": None, "moe": {"experts": 4, "top_k": 1, "ffn": 16, "bias_rate": rate}}

    summary, _ = run(table(model=model(there), train={"steps": 2}, checkpoint={"interval": 2}))
    resume = {"resume": summary.folder}
    with pytest.raises(ModelMismatch, match=f"biases of routers, .*{there}, and this one has {here}; give --model.moe.bias_rate {there}"):
        run(table(model=model(here), checkpoint=resume))
    if there:
        _, events = run(table(model=model(0.02), checkpoint=resume))
        assert any("model.moe.bias_rate 0.01 -> 0.02" in text for text in notices(events))


def test_dropout_and_the_length_of_rows_may_change_and_it_is_said(table, source):
    _, events = run(table(model={"dropout": 0.0}, train={"seq_len": 8}, checkpoint={"resume": source}))
    assert any(text.startswith("unlike the run of that checkpoint: ") and "model.dropout 0.1 -> 0.0" in text
               and "train.seq_len 16 -> 8" in text for text in notices(events))


def test_a_checkpoint_that_says_nothing_of_its_run_is_loaded(table, source):
    """One of `engine.save`, or of an older rankloom."""
    path = newest_checkpoint(Path(source))
    manifest = read_manifest(path)[1]
    facts = {key: value for key, value in manifest.facts.items() if key != "about_run"}
    assert len(facts) == len(manifest.facts) - 1
    (path / MANIFEST).write_text(to_json(replace(manifest, facts=facts)))
    summary, events = run(table(model={"rope_base": 500.0}, checkpoint={"resume": source}))
    assert summary.steps == 6 and not any("unlike" in text for text in notices(events))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("before, now, held", [
    ({}, {"weight_decay": 0.9, "betas": (0.5, 0.6)}, {"weight_decay": [0.9, 0.0], "betas": [(0.5, 0.6)] * 2}),
    ({"name": "sgd"}, {"name": "sgd", "momentum": 0.5}, {"momentum": [0.5] * 2}),
], ids=["adamw", "sgd"])
def test_what_the_config_says_of_the_optimizer_holds_in_a_run_that_goes_on(table, monkeypatch, stage, before, now, held):
    engines, real = [], loop.resume
    monkeypatch.setattr(loop, "resume", lambda job, engine: (real(job, engine), engines.append(engine)))
    how = {"mesh": {"shard": 2}, "train": {"stage": 3}} if stage else {}
    summary, _ = run(table(optimizer=before, train={"steps": 2}, checkpoint={"interval": 2}))
    _, events = run(table(optimizer=now, checkpoint={"resume": summary.folder}, **how), Mesh(shard=2) if stage else 1)
    groups = engines[-1].optimizer.param_groups
    assert {key: [group[key] for group in groups] for key in held} == held and len(engines[-1].optimizer.state) > 0
    assert sum("unlike the run of that checkpoint" in text for text in notices(events)) == 1


def test_a_rate_that_jumps_is_told_and_one_that_goes_on_is_not(table):
    constant = {"decay": "constant", "warmup_steps": 2}
    for schedule, jumps in [({"warmup_steps": 2}, True), (constant, False)]:
        summary, _ = run(table(train={"steps": 4}, checkpoint={"interval": 2}, schedule=schedule))
        _, events = run(table(checkpoint={"resume": summary.folder}, schedule=schedule))
        said = [text for text in notices(events) if text.startswith("the learning rate was")]
        assert len(said) == jumps
        assert not jumps or said == ["the learning rate was 0.0001 in step 4 and is 0.000232 in the next one, by this run's own schedule"]
        assert "unlike the run of that checkpoint: train.steps 4 -> 6" in notices(events)
        earlier = f"{summary.folder}/checkpoints/step-00000002"   # of the same schedule: the rate falls, as it had to
        _, events = run(table(train={"steps": 4}, checkpoint={"resume": earlier}, schedule=schedule))
        assert not [text for text in notices(events) if text.startswith("the learning rate was")]


def test_what_compression_had_not_sent_is_said_to_be_lost(table):
    fp32 = {"precision": "fp32"}
    compress = {"compress": "int8", "compress_after": 1}
    summary, events = run(table(mesh={"replicate": 2}, comm=compress, train=fp32 | {"steps": 4}, checkpoint={"interval": 2}), 2)
    assert not any("not sent yet" in text for text in notices(events))
    _, events = run(table(mesh={"replicate": 2}, comm=compress, train=fp32, checkpoint={"resume": summary.folder}), 2)
    assert "what compression had not sent yet is lost, so bits differ from those of a run that did not stop; " \
           "[comm] compress_after = 1 counts from here" in notices(events)


def test_a_run_whose_steps_are_all_exact_says_so_and_one_that_was_not_compressed_has_lost_nothing(table, source):
    how = {"mesh": {"replicate": 2}, "train": {"precision": "fp32"}}
    summary, events = run(table(**how, comm={"compress": "int8", "compress_after": 2}, checkpoint={"resume": source}), 2)
    assert "[comm] compress_after = 2 counts from here: no step of this run is compressed" in notices(events) and summary.steps == 6
    _, events = run(table(**how, comm={"compress": "int8", "compress_after": 1}, checkpoint={"resume": source}), 2)
    assert any("comm.compress none -> int8" in text for text in notices(events))
    assert not any("not sent yet" in text or "is compressed" in text for text in notices(events))


@pytest.mark.parametrize(("changes", "words"), [
    ({"data": {"validation": 0.4}}, "data.validation 0.1 -> 0.4"), ({"train": {"precision": "fp32"}}, "train.precision fp64 -> fp32"),
    ({"train": {"deterministic": 4}}, "train.deterministic false -> 4"), ({"run": {"seed": 5}}, "run.seed 0 -> 5")], ids=str)
def test_what_else_has_changed_is_said(table, source, changes, words):
    _, events = run(table(**changes, checkpoint={"resume": source}))
    (said,) = (text for text in notices(events) if text.startswith("unlike the run of that checkpoint: "))
    assert words in said
    assert any("may be of text that was trained on" in text for text in notices(events)) == ("data" in changes)


@pytest.mark.parametrize(("changes", "moves"), [
    ({"run": {"seed": 5}}, True), ({"train": {"seq_len": 8}}, True), ({"train": {"global_batch_size": 24}}, True),
    ({"train": {"accumulate": 2}}, False)], ids=str)
def test_a_run_that_does_not_go_on_with_the_samples_that_are_left_says_so(table, source, changes, moves):
    _, events = run(table(**changes, checkpoint={"resume": source}))
    said = "takes the samples that it would take if all steps before had had these settings: in this epoch, some that were trained on may"
    assert any(said in text for text in notices(events)) == moves


@pytest.mark.parametrize("interval, step", [(2, 2), (100, 5)])
def test_a_checkpoint_that_cannot_be_written_does_not_take_the_weights_with_it(table, tmp_path, monkeypatch, interval, step):
    def full(job, engine):
        assert engine.steps_done == step
        job.world.agree("the disk is full")

    monkeypatch.setattr(loop, "save_in_run", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        run(table(run={"name": "full"}, train={"steps": 5}, checkpoint={"interval": interval}), 2)
    assert load_model(tmp_path / "runs" / "full")


def test_where_neither_a_checkpoint_nor_the_weights_can_be_written_the_first_error_is_told(table, tmp_path, monkeypatch):
    (tmp_path / "runs" / "full" / "tokenizer.json").mkdir(parents=True)   # a folder in the way
    monkeypatch.setattr(loop, "save_in_run", lambda job, engine: job.world.agree("the disk is full"))
    with pytest.raises(ConfigError, match="the disk is full"):
        run(table(run={"name": "full"}, checkpoint={"interval": 2}), 2)
