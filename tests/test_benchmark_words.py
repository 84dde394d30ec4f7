"""The command lines of benchmarks: what cannot be measured is refused before anything is started."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(("script", "words", "said"), [
    ("all_reduce", ["--ranks", "2,0"], "argument --ranks: '0': expected a whole number, 1 or more"),
    ("all_reduce", ["--libraries", "gloo,mpi"], "argument --libraries: 'mpi' is none of gloo, Open MPI, rankloom"),
    ("same_losses", ["--ranks", "1,x"], "argument --ranks: 'x': expected a whole number, 1 or more"),
    ("same_losses", ["--steps=-1"], "argument --steps: '-1': expected a whole number, 1 or more"),
    ("sharded", ["--variants", "stage 3", "ZeRo"], "argument --variants: 'ZeRo' is in no name; they are no communication"),
    ("gpu_single", ["--small", "--variants", "theirs"], "argument --variants: 'theirs' is none of ours, FSDP2 eager"),
])
def test_words_that_name_nothing_are_refused(script, words, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"{BENCHMARKS / script}.py", run_name="__main__")
    told = capsys.readouterr()
    assert end.value.code == 2 and said in told.err and not told.out
