"""Lower floors never import upper ones; late imports inside functions count too."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from syntax import nodes_of

ROOT = Path(__file__).parent.parent / "src" / "rankloom"
FLOORS = ["base", "world", "comm", "shard", "parallel", "checkpoint models data", "train", "watch"]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms.split()}
FILES = sorted(ROOT.rglob("*.py"))
MADE_BY_TORCH = {name for maker in _device_constructors() if getattr(torch, name := maker.__name__, None) is maker}
# All that a room may see of the floors below it, where that is not all of them: watch reads events and run folders only.
SEES_ONLY = {"watch": {"base"}, "models": {"base"}, "data": {"base"}}


def imports(file: Path) -> set[str]:
    """Full names of all modules that `file` imports, anywhere in it, and of what it takes from them, which may be modules too."""
    nodes = nodes_of(file)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return plain | {node.module for node in taken} | {f"{node.module}.{alias.name}" for node in taken for alias in node.names}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "rankloom" and len(parts) > 1 and parts[1] in FLOOR else None


@pytest.mark.parametrize("file", [f for f in FILES if f.parent != ROOT], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_module_imports_only_from_floors_below_its_own(file):
    room = file.relative_to(ROOT).parts[0]
    for used in filter(None, map(room_of, imports(file))):
        assert used == room or FLOOR[used] < FLOOR[room], f"{file.name} ({room}) imports {used}, which is not below it"
        assert used == room or used in SEES_ONLY.get(room, {used}), f"{room} must not know {used}"


def test_the_engine_does_not_know_the_runs_that_drive_it():
    engine = [f for f in FILES if f.is_relative_to(ROOT / "train") and not f.is_relative_to(ROOT / "train" / "run")]
    for file in engine:
        assert not [used for used in imports(file) if used.startswith("rankloom.train.run.")], f"{file.name} must not know train/run"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_only_world_talks_to_torch_distributed(file):
    dotted = [n for n in nodes_of(file) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    names = imports(file) | {f"{n.value.id}.{n.attr}" for n in dotted}
    if file.relative_to(ROOT).parts[0] != "world":
        assert not any(name.startswith("torch.distributed") for name in names)
    if file.relative_to(ROOT) != Path("world/launch.py"):
        assert not names & {"os.environ", "os.getenv", "os.putenv"}, "the environment is read in world/launch.py only"


@pytest.mark.parametrize("file", [f for f in FILES if f.parent.name != "models"], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_tensor_names_its_device_or_it_would_be_made_where_the_user_makes_his_by_default(file):
    """Models are the user's: what is in them is made where he says."""
    for call in (n for n in nodes_of(file) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)):
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" and call.func.attr in MADE_BY_TORCH:
            assert any(keyword.arg == "device" for keyword in call.keywords), f"{file.name}:{call.lineno} {ast.unparse(call)}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_none_of_torch_s_big_distributed_classes_is_used(file):
    code = "\n".join(ast.unparse(n) for n in nodes_of(file) if isinstance(n, ast.Import | ast.ImportFrom))
    for banned in ("DistributedDataParallel", "distributed.fsdp", "_composable", "FullyShardedDataParallel", "DTensor",
                   "distributed.pipelining", "distributed.tensor", "distributed.checkpoint"):
        assert banned not in code


def test_no_module_imports_itself_in_a_circle():
    graph = {".".join(f.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): imports(f) for f in FILES}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join((*path, module))}"
        if module not in seen:
            for used in graph.get(module, set()) & graph.keys():
                visit(used, (*path, module))
            seen.add(module)

    seen: set[str] = set()
    for module in graph:
        visit(module, ())


def test_no_protocol_is_checked_at_run_time():
    """From Python 3.12 on such a check does not see what a module keeps as parameters, buffers and modules: it finds nothing."""
    assert not [f.name for f in FILES for n in nodes_of(f) if isinstance(n, ast.Name | ast.alias) and "runtime_checkable" in ast.unparse(n)]
