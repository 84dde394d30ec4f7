"""What a launcher left in the environment: who this process is, and where all meet.

The only file that reads the environment, and free of torch, so that a command line can ask before it pays for the import.
`init` in world/join.py makes a World of it; world/agent.py is `rankloom train`'s own launcher.
"""

import os
import socket
import subprocess
from dataclasses import dataclass

from rankloom.base.errors import ConfigError


def debug_mode() -> bool:
    """Whether RANKLOOM_DEBUG=1 asks for every collective to be compared across ranks."""
    return os.environ.get("RANKLOOM_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher told this process: who it is and where all meet."""

    launcher: str    # "torchrun", "slurm" or "alone"
    rank: int
    size: int
    local_rank: int
    local_size: int


def find_place(env: dict[str, str] | None = None) -> Place:
    """Read a launcher's variables: torchrun's, then Slurm's; neither means one rank, alone.

    raises: ConfigError when a launcher's variables are incomplete or not numbers
    """
    env = dict(os.environ) if env is None else env
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
    if "RANK" in env and "WORLD_SIZE" in env:
        return Place("torchrun", *_numbers(env, torchrun))
    # salloc sets SLURM_NTASKS in a plain shell too; only srun gives a process its SLURM_PROCID and step.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and env.get("SLURM_NTASKS", "1") != "1":
        return Place("slurm", *_numbers(env, slurm))
    return Place("alone", 0, 1, 0, 1)


def _numbers(env: dict[str, str], names: tuple[str, ...]) -> list[int]:
    """Rank, size, local rank, local size; what a launcher left out is that of one rank alone."""
    values = []
    for name, alone in zip(names, ("0", "1", "0", "1")):
        try:
            values.append(int(env.get(name, alone)))
        except ValueError:
            raise ConfigError(f"environment variable {name} is {env[name]!r}, expected a whole number") from None
    return values


def meeting_point(place: Place) -> str:
    """MASTER_ADDR:MASTER_PORT. Slurm sets neither, so there they are derived from the job: its first host, its number."""
    if place.launcher == "slurm":
        os.environ.setdefault("MASTER_ADDR", _first_slurm_host())
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000))
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _first_slurm_host() -> str:
    """Slurm writes host lists in short form (`node[01-04]`); its own tool expands them."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    if "[" not in nodes:
        return nodes.split(",")[0] or socket.gethostname()
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"SLURM_JOB_NODELIST is {nodes!r} and `scontrol show hostnames` failed: {done.stderr.strip()}; "
                          "set MASTER_ADDR and MASTER_PORT yourself")
    return done.stdout.split()[0]
