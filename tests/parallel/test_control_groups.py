"""Limits of memory by control groups, in file systems as SLURM, systemd and containers make them."""

import os

import pytest

from baton.parallel.control_groups import host_memory, room_in_groups

GIB = 1 << 30
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = 9223372036854771712
V1 = "35 31 0:32 {outermost} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {outermost} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
STEP1, STEP2 = "/slurm/uid_7/job_3/step_batch/task_0", "/system.slice/slurmstepd.scope/job_3/step_batch/user/task_0"


@pytest.fixture
def machine(tmp_path):
    """A function: the root of a file system with these mounts of groups, groups of this process, and files below /sys/fs/cgroup."""

    def make(mounts, own, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        others = ["23 1 0:20 / / rw - overlay overlay rw,lowerdir=/a", "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"]
        (tmp_path / "proc/self/mountinfo").write_text("\n".join([*others, *mounts, ""]))
        (tmp_path / "proc/self/cgroup").write_text("\n".join(["9:name=systemd:/x", *own, ""]))
        for name, value in files.items():
            path = tmp_path / "sys/fs/cgroup" / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return tmp_path

    return make


def v1(outermost="/"):
    return V1.format(outermost=outermost)


def v2(outermost="/", point="/sys/fs/cgroup"):
    return V2.format(outermost=outermost, point=point)


@pytest.mark.parametrize(
    ("mounts", "own", "files", "expected"),
    [
        ([], [], {}, PHYSICAL),
        ([v2()], ["0::/"], {}, PHYSICAL),
        ([v2()], [f"0::{STEP2}"], {"system.slice/slurmstepd.scope/job_3/memory.max": 3 << 20}, 3 << 20),
        ([v2()], [f"0::{STEP2}"], {f"{STEP2}/memory.max": "max", f"{STEP2}/memory.high": 5 << 20}, 5 << 20),
        ([v2()], ["0::/a/b"], {"a/b/memory.max": 9 << 20, "a/memory.max": 8 << 20, "memory.max": "max"}, 8 << 20),
        ([v2()], ["0::/a/b"], {"a/b/memory.max": 1 << 60, "a/c/memory.max": 1 << 20}, PHYSICAL),
        ([v1()], [f"4:memory:{STEP1}"], {"memory/slurm/uid_7/job_3/memory.limit_in_bytes": 3 << 20}, 3 << 20),
        ([v1()], [f"4:memory:{STEP1}"], {"memory/slurm/memory.limit_in_bytes": UNLIMITED}, PHYSICAL),
        ([v1()], ["1:cpu:/a", "4:memory:/b"], {"memory/a/memory.limit_in_bytes": 3 << 20}, PHYSICAL),
        # both: the limits of version 1 beside an empty tree of version 2
        ([v1(), v2(point="/sys/fs/cgroup/unified")], ["4:memory:/a", "0::/"], {"memory/a/memory.limit_in_bytes": 3 << 20}, 3 << 20),
        # a container that sees its own group as the outermost one, under the name of its host
        ([v1("/docker/7")], ["4:memory:/docker/7"], {"memory/memory.limit_in_bytes": 3 << 20}, 3 << 20),
        ([v1("/docker/7")], ["4:memory:/docker/7/a"], {"memory/a/memory.limit_in_bytes": 3 << 20}, 3 << 20),
        ([v2("/../.."), v1("/..")], ["0::/", "4:memory:/"], {"memory.max": 4 << 20}, 4 << 20),
        # a part that is mounted once more, for others
        ([v2("/a", "/sys/fs/cgroup/x"), v2()], ["0::/b"], {"x/memory.max": 3 << 20, "b/memory.max": 5 << 20}, 5 << 20),
        # a process that was moved out of what it sees
        ([v2()], ["0::/../other"], {"memory.max": 4 << 20}, 4 << 20),
        ([v2()], ["0::/gone (deleted)"], {"memory.max": 4 << 20}, 4 << 20),
        ([v2(point="/sys/fs/cgroup/a\\040b")], ["0::/"], {"a b/memory.max": 4 << 20}, 4 << 20),
        ([v2()], ["0::/a"], {"a/memory.max": "nonsense"}, PHYSICAL),
        (["a line of a later kernel"], ["also"], {}, PHYSICAL),
    ],
)  # fmt: skip
def test_a_process_has_the_least_of_its_groups_and_of_those_around_them(machine, mounts, own, files, expected):
    assert host_memory(machine(mounts, own, files)) == expected


def test_what_is_in_use_makes_no_difference_to_what_the_host_has():
    assert 0 < host_memory() <= PHYSICAL
    assert len({host_memory() for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("mount", "own", "names", "stat"),
    [
        (v2(), "0::/a/b", ("max", "current"), "anon 7\nfile {cached}\nshmem {shared}"),
        (
            v1(),
            "4:memory:/a/b",
            ("limit_in_bytes", "usage_in_bytes"),
            "cache 0\nshmem 0\ntotal_cache {cached}\ntotal_shmem {shared}",
        ),
    ],
    ids=["v2", "v1"],
)
def test_what_can_still_be_had_is_what_a_limit_leaves_and_file_caches_give(machine, mount, own, names, stat):
    """Of files in memory (tmpfs), which are counted as cached, nothing can be had."""
    top = "memory/" if "memory:" in own else ""
    limit, used = (f"memory.{name}" for name in names)
    files = {f"{top}a/b/{limit}": UNLIMITED, f"{top}a/b/{used}": GIB, f"{top}a/b/memory.stat": stat.format(cached=0, shared=0)}
    files |= {f"{top}a/{limit}": 8 * GIB, f"{top}a/{used}": 7 * GIB}
    files[f"{top}a/memory.stat"] = stat.format(cached=3 * GIB, shared=GIB)
    root = machine([mount], [own], files)
    assert room_in_groups(root) == (8 - 7 + 3 - 1) * GIB
    (root / "sys/fs/cgroup" / top / "a" / used).write_text(str(20 * GIB))
    assert room_in_groups(root) == 0


def test_without_groups_they_set_no_limit(machine):
    assert room_in_groups(machine([], [], {})) is None
