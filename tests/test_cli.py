"""The command line: fast help, one clear message for a mistake, and whole runs from the outside."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rankloom as rl
from patience import AT_ONCE, STARTED, wait_until
from rankloom import cli
from rankloom.train.run.config import load_config

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")

RANKLOOM = [sys.executable, "-m", "rankloom"]
TINY = """
[run]
folder = "runs"
[model]
preset = "1M"
width = 32
layers = 1
ffn = 32
[data]
source = "text.txt"
validation = 0.1
cache = "cache"
[train]
steps = 6
seq_len = 16
global_batch_size = 4
samples = 1
sample_tokens = 8
"""


def rankloom(*words, **options):
    """Run the command line to its end."""
    return subprocess.run(
        [*RANKLOOM, *map(str, words)], capture_output=True, text=True, check=False, **options
    )


def set_up(path):
    """A tiny config and a text."""
    (path / "train.toml").write_text(TINY)
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder with a tiny config and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    set_up(tmp_path)
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch, capfd):
    """Runs the command line in this process, to its end: what a process would say, and its ranks, without the seconds that one needs to
    import torch."""
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rankloom", *map(str, words)])
        handler, code = signal.getsignal(signal.SIGTERM), 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        return subprocess.CompletedProcess(words, code or 0, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The folder of a run on one rank, runs/one, and how its process ended."""
    path = tmp_path_factory.mktemp("one_rank")
    set_up(path)
    return path, rankloom("train", "train.toml", "--run.name", "one", cwd=path, env={**os.environ, "OMP_NUM_THREADS": "1"})


def losses(run):
    """What a run has told, step by step."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def without(libraries, *words):
    """Run the command line to its end as a process that may not import these."""
    code = (
        "import sys; from rankloom.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"bad = set({libraries!r}) & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_help_is_there_in_150_ms():
    """Of the processor's time, which is all that it takes: other programs of a busy machine do not count. On a processor so slow, or so
    shared, that Python and the library of commands alone take more than half of it, twice what these take."""
    def seconds(*words):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    def is_quick():
        return seconds(*RANKLOOM, "--help") < max(0.150, 2 * seconds(sys.executable, "-c", "import cyclopts"))

    assert any(is_quick() for _ in range(40)), "the best of many: the others take its caches too"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["scale", "--help"], ["bench", "--help"], ["presets"]])
def test_help_and_version_import_no_heavy_library(words):
    without(["torch", "numpy", "pydantic", "matplotlib", "safetensors"], *words)


def test_help_names_every_command():
    text = rankloom("--help").stdout
    assert all(command in text for command in ("train", "scale", "bench", "generate", "presets", "--version"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "trian.toml"], "error: trian.toml: no such file. There: train.toml"),
        (["train", "--mesh.shard", "2"], "error: --mesh.shard: no such file; the file comes first, then its keys. There: train.toml"),
        (["scale", "--ranks", "1,2", "--mesh.shard=2"], "error: --mesh.shard=2: no such file; the file comes first, then its keys"),
        (["train", "train.toml", "--mesh.tenosr", "2"], "error: --mesh.tenosr: unknown key 'tenosr'. Did you mean 'tensor'?"),
        (["train", "train.toml", "--mesh.replicate", "3"], "local ? x ranks 3 x accumulate ? = global 4 has no solution"),
        (["train", "train.toml", "--mesh.replicate", "8"], "global_batch_size 4 is smaller than the 8 ranks"),
        (["train", "train.toml", "--train.stage", "3", "--train.reshard_after_forward", "2"], "2 does not divide [mesh] shard 1"),
        (["train", "train.toml", "--mesh.shard", "3"], "error: train.toml, on 3 ranks: local ? x ranks 3 x accumulate ? = global 4"),
        (["train", "train.toml", "--model.preset", "2M"], "no model preset '2M'"),
        (["train", "train.toml", "--data.source", "none.txt"], "error: no text at 'none.txt' in /"),
        (["train", "train.toml", "--run.folder", "text.txt/x"], "text.txt/x/"),
        (["scale", "train.toml", "--ranks", "1,3"], "error: on 3 ranks: "),
        (["scale", "train.toml", "--ranks", "x"], "error: --ranks x: expected numbers"),
        (["generate", "runs/none"], "error: runs/none: no such run folder"),
        (["bench", "--algorithm", "rign"], "error: there is no algorithm 'rign'. Did you mean 'ring'?"),
        (["bench", "--collective", "all_gahter"], "error: there is no collective 'all_gahter'. Did you mean 'all_gather'?"),
        (["bench", "--sizes", "0"], "error: size '0': expected a number of bytes above 0"),
        (["bench", "--ranks", "1"], "error: --ranks 1: one rank has nobody to talk to"),
        (["bench", "--ranks", ""], "error: --ranks : expected numbers of ranks with commas between them"),
        (["bench", "--topology", "none.toml"], "error: none.toml: no such file"),
        (["bench", "--out", "text.txt"], "error: --out text.txt: cannot be made"),
        (["bench", "--save", "none/x.json"], "error: --save none/x.json: there is no folder none"),
        (["bench", "--save", "x.json", "--collective", "broadcast"], "which is not in --collective broadcast"),
        (["train", "train.toml", "--comm.all_reduce", "rnig"], "must be 'backend', 'auto', 'naive'"),
        (["train", "train.toml", "--comm.topology", "none.toml"], "error: none.toml: no such file"),
        (["generate", ".", "--max-tokens", "0"], "error: --max-tokens 0"),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(here, words, message):
    done = here(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [
    ["train", "train.toml", "--data.source", "/nope"], ["train", "train.toml", "--data.source", "/nope.npy"],
    ["train", "train.toml", "--data.source", "/nope", "--mesh.replicate", "2"], ["train", "train.toml", "--mesh.shard", "3"],
    ["train", "train.toml", "--train.stage", "3", "--train.reshard_after_forward", "2"], ["train", "train.toml", "--data.source", "empty"],
    ["train", "train.toml", "--data.tokenizer", "/nope.json", "--mesh.replicate", "2"],
    ["scale", "train.toml", "--data.tokenizer", "/nope.json"], ["scale", "train.toml", "--data.source", "/nope"],
    ["bench", "--ranks", "1"], ["bench", "--ranks", "0"],
    ["bench", "--topology", "none.toml"],
])
def test_what_is_refused_leaves_no_folder(folder, here, words):
    (folder / "empty").mkdir()
    done = here(*words)
    assert done.returncode == 2, done.stderr
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_a_run_with_nothing_left_to_do_is_refused_before_it_has_a_folder(folder, here):
    assert here("train", "train.toml", "--run.name", "one", "--checkpoint.interval", "6").returncode == 0
    done = here("train", "train.toml", "--checkpoint.resume", "runs/one")
    assert done.returncode == 2 and "nothing is left to train; give more --train.steps" in done.stderr
    assert [path.name for path in Path("runs").iterdir()] == ["one"]


def test_a_run_that_only_its_end_is_missing_of_is_finished(folder, here):
    assert here("train", "train.toml", "--run.name", "one", "--checkpoint.interval", "6").returncode == 0
    (Path("runs") / "one" / "summary.json").unlink()   # as if it had been killed in its last evaluation
    done = here("train", "train.toml", "--run.name", "two", "--checkpoint.resume", "runs/one")
    assert done.returncode == 0, done.stderr
    assert "nothing was left to train after step 6\nrun folder: runs/two" in done.stdout


def test_a_study_whose_folder_cannot_be_written_names_its_own_option(folder, here):
    done = here("scale", "train.toml", "--ranks", "1", "--out", "/proc/study")
    assert done.returncode == 2 and "error: --out /proc/study: cannot be made or written" in done.stderr and "---" not in done.stdout


def test_a_mistake_ends_the_process_with_2_and_one_message(folder):
    done = rankloom("train", "train.toml", "--mesh.tenosr", "2")
    assert done.returncode == 2 and done.stderr == "error: --mesh.tenosr: unknown key 'tenosr'. Did you mean 'tensor'?\n"


def test_debug_mode_adds_the_traceback(folder):
    done = rankloom("train", "none.toml", env={**os.environ, "RANKLOOM_DEBUG": "1"})
    assert "Traceback" in done.stderr and "error: none.toml: no such file" in done.stderr


def test_one_rank_trains_in_this_process_and_generate_reads_its_run(one_rank, here, monkeypatch):
    path, done = one_rank
    monkeypatch.chdir(path)
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout and "that of a trigram model" in done.stdout and "run folder: runs/one" in done.stdout
    assert "\x1b" not in done.stdout, "no terminal, no control codes"
    assert {p.name for p in Path("runs/one").iterdir()} == {
        "config.toml", "env.json", "events", "logs", "loss.png", "metrics.jsonl", "model.json", "model.safetensors",
        "samples.txt", "summary.json", "tokenizer.json",
    }
    words = ["generate", "runs/one", "--prompt", "the q", "--max-tokens", 5, "--seed", 1]
    text = without(["torch._dynamo"], *words).stdout   # the compiler, which takes as long to import as torch itself
    assert text.startswith("the q")
    assert text == here(*words).stdout, "the same seed, the same text, in any process"
    words[3] = "- the q"
    assert here(*words).stdout.startswith("- the q"), "it is no option"


def test_generate_does_not_say_of_a_run_whose_tokenizer_is_lost_that_it_was_trained_without_one(one_rank, here, folder):
    for file in ("model.safetensors", "model.json"):
        (folder / file).symlink_to(one_rank[0] / "runs" / "one" / file)
    told = here("generate", folder, "--prompt", "the q")
    assert told.returncode == 2 and "holds no tokenizer.json" in told.stderr and "or the file is lost" in told.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1:strict"])
def test_what_the_encoding_of_the_output_has_not_is_a_question_mark(encoding):
    code = "import sys; from rankloom import cli; cli.app = lambda: print('\\u65e5 ok'); cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, b"? ok\n"), done.stderr


def test_a_signal_before_the_first_step_ends_a_rank_also_in_an_import_that_takes_it_for_a_failure(folder):
    code = "import signal; from rankloom import cli\ndef rank(config, file):\n" \
           "    try: signal.raise_signal(signal.SIGINT)\n    except BaseException: raise ImportError('no such thing')\n" \
           "cli._be_a_rank = rank; cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "train", "train.toml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped by SIGINT\n")


def test_what_a_command_imports_is_never_looked_at_by_the_garbage_collector():
    script = """if True:
        import gc, sys
        from rankloom.cli import main
        sys.argv = ["rankloom", "generate", "nowhere", "--prompt", "x"]
        try:
            main()
        finally:
            print(gc.get_freeze_count(), gc.isenabled())
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    objects, collects = done.stdout.split()
    assert done.returncode == 2 and int(objects) > 100_000 and collects == "True"


def test_under_torchrun_the_command_joins_the_ranks_that_are_there_and_reaches_the_same_losses_as_one(folder, one_rank):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "logs", "-m", "rankloom", "train", "train.toml"]
    done = subprocess.run([sys.executable, *words, "--run.name", "joined"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6/6  loss") == 1, "one rank draws"
    assert json.loads(Path("runs/joined/env.json").read_text())["ranks"] == 2
    assert losses(Path("runs/joined")) == pytest.approx(losses(one_rank[0] / "runs/one"), rel=1e-5), "fp32: the sums are in another order"


@pytest.mark.parametrize(("number", "code", "ranks"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)], ids=["SIGINT-2", "SIGTERM-1"])
def test_a_signal_ends_all_ranks_within_seconds_and_keeps_the_weights(folder, number, code, ranks):
    """What a launcher does with either signal: world/test_agent.py."""
    run = Path("runs/long")
    words = ["train", "train.toml", "--run.name", "long", "--train.steps", "1000000", "--mesh.replicate", str(ranks)]
    start = time.monotonic()
    with subprocess.Popen([*RANKLOOM, *words], stdout=subprocess.PIPE, text=True) as child:
        metrics = run / "metrics.jsonl"
        wait_until(lambda: child.poll() is not None or (metrics.exists() and metrics.stat().st_size), STARTED)
        child.send_signal(number)
        asked = time.monotonic()
        text, _ = child.communicate()
    assert child.returncode == code
    assert time.monotonic() - asked < AT_ONCE + (asked - start), "it loads no less at the end, to draw, than at the start"
    assert text.count("stopping after this step") == 1, "one rank acknowledges it"
    assert "there is no checkpoint to resume from; --checkpoint.interval N" in text
    assert text.count("run folder: runs/long") == 2 and text.endswith("run folder: runs/long\n"), "at the start, and as the last line"
    assert (run / "model.safetensors").exists()
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == number


def test_more_ranks_than_a_host_has_room_for_are_refused_before_the_run_has_a_folder(here, folder):
    done = here("train", "train.toml", "--mesh.replicate", "300", "--train.global_batch_size", "300")
    assert done.returncode == 2 and "300 ranks share a host, expected 256 at most in shared memory" in done.stderr
    assert not (folder / "runs").exists()


def test_a_mistake_that_the_ranks_find_is_one_message_too(folder, here):
    (folder / "text.txt").write_bytes(b"caf\xe9" * 99)
    done = here("train", "train.toml", "--mesh.replicate", "2", "--run.name", "bad")
    assert done.returncode == 2
    assert done.stderr.count("not UTF-8: byte 0xe9 at offset 3") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "run folder: runs/bad\n", "once"


def test_a_file_named_as_a_module_of_python_in_the_current_folder_is_not_imported_by_ranks(folder, here):
    """Nor does the command import it, which starts them."""
    (folder / "queue.py").write_text("raise SystemError('no module of Python')")
    done = here("train", "train.toml", "--mesh.replicate", "2", "--train.steps", "1", "--train.samples", "0")
    assert done.returncode == 0, done.stderr


def test_ranks_and_runs_of_a_study_are_told_of_a_folder_that_is_called_as_the_word_that_removes_a_key(folder, here, monkeypatch):
    monkeypatch.setattr("rankloom.world.agent.launch_ranks",
                        lambda ranks, argv, **options: sys.exit(load_config(argv[5], argv[6:]).run.folder))
    assert here("train", "train.toml", "--mesh.replicate", "2", "--run.folder", "./none").returncode == "none/"
    monkeypatch.setattr(cli, "_run_child", lambda argv: sys.exit(load_config(argv[-1]).run.folder))
    assert here("scale", "train.toml", "--ranks", "1", "--out", "none").returncode == "none/"


@pytest.fixture
def pipe(folder):
    """The path of a pipe with the config in it."""
    reader, writer = os.pipe()
    os.write(writer, TINY.encode())
    os.close(writer)
    yield f"/dev/fd/{reader}"
    os.close(reader)


def test_ranks_get_the_config_that_their_launcher_has_read_from_a_pipe(here, pipe):
    words = ["train", pipe, "--mesh.replicate", "2", "--run.name", "two", "--train.samples", "0"]
    done = here(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("runs/two/env.json").read_text())["command"] == ["rankloom", *words]


def test_the_runs_of_a_study_get_the_config_that_it_has_read_from_a_pipe_once(here, pipe):
    done = here("scale", pipe, "--ranks", "1,2", "--steps", "4", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert [load_config(f"out/ranks-{n}.toml").run.name for n in (1, 2)] == ["ranks-1", "ranks-2"]


def test_ranks_that_all_end_with_0_before_the_summary_is_there_have_failed(folder, monkeypatch, capsys):
    monkeypatch.setattr("rankloom.world.agent.launch_ranks", lambda *words, **options: 0)
    with pytest.raises(rl.RankFailed, match=r"rank 0 ended with exit code 0 before it wrote runs/short/summary.json"):
        cli.train(Path("train.toml"), "--mesh.replicate", "2", "--run.name", "short")
    assert capsys.readouterr().out == "run folder: runs/short\n"


def test_a_run_that_fails_once_its_summary_is_there_says_its_folder_too(folder, monkeypatch, capsys):
    """As where samples cannot be written: rank 0 has not come to its last words."""
    def launch(*words, log_dir, **options):
        (log_dir.parent / "summary.json").write_text("{}")
        raise rl.RankFailed("no room for samples", rank=0)

    monkeypatch.setattr("rankloom.world.agent.launch_ranks", launch)
    with pytest.raises(rl.RankFailed):
        cli.train(Path("train.toml"), "--mesh.replicate", "2", "--run.name", "full")
    assert capsys.readouterr().out == "run folder: runs/full\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_a_signal_ends_before_its_first_step_says_so_and_its_folder_once(folder, ranks):
    Path("long.jsonl").write_text('{"text": "of a million documents"}\n' * 1_000_000)   # to read them takes seconds
    words = ["train", "train.toml", "--data.source", "long.jsonl", "--mesh.replicate", str(ranks)]
    with subprocess.Popen([*RANKLOOM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline().startswith("run folder: runs/")
        child.send_signal(signal.SIGINT)
        assert child.communicate() == ("", "stopped by SIGINT\n")
    assert child.returncode == 130


def test_a_backend_of_matplotlib_that_is_not_installed_spoils_no_plot(folder):
    """A notebook names its own in the environment, and `!rankloom train` inherits it."""
    done = rankloom("train", "train.toml", "--train.samples", "0", "--run.name", "one",
                    env={**os.environ, "MPLBACKEND": "no_such_backend"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("run folder: runs/one\n") and Path("runs/one/loss.png").exists()


def test_a_width_of_0_columns_is_none():
    without_a_terminal = {**os.environ, "COLUMNS": "0"}
    assert "Unknown command" in rankloom("tarin", env=without_a_terminal).stderr
    for words in (["--help"], ["schedule", "list"]):
        assert rankloom(*words, env=without_a_terminal).stdout == rankloom(*words, env={**os.environ, "COLUMNS": "80"}).stdout != ""


def test_scale_launches_ranks_that_reach_the_same_losses_as_one_and_measures_tabulates_and_draws(here):
    done = here("scale", "train.toml", "--ranks", "1,2", "--steps", "6", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(Path("out/scale.json").read_text())
    assert [row["ranks"] for row in rows] == [1, 2]
    assert rows[0]["speed_up"] == rows[0]["efficiency"] == 1.0
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["speed_up"] / 2, rel=1e-12)
    assert "efficiency" in done.stdout and Path("out/scale.png").exists()
    alone, both = Path("out/ranks-1"), Path("out/ranks-2")
    assert len(losses(both)) == 6 and losses(both) == pytest.approx(losses(alone), rel=1e-5), "fp32: the sums are in another order"
    assert json.loads((both / "env.json").read_text())["ranks"] == 2
    assert sorted(p.name for p in (both / "events").iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]


def test_the_runs_of_a_study_lie_in_its_folder_also_where_a_shell_leaves_the_tilde_to_it(folder, here, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(cli, "_run_child", lambda argv: sys.exit(load_config(argv[-1]).run.folder))
    assert here("scale", "train.toml", "--ranks", "1", "--out=~/study").returncode == f"{folder}/study/"
    assert here("schedule", "show", "1f1b", "--svg=~/drawn.svg").returncode == 0 and (folder / "drawn.svg").exists()


def test_a_study_names_a_run_before_what_that_prints_also_in_a_file(folder):
    code = "import os, sys; from rankloom import cli; cli._run_child = lambda argv: sys.exit(os.write(1, b'the run')); cli.main()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code, "scale", "train.toml", "--ranks", "1"], capture_output=True, text=True, check=False,
                          env=environment)
    assert done.stdout == "--- 1 rank\nthe run", done.stderr


def test_a_study_of_warm_up_only_is_refused_before_it_runs():
    with pytest.raises(rl.ConfigError, match="--steps 3: the first 3 steps of a run warm up"):
        cli.scale(Path("train.toml"), steps=3)


def test_a_study_under_a_launcher_is_told_to_go_without_it(folder, monkeypatch):
    """Its runs would take the launcher's ranks for their own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(rl.ConfigError, match="starts the ranks of each of its runs itself: give the command without torchrun"):
        cli.scale(Path("train.toml"))
    assert not Path("runs").exists()


def test_a_closed_terminal_ends_a_study_and_its_run(folder, monkeypatch):
    """The signal may come to the study alone, as from `kill -HUP`."""
    def closed(argv):
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(cli, "_run_child", closed)
    with pytest.raises(SystemExit, match="^129$"):
        cli.scale(Path("train.toml"), ranks="1")


@pytest.mark.parametrize(("ends", "raised", "said"), [
    ("sys.exit(2)", SystemExit, "^2$"), ("os.kill(os.getpid(), 9)", rl.RankFailed, "was killed by signal 9"),
])
def test_a_run_of_a_study_that_told_its_failure_ends_the_study_without_another_word(ends, raised, said):
    """Its box is the last thing on the screen."""
    with pytest.raises(raised, match=said):
        cli._run_child([sys.executable, "-S", "-c", f"import os, sys; {ends}"])


def test_bench_times_checks_tabulates_fits_and_draws_and_two_ranks_are_launched_that_choose_by_it(here, one_rank):
    words = ["--ranks", "2", "--sizes", "4KiB,64KiB", "--turns", "1", "--collective", "all_reduce,broadcast"]
    done = here("bench", *words, "--out", "out", "--save", "links.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--- 2 ranks" in done.stdout and "1 node of 2 ranks" in done.stdout and "\x1b" not in done.stdout
    assert "broadcast 64 KiB on 2 ranks  100%  0:00 left" in done.stdout
    for told in ("all_reduce on 2 ranks, fp32", "busbw", "because", "what links cost by the fit", "the fit is off by naive "):
        assert told in done.stdout, told
    found = json.loads(Path("out/bench.json").read_text())
    times = found["all_reduce"][0]["times"] + found["broadcast"][0]["times"]
    assert {timed["algorithm"] for timed in times} >= {"naive", "tree", "ring", "halving", "backend", "binomial", "chain"}
    assert all(timed["wrong"] == 0 and timed["seconds"] > 0 for timed in times)
    assert Path("out/bench-all_reduce.png").stat().st_size > 10_000 and Path("out/bench-broadcast.png").exists()
    words = ["--mesh.replicate", "2", "--comm.all_reduce", "auto", "--comm.topology", "links.json"]
    trained = here("train", "train.toml", "--run.name", "chosen", *words)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "all-reduce on 1 node of 2 ranks: " in trained.stdout and "step 6/6" in trained.stdout
    assert losses(Path("runs/chosen")) == pytest.approx(losses(one_rank[0] / "runs/one"), rel=1e-5), "fp32: the sums are in another order"


def test_bench_joins_the_ranks_of_a_launcher_and_pretends_the_nodes_of_a_cluster_file(folder):
    Path("cluster.toml").write_text("nodes = [[0, 2], [1]]\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--log-dir", "logs", "-m", "rankloom", "bench"]
    words = ["--sizes", "1KiB", "--turns", "1", "--algorithm", "hierarchical,ring", "--topology", "cluster.toml", "--out", "out"]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 nodes of 2, 1 ranks") == 1, "one rank tells"
    (found,) = json.loads(Path("out/bench.json").read_text())["all_reduce"]
    assert (found["ranks"], found["nodes"]) == (3, [[0, 2], [1]])
    assert {timed["algorithm"]: timed["wrong"] for timed in found["times"]} == {"ring": 0, "hierarchical": 0}
    assert {"inside", "between", "host"} >= found["fit"]["links"].keys() >= {"host"}


def test_ctrl_c_ends_a_bench_within_seconds(folder):
    words = ["--ranks", "2", "--turns", "1000000", "--sizes", "4MiB"]
    with subprocess.Popen([*RANKLOOM, "bench", *words], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if "all_reduce 4 MiB" in line:
                break
        child.send_signal(signal.SIGINT)
        begin = time.monotonic()
        child.communicate()
    assert child.returncode == 130 and time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize("words", ["--help", "train --help", "presets", "schedule list", "schedule show 1f1b"])
def test_a_reader_that_ends_early_is_not_taken_for_a_failed_rank(words):
    """rich itself would exit with 1."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*RANKLOOM, *words.split()], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_rank_of_a_bench_whose_reader_has_ended_is_killed_as_by_a_closed_terminal_which_a_launcher_explains(folder):
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*RANKLOOM, "bench"], stdout=write, check=False, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    os.close(write)
    assert ended.returncode == -signal.SIGHUP


@pytest.mark.parametrize("words", ["--help", "presets", "schedule list"])
def test_an_output_whose_disk_is_full_is_one_message(words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*RANKLOOM, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, "error: the output cannot be written: No space left on device\n")
