"""The Linux sampler on trees of files, as kernels and containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.probe.failures import Failures
from services.probe.linux.sampler import LinuxSampler
from services.probe.reading import Reading, Stall
from ullage.v1 import node_pb2

GIB = 1 << 30
KIB = 1024

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
HYBRID_MOUNT = V1_MOUNT + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


class Tree:
    """A machine as files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.failures = Failures()

    def put(self, path: str, text: str) -> Tree:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def memory(self, total_kib: int, available_kib: int, free_kib: int = 0) -> Tree:
        lines = f"MemTotal: {total_kib} kB\nMemFree: {free_kib} kB\nMemAvailable: {available_kib} kB\n"
        return self.put("proc/meminfo", lines)

    def read(self) -> Reading:
        return LinuxSampler(self.root, self.failures).read()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_machine_without_cgroups_or_psi_is_what_meminfo_says(tree: Tree) -> None:
    assert tree.memory(1000, 700, 300).read() == Reading(
        source=node_pb2.MEMORY_SOURCE_PROCFS,
        ram_total_bytes=1000 * KIB,
        ram_available_bytes=700 * KIB,
        ram_free_bytes=300 * KIB,
    )
    assert not tree.failures.counts


def test_an_unreadable_meminfo_is_unknown_counted_and_logged_once(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = LinuxSampler(tree.root, tree.failures)
    assert [sampler.read().ram_total_bytes for _ in range(3)] == [None, None, None]
    assert tree.failures.counts == {str(tree.root / "proc/meminfo"): 3}
    assert capsys.readouterr().out.count("cannot read") == 1


def test_a_file_that_comes_back_is_read_again(tree: Tree) -> None:
    sampler = LinuxSampler(tree.root, tree.failures)
    assert sampler.read().total_bytes is None
    tree.memory(1000, 700)
    assert sampler.read().total_bytes == 1000 * KIB


def test_psi_that_cannot_be_read_is_absent(tree: Tree) -> None:
    (tree.root / "proc/pressure/memory").mkdir(parents=True)  # Opens, and fails at reading, as a disabled PSI does.
    assert tree.memory(1000, 700).read().host_stall is None
    assert sum(tree.failures.counts.values()) == 1


def test_a_container_sees_the_limit_of_its_parent(tree: Tree) -> None:
    tree.memory(692 * 1024 * 1024, 600 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/pod/container\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/pod/container/memory.max", "max\n")
    tree.put("sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    tree.put("sys/fs/cgroup/pod/memory.current", f"{3 * GIB}\n")
    tree.put("sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file 0\n")
    reading = tree.read()
    assert reading.total_bytes == 8 * GIB
    assert (reading.cgroup_limit_bytes, reading.cgroup_used_bytes) == (8 * GIB, 2 * GIB)
    assert reading.available_bytes == 6 * GIB


def test_the_least_room_counts_wherever_the_tightest_limit_is(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/pod/container\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/pod/container/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/pod/memory.max", f"{16 * GIB}")
    tree.put("sys/fs/cgroup/pod/container/memory.current", f"{GIB}")
    tree.put("sys/fs/cgroup/pod/memory.current", f"{15 * GIB}")
    for folder in ("pod", "pod/container"):
        tree.put(f"sys/fs/cgroup/{folder}/memory.stat", "inactive_file 0\nactive_file 0\n")
    assert tree.read().total_bytes == 8 * GIB
    assert tree.read().available_bytes == GIB


BESIDE_MOUNT = "30 23 0:28 {root} /run/beside rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize("root", ["/docker/other", "/pod/job", "/.."])
def test_of_several_mounts_the_one_counts_that_shows_most_above_this_process(tree: Tree, root: str) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/pod/job\n")
    tree.put("proc/self/mountinfo", BESIDE_MOUNT.format(root=root) + V2_MOUNT)
    tree.put("run/beside/memory.max", f"{16 * GIB}").put("run/beside/memory.current", "0")
    tree.put("sys/fs/cgroup/pod/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/pod/memory.current", f"{GIB}")
    tree.put("sys/fs/cgroup/pod/job/memory.max", f"{16 * GIB}").put("sys/fs/cgroup/pod/job/memory.current", "0")
    assert (tree.read().cgroup_limit_bytes, tree.read().available_bytes) == (8 * GIB, 7 * GIB)


def test_a_cgroup_beside_the_namespace_is_found_below_a_mount_from_above_it(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/../job\n")
    tree.put("proc/self/mountinfo", V2_MOUNT.replace(" / ", " /.. ", 1))
    tree.put("sys/fs/cgroup/job/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/job/memory.current", f"{GIB}")
    assert (tree.read().cgroup_limit_bytes, tree.read().available_bytes) == (8 * GIB, 7 * GIB)


def test_the_first_versions_number_for_no_limit_is_none_where_the_machines_memory_is_unknown(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "4:memory:/job\n").put("proc/self/mountinfo", V1_MOUNT)
    tree.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    assert tree.read().cgroup_limit_bytes is None


def test_high_limits_as_well_as_max(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/a/memory.high", f"{6 * GIB}")
    tree.put("sys/fs/cgroup/a/memory.current", "0").put("sys/fs/cgroup/a/memory.stat", "")
    assert tree.read().available_bytes == 6 * GIB


@pytest.mark.parametrize("limit", ["max\n", "0", "", "garbage", "9223372036854771712", "34359738368"])
def test_no_limit_or_one_at_the_machines_memory_leaves_what_meminfo_says(tree: Tree, limit: str) -> None:
    tree.memory(32 * 1024 * 1024, 29 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", limit)
    tree.put("sys/fs/cgroup/a/memory.current", f"{30 * GIB}")
    reading = tree.read()
    assert (reading.total_bytes, reading.available_bytes) == (32 * GIB, 29 * GIB)
    assert reading.cgroup_limit_bytes is None


def test_the_first_version_of_cgroups_limits_too(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "4:memory:/job\n").put("proc/self/mountinfo", V1_MOUNT)
    job = "sys/fs/cgroup/memory/job"
    tree.put(f"{job}/memory.limit_in_bytes", "24000000000").put(f"{job}/memory.usage_in_bytes", "12432060416")
    tree.put(f"{job}/memory.stat", "total_inactive_file 1026723840\ntotal_active_file 507977728\n")
    tree.put(f"{job}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    reading = tree.read()
    assert reading.available_bytes == 13102641152
    assert reading.oom_events == 5


@pytest.mark.parametrize(("told", "limit"), [(f"{4 * GIB}", 4 * GIB), ("9223372036854771712", None), ("x", None)])
def test_a_limit_above_the_mount_is_told_by_the_first_version(tree: Tree, told: str, limit: int | None) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "4:memory:/pod/job\n")
    tree.put("proc/self/mountinfo", "35 31 0:32 /pod/job /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    here = "sys/fs/cgroup/memory"
    tree.put(f"{here}/memory.limit_in_bytes", "9223372036854771712").put(f"{here}/memory.usage_in_bytes", f"{GIB}")
    tree.put(f"{here}/memory.stat", f"cache 5\nhierarchical_memory_limit {told}\ntotal_inactive_file 0\n")
    reading = tree.read()
    assert reading.cgroup_limit_bytes == limit
    assert reading.available_bytes == (60 * GIB if limit is None else limit - GIB)


def test_in_a_hybrid_the_first_version_limits_and_the_second_tells_of_stalls(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "4:memory:/job\n0::/slice\n").put("proc/self/mountinfo", HYBRID_MOUNT)
    tree.put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{GIB}")
    tree.put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "0")
    tree.put("sys/fs/cgroup/memory/job/memory.stat", "")
    tree.put("sys/fs/cgroup/unified/slice/cgroup.type", "domain\n")
    tree.put(
        "sys/fs/cgroup/unified/slice/memory.pressure",
        "some avg10=2.00 avg60=0.00 avg300=0.00 total=9\n",
    )
    reading = tree.read()
    assert reading.total_bytes == GIB
    assert reading.cgroup_stall is not None
    assert reading.cgroup_stall.some_total_us == 9


def test_a_limit_without_its_usage_bounds_what_is_available(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", f"{8 * GIB}")
    reading = tree.read()
    assert (reading.cgroup_used_bytes, reading.available_bytes, reading.coarse) == (None, 8 * GIB, True)


@pytest.mark.parametrize("free_kib", [8 * 1024 * 1024, 20 * 1024])
def test_a_kernel_that_calls_nothing_available_has_what_is_free(tree: Tree, free_kib: int) -> None:
    reading = tree.memory(16 * 1024 * 1024, 0, free_kib).read()
    assert (reading.available_bytes, reading.coarse) == (free_kib * KIB, True)


def test_a_kernel_that_does_not_say_what_is_available_is_counted_and_logged(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    reading = tree.put("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 700 kB\nCached: 100 kB\n").read()
    assert (reading.ram_total_bytes, reading.ram_available_bytes) == (1000 * KIB, None)
    assert tree.failures.counts == {"MemAvailable": 1}
    assert "/proc/meminfo lacks it" in capsys.readouterr().out


def test_the_limits_above_a_cgroup_tell_of_their_own_hits(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/pod/job\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/pod/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/pod/memory.current", f"{5 * GIB}")
    tree.put("sys/fs/cgroup/pod/job/memory.events", "low 0\nhigh 0\nmax 1\noom 0\noom_kill 1\n")
    # Of what is beside this process in the pod, memory.events tells too, and that is nobody's here.
    tree.put("sys/fs/cgroup/pod/memory.events", "low 0\nhigh 0\nmax 900\noom 300\noom_kill 300\n")
    local = "sys/fs/cgroup/pod/memory.events.local"
    tree.put(local, "low 0\nhigh 5\nmax 70\noom 2\noom_kill 0\n")
    sampler = LinuxSampler(tree.root, tree.failures)
    read = sampler.read()
    assert (read.limit_events, read.oom_events) == (76, 3)
    (tree.root / local).rename(tree.root / "gone")
    (tree.root / local).mkdir()
    again = LinuxSampler(tree.root, tree.failures).read()
    assert (again.limit_events, again.oom_events) == (None, None)


def test_a_machine_of_no_memory_is_one_that_does_not_say(tree: Tree) -> None:
    reading = tree.memory(0, 0).read()
    assert (reading.total_bytes, reading.available_bytes, reading.ram_free_bytes) == (None, None, None)


def test_the_machines_swap_is_not_that_of_a_limited_cgroup(tree: Tree) -> None:
    tree.put(
        "proc/meminfo",
        "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\nSwapTotal: 8388608 kB\nSwapFree: 4194304 kB\n",
    )
    machine = tree.read()
    assert (machine.swap_total_bytes, machine.swap_available_bytes) == (8 * GIB, 4 * GIB)
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", f"{8 * GIB}").put("sys/fs/cgroup/a/memory.current", "0")
    limited = tree.read()
    assert (limited.swap_total_bytes, limited.swap_available_bytes, limited.clamped) == (None, None, False)


def test_a_limit_that_is_changed_is_seen_within_eight_readings(tree: Tree) -> None:
    tree.memory(64 * 1024 * 1024, 60 * 1024 * 1024)
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", "max").put("sys/fs/cgroup/a/memory.current", "0")
    tree.put("sys/fs/cgroup/a/memory.stat", "")
    sampler = LinuxSampler(tree.root, tree.failures)
    assert sampler.read().total_bytes == 64 * GIB
    tree.put("sys/fs/cgroup/a/memory.max", f"{GIB}")
    assert [sampler.read().total_bytes for _ in range(8)][-1] == GIB


def test_stalls_that_go_on_are_seen_at_every_reading(tree: Tree) -> None:
    tree.memory(1000, 700)
    said: list[Stall | None] = []
    for total in (1, 1, 2, 3):
        tree.put("proc/pressure/memory", f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\n")
        if not said:
            sampler = LinuxSampler(tree.root, tree.failures)
        said.append(sampler.read().host_stall)
    assert [stall and stall.some_total_us for stall in said] == [1, 1, 2, 3]
    (tree.root / "proc/pressure/memory").write_text("")
    assert sampler.read().host_stall is None


@pytest.mark.parametrize(
    ("total_kib", "available_kib", "free_kib", "clamped"),
    [
        (998384, 987608, 987608, False),  # lxcfs 84
        (1953124, 1633564, 1549084, False),  # lxd 5905
        (1048576, 977408, 625528, False),  # zabbix template 14
        (1000, 1001, 500, True),
        (1000, 900, 2000, True),
    ],
)
def test_available_is_never_more_than_the_total(
    tree: Tree, total_kib: int, available_kib: int, free_kib: int, clamped: bool
) -> None:
    reading = tree.memory(total_kib, available_kib, free_kib).read()
    assert reading.available_bytes == min(total_kib, available_kib) * KIB
    assert reading.ram_free_bytes == min(total_kib, free_kib) * KIB
    assert reading.clamped is clamped


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.binary(max_size=200), st.binary(max_size=30), st.binary(max_size=30), st.binary(max_size=100))
def test_no_content_of_any_file_makes_a_reading_fail(
    tree: Tree, memory: bytes, limit: bytes, usage: bytes, stat: bytes
) -> None:
    tree.put("proc/self/cgroup", "0::/a\n").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/cgroup.type", "domain")
    folder = tree.root / "sys/fs/cgroup/a"
    (tree.root / "proc/meminfo").write_bytes(b"MemTotal: 4096 kB\nMemAvailable: 2048 kB\n" + memory)
    for name, content in {
        "memory.max": limit,
        "memory.current": usage,
        "memory.stat": stat,
        "memory.pressure": memory,
        "memory.events": stat,
    }.items():
        (folder / name).write_bytes(content)
    reading = tree.read()
    assert reading.total_bytes is not None
    assert reading.available_bytes is not None
    assert 0 <= reading.available_bytes <= reading.total_bytes


def test_zfs_cache_above_its_minimum_is_available(tree: Tree) -> None:
    # htop 1559, with the cache of truenas: MemAvailable knows nothing of it.
    tree.memory(65710420, 26828796)
    tree.put("proc/spl/kstat/zfs/arcstats", "c_min 4 1073741824\nsize 4 12884901888\n")
    reading = tree.read()
    assert reading.ram_available_bytes == 26828796 * KIB
    assert reading.arc_bytes == 11 * GIB
    assert reading.available_bytes == 26828796 * KIB + 11 * GIB
    tree.put("proc/spl/kstat/zfs/arcstats", f"c_min 4 1\nsize 4 {100 * GIB}\n")
    assert tree.read().available_bytes == 65710420 * KIB


def test_the_machines_zfs_cache_is_no_part_of_a_container_that_is_told_its_own_memory(tree: Tree) -> None:
    tree.memory(2 * 1024 * 1024, 512 * 1024)
    tree.put("proc/spl/kstat/zfs/arcstats", f"c_min 4 {GIB}\nsize 4 {12 * GIB}\n")
    tree.put("proc/self/mountinfo", "900 880 0:50 /proc/meminfo /proc/meminfo rw - fuse.lxcfs lxcfs rw\n" + V2_MOUNT)
    reading = tree.read()
    assert reading.available_bytes == GIB // 2
    assert reading.arc_bytes is None


def test_the_pool_of_huge_pages_is_told_apart(tree: Tree) -> None:
    tree.put("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\nHugetlb:          512 kB\n")
    reading = tree.read()
    assert (reading.huge_pages_bytes, reading.available_bytes) == (512 * KIB, 400 * KIB)


@pytest.mark.parametrize(("total_kib", "available_kib"), [(998384, 987608), (1953124, 1633564)])
def test_lines_that_lxc_took_from_the_host_do_not_count(tree: Tree, total_kib: int, available_kib: int) -> None:
    tree.put(
        "proc/meminfo",
        f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\nAnonPages: 8275716 kB\n",
    )
    assert tree.read().available_bytes == available_kib * KIB
