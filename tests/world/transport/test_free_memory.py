"""What a process may still take, from pretended files of the kernel."""

import pytest
import torch.distributed as dist

from conformance.ranks import make_group
from rankloom.world.transport.free_memory import available_memory
from rankloom.world.transport.memory import expect_memory

MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712"


def pretend(root, cgroup: str, mounts: str, **groups: dict[str, str]):
    """A host with 8 GiB left. mounts: lines of mountinfo; groups: folder -> file -> content"""
    files = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n", "proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    files |= {f"{folder}/{name}": text for folder, group in groups.items() for name, text in group.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": f"anon 1\ninactive_file {inactive}\nslab 2\n"}


def v1(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used), "memory.stat": f"cache 1\ntotal_inactive_file {inactive}\n"}


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = ("31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
      "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n")


def test_without_cgroups_it_is_what_the_host_has_left(tmp_path):
    assert available_memory(pretend(tmp_path, "", "")) == 8192 * MIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(tmp_path) == 8192 * MIB


@pytest.mark.parametrize(("own", "above", "left"), [
    (v2(str(900 * MIB), 100 * MIB), {}, 800),
    (v2(str(900 * MIB), 100 * MIB, 50 * MIB), {}, 850),             # cached files go when memory is needed
    (v2("max", 100 * MIB), v2(str(500 * MIB), 200 * MIB), 300),     # the limit of Slurm's job is above that of its step
    (v2(str(900 * MIB), 0), v2(str(500 * MIB), 400 * MIB), 100),
    (v2("max", 0), v2("max", 0), 8192),
    (v2(str(100 * MIB), 101 * MIB), {}, 0),
    (v2(str(99 << 30), 0), {}, 8192),                               # more than the host has
])
def test_the_smallest_rest_of_the_cgroups_of_version_2_counts(tmp_path, own, above, left):
    groups = {"sys/fs/cgroup/job/step": own, "sys/fs/cgroup/job": above, "sys/fs/cgroup": {"memory.stat": "inactive_file 0\n"}}
    assert available_memory(pretend(tmp_path, "0::/job/step\n", V2, **groups)) == left * MIB


@pytest.mark.parametrize(("root", "folder"), [
    ("/", "sys/fs/cgroup/memory/job/step"),         # as the host sees it
    ("/job", "sys/fs/cgroup/memory/step"),          # in a container to which a part is shown
    ("/elsewhere", "sys/fs/cgroup/memory"),         # and in one to which its own looks like another
])
def test_a_limit_of_version_1_counts_wherever_it_is_mounted(tmp_path, root, folder):
    lines = "9:cpu,cpuacct:/other\n4:hugetlb,memory:/job/step\n0::/unified\n"
    group = {folder: v1(str(700 * MIB), 300 * MIB, 5 * MIB)}
    assert available_memory(pretend(tmp_path, lines, V1.format(root=root), **group)) == 405 * MIB


def test_no_limit_of_version_1_is_none(tmp_path):
    group = {"sys/fs/cgroup/memory": v1(UNLIMITED_V1, 300 * MIB)}
    assert available_memory(pretend(tmp_path, "4:memory:/\n", V1.format(root="/"), **group)) == 8192 * MIB


def test_shared_memory_above_the_limit_is_refused_before_anybody_touches_it(monkeypatch):
    monkeypatch.setattr("rankloom.world.transport.memory.available_memory", lambda: MIB)
    with pytest.raises(MemoryError, match="2,097,152 bytes of shared memory were asked for, 1,048,576 are free"):
        expect_memory(2 * MIB)


def test_a_group_is_refused_where_its_own_memory_is_not_free(monkeypatch):
    monkeypatch.setattr("rankloom.world.transport.memory.available_memory", lambda: MIB)
    with pytest.raises(MemoryError, match="bytes of shared memory were asked for, 1,048,576 are free"):
        make_group(dist.HashStore(), 0, 1)
