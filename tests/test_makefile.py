"""The Makefile takes the Python that it is given, or says why not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
PYTHON = """#!/bin/sh
# A Python of version {version}. What it is told to run is written beside it.
case "$2" in
    venv) echo "$0" > made; mkdir -p "$3/bin"; for tool in python ruff mypy; do cp "$0" "$3/bin/$tool"; done;;
    *version_info*) exec {python} -c "
import sys
sys.version_info, sys.base_prefix = {version}, 'of {version}'
$2";;
esac
"""


def make(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """`make lint` in a project of its own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        if not (folder / name).exists():
            shutil.copy(MAKEFILE.with_name(name), folder)
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))} | {"PATH": os.defpath}
    return subprocess.run(["make", "lint", *words], cwd=folder, env=surroundings, capture_output=True, text=True, timeout=60)


def pretended_python(path: Path, version: tuple[int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(version=version, python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("torch", [(), ("TORCH=2.11.0",)])
def test_the_path_of_the_python_may_have_spaces(tmp_path, torch):
    python = pretended_python(tmp_path / "my pythons" / "python3.12", (3, 12))
    done = make(tmp_path, f"PYTHON={python}", *torch)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").read_text() == f"{python}\n"
    assert (tmp_path / ("build/python3.12-torch2.11.0" if torch else ".venv") / ".ready").exists()


def test_a_python_that_is_too_old_or_missing_is_refused_before_an_environment_is_made_of_it(tmp_path):
    old = pretended_python(tmp_path / "python3.10", (3, 10))
    for python in (old, tmp_path / "python4", ""):
        done = make(tmp_path, f"PYTHON={python}")
        assert done.returncode and "rankloom needs Python 3.11 or newer" in done.stdout + done.stderr, done
        assert not (tmp_path / ".venv").exists()


def test_an_environment_of_another_python_is_not_used_in_silence(tmp_path):
    first, other = (pretended_python(tmp_path / f"python3.{minor}", (3, minor)) for minor in (12, 13))
    assert make(tmp_path, f"PYTHON={first}").returncode == 0
    done = make(tmp_path, f"PYTHON={other}")
    assert done.returncode and "another Python" in done.stdout + done.stderr and "make clean" in done.stdout + done.stderr, done
    assert make(tmp_path, f"PYTHON={first}").returncode == 0
