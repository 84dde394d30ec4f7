"""Run tests on a pretended GPU: `.venv/bin/python tests/pretended_gpu/run.py tests/test_matrix.py -k pipe`, or any other words for pytest.

Where there is no GPU, most code for CUDA would never run before it meets one. Here it does: device.cpp is a device for torch in host
memory, which has streams, events and a thread of autograd of its own, refuses to mix its tensors with the CPU's, and finds races between
streams; pretended.py gives it the face of `torch.cuda` and of NCCL. A copy of the project is made in which "cuda" is written "pretended",
simulated ranks have a GPU each, and pytest runs there.

What it cannot show: speed, kernels of CUDA itself, torch.compile, and ranks that share one GPU (tests/world/transport/test_cuda.py).
Some tests cannot pass: those that hand CPU modules straight to a technique, count gloo's messages, expect common pages, or pretend CUDA
themselves.
It needs a C++ compiler; the first time it takes a minute or two.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from torch.utils.cpp_extension import load

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
BUILD = PROJECT / "build" / "pretended_gpu"
TREE = BUILD / "tree"
KEPT = ("src/rankloom/world/transport/cuda", "tests/world/transport/test_cuda.py", "tests/pretended_gpu")   # speak to the driver itself
EDITS = {   # file: what stands there, and what is to stand there
    "src/rankloom/world/connect.py": [(r"\A", "import pretended\n"), (r"\Z", "\n\nconnect = pretended.as_nccl(connect)\n")],
    "src/rankloom/world/transport/router.py": [(r"\A", "import pretended\n")],
    "src/rankloom/world/simulate.py": [(r"\A", "import pretended\n"), (r'torch\.device\("cpu"\)', "pretended.gpu_of(rank)")],
    "src/rankloom/train/engine.py": [(r"\Z", "\n\nimport pretended\nEngine.full_state_dict = pretended.on_cpu(Engine.full_state_dict)\n")],
    "tests/conftest.py": [(r'monkeypatch\.setitem\(simulate\.__kwdefaults__, "backend", "rankloom"\)', "pass"), (r"\Z", '''

import torch.testing

_assert_close = torch.testing.assert_close
torch.testing.assert_close = lambda *args, **kwargs: _assert_close(*args, **{"check_device": False, **kwargs})


@pytest.fixture(autouse=True)
def no_memory_is_freed_while_another_stream_uses_it():
    from pretended import device_c

    device_c.late()
    yield
    found = device_c.late()
    assert not found, found
''')],
}


def make_tree() -> None:
    """The project, with the pretended device in CUDA's place."""
    shutil.rmtree(TREE, ignore_errors=True)
    for part in ("src", "tests", "docs", "benchmarks"):
        shutil.copytree(PROJECT / part, TREE / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "train.toml", "constraints.txt"):
        shutil.copy(PROJECT / file, TREE)
    for file in (file for part in ("src", "tests") for file in (TREE / part).rglob("*.py")):
        name, text = str(file.relative_to(TREE)), file.read_text()
        if not name.startswith(KEPT):
            text = re.sub(r"""(torch\.|["']|\.is_)cuda\b""", r"\1pretended", text)
            text = text.replace(".view(torch.uint8).numpy()", ".view(torch.uint8).cpu().numpy()")
        for pattern, edit in EDITS.get(name, []):
            text, times = re.subn(pattern, lambda match, edit=edit: edit, text, count=1)
            assert times, f"{name}: nothing in it is like {pattern}; has it changed?"
        file.write_text(text)


def main() -> int:
    """Compile, copy, run; the exit code is pytest's."""
    BUILD.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"   # where ninja is
    load("pretended_device", [str(HERE / "device.cpp")], build_directory=str(BUILD), extra_cflags=["-O1"])
    make_tree()
    environment = os.environ | {"PRETENDED_BUILD": str(BUILD), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{TREE / 'src'}"}
    return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=TREE, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
