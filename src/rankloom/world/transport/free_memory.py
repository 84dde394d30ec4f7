"""How much memory this process may still take: what the host has left, or what its control groups (cgroups) allow, whichever is less.

Slurm, Docker and Kubernetes limit a job by cgroups. The kernel kills a process that exceeds the limit, without a message.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class CgroupFiles(NamedTuple):
    """The files of a cgroup that say its limit and its use, and the key in `memory.stat` of cached files that were not read lately."""

    limit: str
    usage: str
    inactive: str


V1 = CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = CgroupFiles("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping, as the kernel estimates it. root: where /proc and /sys are"""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """What each cgroup with a limit has left: those of this process and their parents."""
    for folder, files in _memory_cgroups(root):
        with suppress(OSError, ValueError, KeyError):   # no such file: no limit can be set here; "max": no limit is set
            limit, used = (int((folder / name).read_text()) for name in (files.limit, files.usage))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, limit - used + int(stat[files.inactive]))   # these are dropped when memory is needed


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, CgroupFiles]]:
    """The folders of this process's cgroups that count memory, from its own to the topmost visible one; and the names of their files."""
    try:
        groups, mounts = ((root / "proc/self" / name).read_text().splitlines() for name in ("cgroup", "mountinfo"))
    except OSError:   # a kernel without cgroups
        return
    paths = dict(line.split(":", 2)[1:] for line in groups)   # by the names of controllers; the cgroup of version 2 has none
    of_memory = next((path for names, path in paths.items() if "memory" in names.split(",")), None)
    for line in mounts:
        before, _, after = line.partition(" - ")
        top, mount = before.split()[3:5]
        kind, options = after.split()[0], after.split()[-1].split(",")
        is_v1 = kind == "cgroup" and "memory" in options
        own = of_memory if is_v1 else paths.get("") if kind == "cgroup2" else None
        if own is not None:
            inside = PurePosixPath(own).relative_to(top) if PurePosixPath(own).is_relative_to(top) else PurePosixPath()
            yield from ((root / mount.lstrip("/") / part, V1 if is_v1 else V2) for part in (inside, *inside.parents))
