"""The runs of a scaling study."""

from pathlib import Path

import pytest

from rankloom.base.errors import ConfigError, StorageError
from rankloom.base.mesh import Mesh
from rankloom.train.run.config import read_table
from rankloom.train.run.scaling_runs import parse_ranks, plan_study

FILE = """
[mesh]
replicate = 2
[train]
local_batch_size = 4
accumulate = 3
eval_every = 10
[schedule]
warmup_steps = 100
[checkpoint]
interval = 3
resume = "runs/first"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(FILE)
    return path


def planned(file, ranks, *, weak=False, overrides=()):
    return [*plan_study(read_table(file), str(file), overrides, ranks, steps=9, weak=weak, threads=2, folder=Path("out")).values()]


def test_strong_scaling_keeps_the_global_batch(file):
    assert [config.batch().global_ for config in planned(file, [1, 2, 4])] == [24, 24, 24]
    assert [config.batch().accumulate for config in planned(file, [1, 2, 4])] == [3, 3, 3]
    assert [config.batch().local for config in planned(file, [1, 2, 4])] == [8, 4, 2]


def test_weak_scaling_keeps_the_batch_of_a_rank(file):
    assert [config.batch().global_ for config in planned(file, [1, 2, 4], weak=True)] == [12, 24, 48]


def test_a_study_is_short_and_does_nothing_after_the_steps(file):
    config = planned(file, [2])[0]
    assert (config.checkpoint.interval, config.checkpoint.resume) == (0, None)
    assert (config.train.steps, config.train.evaluate, config.train.eval_every, config.train.samples) == (9, False, 0, 0)
    assert config.data.baseline is False
    assert config.schedule.warmup_steps == 9
    assert config.train.threads == 2, "the same in every run"
    assert (config.run.folder, config.run.name) == ("out/", "ranks-2")


@pytest.mark.parametrize("exact", [3, 50])
def test_steps_are_timed_as_they_are_after_the_exact_ones_however_many_these_are(file, exact):
    words = ["--comm.compress", "int8", "--comm.compress_after", str(exact)]
    config = planned(file, [2], overrides=words)[0]
    assert (config.comm.compress, config.comm.compress_after) == ("int8", 0)


def test_the_words_of_the_user_hold_and_deterministic_needs_no_accumulation(file):
    words = ["--optimizer.lr", "0.5", "--train.deterministic", "true", "--train.accumulate", "none"]
    config = planned(file, [1], overrides=words)[0]
    assert (config.optimizer.lr, config.train.deterministic, config.train.accumulate) == (0.5, True, None)


def test_a_number_of_ranks_that_cannot_be_is_named_before_anything_runs(file):
    with pytest.raises(ConfigError, match=r"on 5 ranks: .*24 does not divide by 5 x 3"):
        planned(file, [1, 5])


@pytest.mark.parametrize("words, said", [(["--run.name", "foo"], "--run.name foo: has no effect on a study, .*--out is their folder"),
                                         (["--train.steps=99"], "--train.steps 99: has no effect on a study, .*--steps says"),
                                         (["--mesh", "replicate=2"], "--mesh.replicate 2: has no effect .*--mesh.shard may be given"),
                                         (["--train.samples", "2"], "--train.samples 2: has no effect on a study, which only trains"),
                                         (["--train.eval_every=5"], "--train.eval_every 5: has no effect on a study, which only trains"),
                                         (["--train.evaluate=true"], "--train.evaluate true: has no effect on a study"),
                                         (["--data.baseline=true"], "--data.baseline true: has no effect on a study"),
                                         (["--train.evaluate=no"], "--train.evaluate: evaluate = 'no': must be a valid boolean"),
                                         (["--checkpoint.interval=3"], "--checkpoint.interval 3: has no effect .* writes no checkpoints"),
                                         (["--checkpoint.resume=runs/a"], "--checkpoint.resume runs/a: has no effect .* begin anew")])
def test_words_that_a_study_would_not_heed_are_refused(file, words, said):
    with pytest.raises(ConfigError, match=said):
        planned(file, [1], overrides=words)


def test_what_a_study_turns_off_may_be_turned_off(file):
    words = ["--train.samples=0", "--train.evaluate=false", "--train.eval_every=0", "--data.baseline=false", "--checkpoint.resume=none"]
    assert planned(file, [2], overrides=words) == planned(file, [2])


def test_a_shard_that_is_given_holds_on_any_number_of_ranks(file):
    words = ["--train.stage", "3", "--mesh.shard", "2"]
    meshes = [Mesh(shard=2), Mesh(replicate=2, shard=2), Mesh(replicate=4, shard=2)]
    assert [config.mesh.as_mesh() for config in planned(file, [2, 4, 8], overrides=words)] == meshes
    with pytest.raises(ConfigError, match=r"on 1 ranks: .mesh. shard 2 does not divide the 1 ranks$"):
        planned(file, [1, 2], overrides=words)


def test_the_shard_of_the_file_is_set_aside(file):
    file.write_text(FILE.replace("replicate = 2", "shard = 4").replace("[train]", "[train]\nstage = 3"))
    assert [config.mesh.as_mesh() for config in planned(file, [1, 2, 8])] == [Mesh(), Mesh(shard=2), Mesh(shard=8)]


@pytest.mark.parametrize("text", ["", "0,1", "two", "1;2", "-1"])
def test_ranks_that_are_no_numbers_are_refused(text):
    with pytest.raises(ConfigError, match="expected numbers of ranks"):
        parse_ranks(text)


def test_the_axes_that_are_not_of_data_stay_and_must_divide_the_ranks(file):
    words = ["--model.moe.experts", "4", "--mesh.expert", "2", "--mesh.replicate", "none", "--train.local_batch_size", "8"]
    assert [config.mesh.as_mesh() for config in planned(file, [2, 4], overrides=words)] == [Mesh(expert=2), Mesh(replicate=2, expert=2)]
    staged = planned(file, [4], overrides=[*words, "--train.stage", "2"])
    assert [config.mesh.as_mesh() for config in staged] == [Mesh(shard=2, expert=2)]
    with pytest.raises(ConfigError, match=r"on 1 ranks: .mesh. expert 2 does not divide the 1 ranks"):
        planned(file, [1, 2], overrides=words)


def test_ranks_that_a_run_would_refuse_only_when_it_begins_are_refused_before_the_first_run(file, tmp_path):
    with pytest.raises(ConfigError, match="on 300 ranks: 300 ranks share a host, expected 256 at most"):
        planned(file, [1, 300], weak=True)
    (tmp_path / "cluster.toml").write_text("nodes = [[0, 1]]")
    with pytest.raises(ConfigError, match="on 4 ranks: .*cluster.toml: nodes: has 2 ranks, but the job has 4"):
        planned(file, [2, 4], overrides=["--comm.topology", str(tmp_path / "cluster.toml")])


def test_a_folder_that_holds_runs_of_an_earlier_study_is_refused_before_the_first_run(file, tmp_path):
    for name in ("ranks-2", "ranks-8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"--out .*: holds ranks-2 of an earlier study; give another folder"):
        plan_study(read_table(file), str(file), (), [1, 2, 4], steps=9, weak=False, threads=2, folder=tmp_path)
    with pytest.raises(StorageError, match=r"--out x+: cannot be read .File name too long.; give another folder"):   # or no permission
        plan_study(read_table(file), str(file), (), [1], steps=9, weak=False, threads=2, folder=Path("x" * 300))
