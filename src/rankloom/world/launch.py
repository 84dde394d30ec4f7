"""Read what a launcher left in the environment: the rank of this process, and where all ranks meet.

The only file that reads the environment. It does not import torch, so that a command line can use it without that delay.
`init` in world/join.py builds a World from it; world/agent.py is the launcher of `rankloom train`.
"""

import json
import os
import re
import socket
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rankloom.base.errors import ConfigError
from rankloom.world.failure import write_failure

RANKLOOM = (sys.executable, "-P", "-m", "rankloom")   # how a command starts another; -P: imports nothing from the current folder
LAUNCHED = "RANKLOOM_LAUNCHED"   # set in the ranks of world/agent.py: the command that launched them, as JSON
OTHER_LAUNCHERS = "start the ranks with torchrun or srun"
FIXED_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def debug_mode() -> bool:
    """Whether RANKLOOM_DEBUG=1 is set: then ranks compare every collective before they run it."""
    return os.environ.get("RANKLOOM_DEBUG", "0") not in ("", "0")


def is_launched_here() -> bool:
    """Whether the launcher of `rankloom train` has started this rank (world/agent.py)."""
    return LAUNCHED in os.environ


def command() -> list[str]:
    """The command that the user gave: that of the launcher, if this rank has been started by one of ours."""
    return json.loads(os.environ.get(LAUNCHED, "null")) or sys.argv


def restarts() -> int:
    """How often torchrun has restarted this job because ranks of this node failed. Other nodes may have another count."""
    return _numbers(dict(os.environ), {"TORCHELASTIC_RESTART_COUNT": 0})[0]


def agent_mark() -> str | None:
    """An identity of torch's agent on this node, unlike that of any later agent: the host, and the random folder of its error files.

    Their path is <folder with a random name>/attempt_<n>/<local rank>/<file>. The job's own name is no help: for most jobs it is "none".
    """
    made = re.fullmatch(r"(.+)/attempt_\d+/\d+/[^/]+", os.environ.get("TORCHELASTIC_ERROR_FILE", ""))   # else the user has set it
    return f"{socket.gethostname()}:{made[1]}" if made else None


def has_agent() -> bool:
    """Whether the parent of this process is torch's elastic agent, torchrun's or ours."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def agent_keeps_store() -> bool:
    """Whether the agent serves the store at the meeting point; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def chosen_interface() -> str | None:
    """The (first) network interface that GLOO_SOCKET_IFNAME names for traffic between hosts; torch reads the same variable."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None


def decides_heap() -> bool:
    """Whether the user has configured the C library's malloc, or preloads a library that may replace it."""
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def rank_environment(ranks: int, *, deterministic: bool = False) -> dict[str, str]:
    """The environment variables for `ranks` processes that share this host, except those that the user has set.

    Each rank gets its share of the cores: more threads than cores would wait for each other. cuBLAS adds in a fixed order only
    with a fixed workspace, whose size it reads before the first matrix product.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, cores() // ranks)), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if deterministic:
        wanted |= FIXED_CUBLAS
    return {name: value for name, value in wanted.items() if name not in os.environ} | {LAUNCHED: json.dumps(sys.argv)}


def fix_cublas_workspace() -> None:
    """Set for this process what `rank_environment` sets for ranks. Call it before the first matrix product on a GPU."""
    for name, value in FIXED_CUBLAS.items():
        os.environ.setdefault(name, value)


def forget_useless_settings() -> None:
    """For programs that print, and draw to files only. Call it before they make a console.

    Where MPLBACKEND names a backend that is missing, such as a notebook's, no import works. Where COLUMNS is 0, as scripts set it that
    asked for the width without a terminal, rich prints neither tables nor errors.
    """
    os.environ.pop("MPLBACKEND", None)
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def record_failure(error: BaseException) -> bool:
    """Tell the launcher, if there is one, why this rank fails. The first error that a rank reports counts.

    Returns whether the launcher will show the error. If so, this rank should not: its output would appear above the real cause.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return bool(file) and write_failure(error, Path(str(file))) and is_launched_here()


def report_uncaught() -> None:
    """From here on, report an exception that ends this process to the launcher."""
    show = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (isinstance(error, Exception) and record_failure(error)):
            show(kind, error, trace)

    sys.excepthook = tell


@dataclass(frozen=True, slots=True)
class Place:
    """What a launcher told this process: its rank, the number of ranks, and its node."""

    launcher: str    # "torchrun", "slurm", "mpirun" or "alone"
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int = 0    # the same for ranks that share a node


def find_place(env: dict[str, str] | None = None) -> Place:
    """Read the launcher's variables: torchrun's, else Open MPI's, else Slurm's. Without any, this is the only rank.

    raises: ConfigError when a launcher's variables are incomplete or not numbers
    """
    env = dict(os.environ) if env is None else env
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        raise ConfigError("of the environment variables RANK and WORLD_SIZE only one is set; a launcher sets both")
    if "RANK" in env:
        rank, size, local_rank, local_size = _numbers(env, torchrun)
        if "LOCAL_WORLD_SIZE" in env and not 0 <= local_rank < local_size:
            raise ConfigError(f"rank {rank}: LOCAL_RANK is {local_rank} and LOCAL_WORLD_SIZE is {local_size}; the ranks of a host go from "
                              "0 to LOCAL_WORLD_SIZE - 1")
        # Some launchers do not set GROUP_RANK. Ranks of a node have consecutive numbers, so its first rank identifies the node.
        return _checked(Place("torchrun", rank, size, local_rank, local_size, *_numbers(env, {"GROUP_RANK": rank - local_rank})))
    if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":   # before Slurm: mpirun may start its ranks from a Slurm step of one task per node
        return _checked(_open_mpi_place(env))
    # salloc sets SLURM_NTASKS in a plain shell too; only srun sets SLURM_PROCID and SLURM_STEP_ID for a process.
    tasks = env.get(_slurm_size(env), "1")
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and tasks != "1" and env.get("PMI_SIZE", tasks) == tasks:
        return _checked(_slurm_place(env))
    if env.get("PMI_SIZE", "1") != "1" or env.get("PMIX_RANK", "0") != "0":
        raise ConfigError("an MPI launcher has started several processes (PMI_SIZE, PMIX_RANK), and rankloom reads its own variables from "
                          f"Open MPI only; {OTHER_LAUNCHERS}, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                          "MASTER_PORT for each of them")
    return Place("alone", 0, 1, 0, 1)


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"{place.launcher} says that this is rank {place.rank} of {place.size}; ranks go from 0 to size - 1")
    return place


def _open_mpi_place(env: dict[str, str]) -> Place:
    rank, size, local_rank, local_size = _numbers(
        env, {f"OMPI_COMM_WORLD_{name}": 1 if "SIZE" in name else 0 for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")})
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]:
        raise ConfigError(f"mpirun has started {size} processes, and {' and '.join(missing)} must say where they meet: the host of rank 0 "
                          f"and a free port there (mpirun -x MASTER_ADDR=host0 -x MASTER_PORT=29500 ...); or {OTHER_LAUNCHERS}")
    # Ranks of a node need not have consecutive numbers (--map-by node), and Open MPI does not number nodes.
    return Place("mpirun", rank, size, local_rank, local_size, zlib.crc32(socket.gethostname().encode()))


def _slurm_size(env: dict[str, str]) -> str:
    """The variable with the number of tasks of the step. SLURM_NTASKS is that of the job: it may be more (salloc's interactive step)."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _slurm_place(env: dict[str, str]) -> Place:
    total = _slurm_size(env)
    rank, size, local_rank, node, per_node = _numbers(
        env, {"SLURM_PROCID": 0, total: 1, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_NTASKS_PER_NODE": 1})
    names = [name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if name in env]
    if not names:
        return Place("slurm", rank, size, local_rank, per_node, node)
    tasks = tasks_per_node(env[names[0]], names[0])
    if sum(tasks) != size or not 0 <= node < len(tasks) or not 0 <= local_rank < tasks[node]:
        raise ConfigError(f"{names[0]} is {env[names[0]]!r}, {sum(tasks)} tasks on {len(tasks)} nodes, which does not fit "
                          f"{total} {size}, SLURM_NODEID {node} and SLURM_LOCALID {local_rank}")
    return Place("slurm", rank, size, local_rank, tasks[node], node)


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand Slurm's short form to one number for each node; raises ConfigError.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"environment variable {name} is {text!r}, expected numbers of tasks such as 2(x3),1")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))]


def _numbers(env: dict[str, str], names: dict[str, int]) -> list[int]:
    """The values of whole-number variables; the default from `names` for a variable that the launcher has not set."""
    values = []
    for name, otherwise in names.items():
        try:
            values.append(int(env.get(name, otherwise)))
        except ValueError:
            raise ConfigError(f"environment variable {name} is {env[name]!r}, expected a whole number") from None
    return values


def meeting_point(place: Place) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT. Slurm sets neither: there they come from the first host and the number of the step.

    raises: ConfigError when one is missing, or the port is no port
    """
    env = dict(os.environ)
    if place.launcher == "slurm":
        if "MASTER_ADDR" not in env:
            env["MASTER_ADDR"] = "127.0.0.1" if place.local_size == place.size else _first_slurm_host()
        # Jobs, and steps of a job, may run at the same time on a host. What follows from their numbers must not be that of the next ones.
        env.setdefault("MASTER_PORT", str(20000 + zlib.crc32(job_name(place).encode()) % 10000))
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]:
        raise ConfigError(f"rank {place.rank} of {place.size}: {' and '.join(missing)} must say where ranks meet: the host of rank 0 and a "
                          "free port there; torchrun sets both")
    (port,) = _numbers(env, {"MASTER_PORT": 0})
    if not 0 < port < 1 << 16:
        raise ConfigError(f"environment variable MASTER_PORT is {port}, expected a port from 1 to 65535")
    return env["MASTER_ADDR"], port


def job_name(place: Place) -> str:
    """What its launcher calls this job, or "": the same for all of its ranks. Jobs that were given one meeting point must not mix."""
    names = {"slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"), "mpirun": ("PMIX_NAMESPACE",)}.get(place.launcher, ())
    return ".".join(os.environ[name] for name in names if name in os.environ)


def _first_slurm_host() -> str:
    """The first host of the step (its job may have more). Slurm abbreviates host lists (`node[01-04]`); its own tool expands them."""
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in os.environ else "SLURM_JOB_NODELIST"
    nodes = os.environ.get(name, "")
    if "[" not in nodes:
        return nodes.split(",")[0] or socket.gethostname()
    try:
        return subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError) as error:   # containers often lack scontrol
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error.strerror
        raise ConfigError(f"{name} is {nodes!r} and `scontrol show hostnames` failed: {reason}; "
                          "set MASTER_ADDR and MASTER_PORT yourself") from None
