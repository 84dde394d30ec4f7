"""docs/sharding.md says what the code says: its computed table is that of the function, its picture that of its script."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sharding.md").read_text()


def script(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the project as a module."""
    monkeypatch.syspath_prepend(ROOT / folder)
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)   # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_for_seven_billion_parameters_is_what_its_function_says(monkeypatch):
    memory = script("benchmarks", "memory", monkeypatch)
    assert memory.show(memory.seven_billion(8, 4096)) in PAGE


def test_a_stage_holds_less_than_the_one_before_and_less_with_more_ranks(monkeypatch):
    memory = script("benchmarks", "memory", monkeypatch)
    n = memory.Size.of(memory.LLAMA_7B)
    for precision in (memory.FP32, memory.BF16):
        by_stage = [memory.held(stage, n, 8, precision).total for stage in range(4)]
        by_ranks = [memory.held(3, n, ranks, precision).total for ranks in (2, 4, 8, 64)]
        assert by_stage == sorted(by_stage, reverse=True) and by_ranks == sorted(by_ranks, reverse=True)


def test_stage_3_sends_three_halves_of_stage_0_but_for_the_root_which_stays(monkeypatch):
    memory = script("benchmarks", "memory", monkeypatch)
    n = memory.Size(all=1000, root=0, block=100)
    assert memory.sent(3, n, 4, memory.FP32) == 1.5 * memory.sent(0, n, 4, memory.FP32) == 1.5 * 2 * 4 * 1000 * 3 / 4
    rooted = memory.Size(all=1000, root=200, block=100)
    assert memory.sent(3, n, 4, memory.FP32) - memory.sent(3, rooted, 4, memory.FP32) == 4 * 200 * 3 / 4


def test_the_memory_in_the_picture_is_that_of_its_schedule(monkeypatch):
    pictures = script("docs", "make_pictures", monkeypatch)
    actions = pictures.schedule(pictures.UNITS)
    _, held = pictures.held_over_time(actions, pictures.UNITS, pictures.RANKS)
    gathered, whole = held["gathered parameters"], held["whole gradients on their way"]
    assert max(gathered) == max(whole) == 2 * 4                      # two units in fp32, never more
    assert gathered[-1] == whole[-1] == held["gradients, own slices"][0] == 0
    assert set(held["own slices: parameters and Adam's two moments"]) == {12 * pictures.UNITS / pictures.RANKS}
    assert max(held["gradients, own slices"]) == 4 * pictures.UNITS / pictures.RANKS
