"""A whole run, seen from inside: losses, events, files, and what happens when one rank cannot go on."""

import itertools
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankloom.base.errors import ConfigError, DataError, MeshError, StorageError
from rankloom.base.events import Evaluated, Notice, Saved, StepDone
from rankloom.base.mesh import Mesh
from rankloom.data.loader import TokenSamples
from rankloom.models.loss import language_model_loss
from rankloom.train.placement import ReplicatedPlacement
from rankloom.train.run import finish, job, loop
from rankloom.train.run.config import load_config
from rankloom.train.run.job import open_corpus
from rankloom.train.run.optim import learning_rate
from rankloom.train.run.stop import StopSignal
from rankloom.train.run.weights import load_model
from rankloom.train.sharded import ShardedPlacement
from rankloom.world.join import init
from rankloom.world.simulate import simulate
from tiny_runs import maker_of_configs

TABLE = {
    "model": {"preset": "1M", "width": 32, "layers": 1, "ffn": 32},
    "data": {"validation": 0.1},
    "train": {"steps": 5, "seq_len": 16, "global_batch_size": 12, "samples": 2, "sample_tokens": 8},
    "schedule": {"warmup_steps": 2},
}


@pytest.fixture
def table(tmp_path):
    return maker_of_configs(tmp_path, TABLE)


def run(config, ranks=1):
    """(summary, events) of every rank."""

    def body(world):
        events = []
        return loop.train(config, world, events.append), events

    return simulate(ranks, body)


def losses(events):
    return [event.loss for event in events if isinstance(event, StepDone | Evaluated)]


def test_the_same_global_batch_gives_the_same_losses_on_any_number_of_ranks(table):
    config = table(train={"precision": "fp64", "eval_every": 2})
    reference = losses(run(config)[0][1])
    assert len(reference) == 5 + 3, "five steps, evaluations after 2, 4 and 5"
    assert len(losses(run(table(train={"eval_every": 5}))[0][1])) == 5 + 1, "one after the last step"
    for ranks in (2, 3, 4):
        for _, events in run(config, ranks):
            assert losses(events) == pytest.approx(reference, rel=1e-12)


def test_deterministic_runs_have_the_bits_of_all_losses_on_any_number_of_ranks(table):
    one, two = (losses(run(table(train={"deterministic": 4}), ranks)[0][1]) for ranks in (1, 2))
    assert one == two and len(one) == 5 + 1


def test_accumulation_does_not_change_the_losses(table):
    whole = losses(run(table(train={"precision": "fp64"}), 2)[0][1])
    cut = losses(run(table(train={"precision": "fp64", "accumulate": 3}), 2)[0][1])
    assert cut == pytest.approx(whole, rel=1e-12)


def test_the_validation_loss_is_that_of_the_saved_weights_over_all_validation_samples(table):
    config = table(train={"precision": "fp32"})
    summary, _ = run(config, 4)[0]
    model, _ = load_model(Path(summary.folder))
    corpus = simulate(1, lambda world: open_corpus(config, world, print))[0]
    samples = TokenSamples(corpus.validation, 16)
    assert len(samples) % 4, "ranks evaluate different numbers of samples"
    with torch.no_grad():
        total, count = language_model_loss(model, samples.batch(range(len(samples))))
    assert summary.validation_loss == pytest.approx(float(total / count), rel=1e-5)   # fp32, other order of addition


@pytest.mark.parametrize("stage", [0, 1])
def test_the_weights_are_saved_without_gathering_what_the_optimizer_remembers(table, stage, monkeypatch):
    for placement in (ReplicatedPlacement, ShardedPlacement):
        monkeypatch.setattr(placement, "state", None)
    summary, _ = run(table(train={"stage": stage, "steps": 2}), 2)[0]
    assert (Path(summary.folder) / "model.safetensors").exists()


def test_training_lowers_the_loss(table):
    found = losses(run(table(train={"steps": 30}, optimizer={"lr": 0.01}))[0][1])
    assert found[-1] < found[0] - 1


def test_every_event_is_in_the_journal_of_its_rank_and_goes_to_the_caller(table):
    results = run(table(), 2)
    folder = Path(results[0][0].folder)
    for rank, (_, events) in enumerate(results):
        lines = [json.loads(line) for line in (folder / "events" / f"rank-{rank}.jsonl").read_text().splitlines()]
        assert [line["event"] for line in lines] == [type(event).__name__ for event in events]
    kinds = [type(event) for event in results[0][1]]
    assert (kinds.count(StepDone), kinds.count(Evaluated), kinds.count(Saved)) == (5, 1, 2)
    for summary, events in results:
        assert summary.training_seconds == pytest.approx(sum(event.seconds for event in events if isinstance(event, StepDone)))


def test_only_rank_0_speaks(table):
    results = run(table(), 2)
    assert any("batch: local 6 x ranks 2 x accumulate 1 = global 12" in e.text for e in results[0][1] if isinstance(e, Notice))
    assert not any(isinstance(event, Notice | Saved) for event in results[1][1])


def test_a_run_says_its_folder_before_it_reads_the_text(table, monkeypatch):
    said = []

    def stopped(*source, **options):
        raise DataError("stopped while it was tokenised")

    monkeypatch.setattr("rankloom.train.run.job.prepare_corpus", stopped)
    with pytest.raises(DataError, match="while it was tokenised"):
        loop.train(table(run={"name": "mine"}), init(device="cpu"), said.append)
    (notice,) = said
    assert notice.text.startswith("run folder: ") and Path(notice.text.removeprefix("run folder: ")).name == "mine"


def test_the_run_folder_holds_what_it_should(table):
    config = table(run={"name": "mine"})
    summary, said = run(config, 2)[0]
    folder = Path(summary.folder)
    assert {p.name for p in folder.iterdir()} == {
        "config.toml", "env.json", "events", "logs", "metrics.jsonl", "model.json", "model.safetensors", "samples.txt",
        "summary.json", "tokenizer.json",
    }
    told = json.loads((folder / "summary.json").read_text())
    assert told["steps"] == 5 and told["tokens"] == 5 * 12 * 16
    assert told["trigram_loss"] > 0 and told["validation_loss"] == summary.validation_loss
    texts = (folder / "samples.txt").read_text().removesuffix("\n").split("\n\n---\n\n")
    (shown,) = (event.text for event in said if isinstance(event, Notice) and event.text.startswith("sample 1: "))
    begin, _, more = shown.split("\nsample 2: ")[0].removeprefix("sample 1: ").partition(" >> ")
    assert len(texts) == 2 and begin and more and begin + more == texts[0]
    assert json.loads((folder / "env.json").read_text())["batch"] == {"local": 6, "accumulate": 1, "global": 12}


def test_the_config_in_the_run_folder_repeats_the_run_under_another_name(table):
    first = run(table(run={"name": "mine"}))[0]
    again = run(load_config(Path(first[0].folder) / "config.toml"))[0]
    assert again[0].folder != first[0].folder
    assert losses(again[1]) == losses(first[1])


def test_what_is_turned_off_is_not_done(table):
    config = table(train={"evaluate": False, "samples": 0}, data={"baseline": False})
    summary, events = run(config)[0]
    assert summary.validation_loss is None and summary.trigram_loss is None
    assert not any(isinstance(event, Evaluated) for event in events)
    assert not (Path(summary.folder) / "samples.txt").exists()


def test_a_run_that_cannot_be_compared_with_a_trigram_model_says_so_and_is_done(table, monkeypatch):
    monkeypatch.setattr("rankloom.data.ngram.LARGEST_VOCABULARY", 10)
    summary, events = run(table())[0]
    assert any(text.startswith("no trigram model to compare with: the trigram baseline holds vocabularies up to 10, not ")
               for text in (event.text for event in events if isinstance(event, Notice)))
    assert summary.trigram_loss is None and summary.validation_loss and (Path(summary.folder) / "samples.txt").exists()


def test_every_option_reaches_the_engine(table, monkeypatch):
    seen = {}

    def refuse(model, **options):
        seen.update(options, model=model)
        raise ConfigError("seen enough")

    monkeypatch.setattr(loop, "prepare", refuse)
    config = table(
        run={"seed": 7}, comm={"all_reduce": "ring"}, model={"dropout": 0.25},
        train={"precision": "bf16", "accumulate": 4}, schedule={"decay": "linear", "min_lr_ratio": 0.5},
        optimizer={"lr": 0.5, "max_norm": 0.0, "weight_decay": 0.3, "base_batch_size": 3, "lr_scaling": "sqrt"},
    )
    with pytest.raises(ConfigError, match="seen enough"):
        run(config)
    expected = {"stage": 0, "accumulate": 4, "clip": None, "precision": "bf16", "seed": 7, "all_reduce": "ring"}
    assert {key: seen[key] for key in expected} == expected
    assert seen["deterministic"] is False
    peak = {"peak": 1.0, "warmup_steps": 2, "steps": 5, "decay": "linear", "min_ratio": 0.5}   # 0.5 x sqrt(12 / 3)
    assert [seen["schedule"](step) for step in range(5)] == [learning_rate(step, **peak) for step in range(5)]
    assert seen["optimizer"](list(seen["model"].parameters())).param_groups[0]["weight_decay"] == 0.3
    assert seen["model"].config.dropout == 0.25


def test_the_threads_of_the_config_are_those_that_compute(table):
    seen = []
    loop.train(table(train={"threads": 2}), init(device="cpu"), lambda event: seen.append(torch.get_num_threads()))
    torch.set_num_threads(1)
    assert set(seen) == {2}


def test_a_mesh_that_needs_other_ranks_is_refused_on_every_rank(table):
    with pytest.raises(MeshError, match="needs replicate 4 = 4 ranks, but there are 2"):
        run(table(mesh={"replicate": 4}), 2)


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused(table):
    with pytest.raises(ConfigError, match="vocab_size 100 is less than the 257 of the tokenizer"):
        table(model={"vocab_size": 100})


def test_a_padded_vocabulary_is_fine(table):
    summary, _ = run(table(model={"vocab_size": 320}))[0]
    assert load_model(Path(summary.folder))[0].config.vocab_size == 320


def each_error(config, ranks):
    """The error of every rank; fails when one of them ends without."""

    def body(world):
        with pytest.raises((ConfigError, DataError)) as caught:
            loop.train(config, world, lambda event: None)
        return str(caught.value)

    return simulate(ranks, body)


@pytest.mark.parametrize("text", [b"", b"caf\xe9" * 50])
def test_text_that_is_none_is_the_same_error_on_every_rank(table, tmp_path, text):
    (tmp_path / "text.txt").write_bytes(text)
    errors = each_error(table(), 3)
    assert len(set(errors)) == 1 and "text.txt" in errors[0]


def test_hosts_with_other_text_or_another_tokenizer_are_refused_on_every_rank(table, tmp_path):
    for name, text in ("one", "abc " * 200), ("two", "abd " * 200):
        (tmp_path / f"{name}.txt").write_text(text)
    one, two = ({"source": str(tmp_path / f"{name}.txt"), "tokenizer": "bpe", "vocab_size": 258} for name in ("one", "two"))
    for other, said in (two, "hash of the text is"), (one | {"tokenizer": "bytes", "vocab_size": None}, "tokens for training is"):
        configs = table(data=one), table(data=other)
        def body(world, configs=configs, said=said):
            with pytest.raises(ConfigError, match=rf"rank 1 was given another data than rank 0: .*{said}.* text \(.*\) and tokenizer"):
                open_corpus(configs[world.rank], world, print)
        simulate(2, body)


def test_hosts_that_learned_other_tokenizers_from_the_same_text_are_refused(table, monkeypatch):
    number = itertools.count()
    monkeypatch.setattr(job, "tokenizer_hash", lambda tokenizer: str(next(number)))   # as of another version of tokenizers
    with pytest.raises(ConfigError, match="rank 1 was given another data than rank 0: hash of the tokenizer is"):
        simulate(2, lambda world: open_corpus(table(), world, print))


def test_too_little_validation_text_is_told_before_the_first_step_unless_nothing_is_evaluated(table, tmp_path):
    few = {"validation": 0.001}
    errors = each_error(table(data=few), 2)
    assert len(set(errors)) == 1 and "validation tokens are too few for one sample" in errors[0]
    assert not any("StepDone" in path.read_text() for path in tmp_path.glob("runs/*/events/*"))
    run(table(data=few | {"baseline": False}, train={"evaluate": False}), 1)


def test_a_run_folder_that_cannot_be_made_is_the_same_error_on_every_rank(table, tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    errors = each_error(table(), 3)
    assert len(set(errors)) == 1 and "the run folder cannot be made" in errors[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full is a Linux device")
def test_a_disk_that_is_full_on_one_rank_ends_all_ranks_with_its_path(table, tmp_path):
    events = tmp_path / "runs" / "mine" / "events"
    events.mkdir(parents=True)
    (events / "rank-1.jsonl").symlink_to("/dev/full")
    errors = each_error(table(run={"name": "mine"}, train={"steps": 100000}), 3)
    assert len(set(errors)) == 1 and "rank-1.jsonl: cannot be written (No space left" in errors[0]


def test_a_journal_that_one_rank_cannot_open_is_told_on_all_before_the_text_is_read(table, tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine" / "events" / "rank-1.jsonl").mkdir(parents=True)   # a folder in the way
    monkeypatch.setattr(loop, "open_corpus", lambda *_: pytest.fail("it was read"))
    errors = each_error(table(run={"name": "mine"}), 2)
    assert len(set(errors)) == 1 and "rank-1.jsonl" in errors[0]


def test_ranks_with_other_settings_are_told_which(table):
    configs = [table(optimizer={"lr": lr}) for lr in (0.1, 0.2)]

    def body(world):
        with pytest.raises(ConfigError, match=r"config.*optimizer\.lr"):
            loop.train(configs[world.rank], world, lambda event: None)

    simulate(2, body)


def test_weights_that_cannot_be_written_are_an_error_on_every_rank(table, tmp_path):
    (tmp_path / "runs" / "mine" / "tokenizer.json").mkdir(parents=True)   # a folder in the way
    errors = each_error(table(run={"name": "mine"}), 2)
    assert all("the weights cannot be written" in error for error in errors)


def test_the_summary_is_there_where_what_comes_before_it_fails(table, tmp_path):
    (tmp_path / "runs" / "mine" / "samples.txt").mkdir(parents=True)   # a folder in the way
    errors = each_error(table(run={"name": "mine"}), 1)
    assert "samples.txt: cannot be written" in errors[0]
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["validation_loss"] > 0 and summary["trigram_loss"] > 0


def test_a_model_that_its_last_step_has_ruined_writes_no_samples_and_says_why(table):
    said = []
    config = table(train={"steps": 1}, optimizer={"lr": 1e38}, schedule={"decay": "constant", "warmup_steps": 0})
    summary = loop.train(config, init(device="cpu"), lambda event: said.append(str(event)))
    assert any("no samples: the model's logits are not finite" in line for line in said)
    assert load_model(Path(summary.folder)) and not (Path(summary.folder) / "samples.txt").exists()
    assert json.loads((Path(summary.folder) / "summary.json").read_text())["steps"] == 1


def test_a_signal_keeps_the_weights_and_leaves_the_rest_out(table):
    seen = []

    def sink(event):
        seen.append(event)
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    world = init(device="cpu")
    summary = loop.train(table(train={"steps": 1000, "eval_every": 2}), world, sink)
    assert summary.stopped_by == signal.SIGTERM
    assert summary.steps in (3, 4)
    assert load_model(Path(summary.folder))
    assert summary.validation_loss is None, "that after step 2 is not that of the weights"
    assert not (Path(summary.folder) / "samples.txt").exists()


def test_a_run_that_a_signal_on_another_rank_has_ended_writes_its_summary_only(tmp_path, monkeypatch):
    job = SimpleNamespace(world=SimpleNamespace(rank=0), run=tmp_path)
    summary = finish.Summary(folder=str(tmp_path), parameters=1, steps=1, steps_before=0, tokens=1, training_seconds=1.0, training_loss=1.0,
                             validation_loss=None, trigram_loss=None, stopped_by=signal.SIGTERM)
    monkeypatch.setattr(finish, "_compare", pytest.fail)
    assert finish.finish_run(job, summary, StopSignal()) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_folder_that_was_removed_while_the_run_went_does_not_take_the_weights_along(table, tmp_path):
    def sink(event):
        if isinstance(event, StepDone) and event.step == 1:
            shutil.rmtree(tmp_path / "runs")

    summary = loop.train(table(), init(device="cpu"), sink)
    assert load_model(Path(summary.folder))


def test_a_folder_that_cannot_be_made_again_is_the_same_error_on_every_rank(table, tmp_path):
    def body(world):
        def sink(event):
            if world.rank == 0 and isinstance(event, StepDone) and event.step == 5:
                shutil.rmtree(tmp_path / "runs")
                (tmp_path / "runs").write_text("a file in the way")

        with pytest.raises(StorageError, match="the weights cannot be written"):
            loop.train(table(), world, sink)

    simulate(2, body)


def test_a_signal_after_the_last_step_waits_for_the_weights(table, monkeypatch):
    real = loop.save_weights

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        real(*args)

    monkeypatch.setattr(loop, "save_weights", interrupted)
    summary = loop.train(table(), init(device="cpu"), list().append)
    assert summary.stopped_by == signal.SIGINT and summary.validation_loss is not None, "which had been measured"
    assert load_model(Path(summary.folder)) and not (Path(summary.folder) / "samples.txt").exists()


@pytest.mark.parametrize("work", ["trigram_loss", "continue_texts"])
def test_a_signal_while_the_rest_is_made_cuts_it_short_and_leaves_a_summary(table, monkeypatch, work):
    def interrupted(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(finish, work, interrupted)
    summary = loop.train(table(), init(device="cpu"), list().append)
    assert summary.stopped_by == signal.SIGTERM and summary.validation_loss is not None
    assert (summary.trigram_loss is None) == (work == "trigram_loss"), "what was measured before is told"
    assert json.loads((Path(summary.folder) / "summary.json").read_text())["stopped_by"] == signal.SIGTERM


def test_a_signal_cuts_an_evaluation_short_and_its_loss_is_not_told(table, monkeypatch):
    real, sent = loop.evaluation_batches, []

    def batches(*args, **options):
        for batch in real(*args, **options):
            yield batch
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    monkeypatch.setattr(loop, "evaluation_batches", batches)
    events = []
    summary = loop.train(table(train={"eval_every": 2, "global_batch_size": 2}), init(device="cpu"), events.append)
    assert (summary.stopped_by, summary.validation_loss, len(sent)) == (signal.SIGINT, None, 1)
    assert not any(isinstance(event, Evaluated) for event in events)


@pytest.mark.parametrize("axis", ["pipe", "context", "tensor"])
def test_ranks_that_share_their_rows_end_an_evaluation_with_the_same_batch_whichever_was_signalled(table, axis, monkeypatch):
    real, here = loop.evaluation_batches, threading.local()

    def batches(*args, **options):
        for batch in real(*args, **options):
            yield batch
            here.stop.number = here.signal

    def stop_signal(acknowledge):
        here.stop = StopSignal()
        return here.stop

    def body(world):
        here.signal = signal.SIGINT if world.rank == 1 else 0
        summary = loop.train(config, world, list().append)
        return summary.stopped_by, summary.validation_loss

    monkeypatch.setattr(loop, "evaluation_batches", batches)
    monkeypatch.setattr(loop, "StopSignal", stop_signal)
    config = table(mesh={axis: 2}, model={"layers": 2}, schedule={"warmup_steps": 0},
                   train={"steps": 1, "global_batch_size": 2, "deterministic": False})
    assert simulate(Mesh(**{axis: 2}), body) == [(signal.SIGINT, None)] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_all_memory_of_all_hosts_cannot_hold_is_refused_before_it_is_built(table, ranks):
    with pytest.raises(ConfigError, match=r"the model has 1[\d,]{15,} parameters: .* take [\d,]+ GiB, and all hosts .* have [\d,]+ GiB"):
        run(table(model={"width": 1 << 24}), ranks)
