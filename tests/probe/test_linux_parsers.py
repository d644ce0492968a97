"""The parsers of Linux's files: the inputs that went wrong in the field, and anything at all."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.probe.linux import cgroup, meminfo, psi, zfs
from services.probe.linux.cgroup import V1, V2, Events, Mount, Room
from services.probe.linux.meminfo import Meminfo
from services.probe.reading import Stall

ANY_PACE = settings(deadline=None)


def numbered(template: str) -> st.SearchStrategy[bytes]:
    """The template with one number of any size and sign in its places."""
    return st.integers(-(2**70), 2**70).map(lambda number: template.replace("{}", str(number)).encode())


RAY_STAT = b"""cache 7702360064
rss 4729700352
shmem 6167658496
inactive_anon 5990920192
active_anon 4934561792
inactive_file 1026723840
active_file 507977728
hierarchical_memory_limit 24000000000
total_inactive_file 1026723840
total_active_file 507977728
"""


def test_meminfo_gives_bytes_by_name() -> None:
    text = (
        b"MemTotal:       24684092 kB\nMemFree:        24036684 kB\nMemAvailable:   24308384 kB\nCached: 445992 kB\n"
        b"Active(file):     107880 kB\nInactive(file):   346108 kB\nSwapTotal:             0 kB\nSwapFree:  0 kB\n"
    )
    assert meminfo.parse(text) == Meminfo(
        total_bytes=24684092 * 1024,
        available_bytes=24308384 * 1024,
        free_bytes=24036684 * 1024,
        file_backed_bytes=(107880 + 346108) * 1024,
        swap_total_bytes=0,
        swap_free_bytes=0,
    )


def test_a_line_without_a_space_after_its_colon_is_read() -> None:
    assert meminfo.parse(b"MemTotal:10373888 kB\n").total_bytes == 10373888 * 1024


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"MemTotal:",
        b"MemTotal: 12",
        b"MemTotal: x kB\n",
        b"MemTotal: -5 kB\n",
        b"MemTotal: 18014398509481878 kB\n",
    ],
)
def test_a_line_that_is_cut_off_or_no_number_is_unknown(text: bytes) -> None:
    assert meminfo.parse(text) == Meminfo()


def test_a_line_without_a_unit_does_not_take_the_next_ones_number() -> None:
    assert meminfo.parse(b"MemTotal: 5\nMemFree: 7 kB\n") == Meminfo(free_bytes=7 * 1024)


def kernels_meminfo(*, available_kib: int = 24308384, huge_pages: bytes = b"Hugetlb:               0 kB\n") -> bytes:
    return (
        b"MemTotal:       24684092 kB\nMemFree:        24036684 kB\nMemAvailable:   %8d kB\nCached:   445992 kB\n"
        b"Active(file):     107880 kB\nInactive(file):   346108 kB\nUnevictable:  0 kB\nSwapTotal:             0 kB\n"
        b"SwapFree:              0 kB\nDirty:              1944 kB\n"
    ) % available_kib + huge_pages


@pytest.mark.parametrize("later", [
    kernels_meminfo(available_kib=7),
    kernels_meminfo(available_kib=123456789),
    kernels_meminfo(huge_pages=b""),
    kernels_meminfo(huge_pages=b"Hugetlb:          2048 kB\n"),
    kernels_meminfo(huge_pages=b"Hugetlb:            -7 kB\n"),
    kernels_meminfo().replace(b"SwapFree:              0 kB", b"SwapFree:              x kB"),
    kernels_meminfo().replace(b"SwapFree:              0 kB", b"SwapFree:              0 MB"),
    kernels_meminfo().replace(b"MemFree: ", b"MemTree: "),
    kernels_meminfo()[:300],
    b"",
])  # fmt: skip
@pytest.mark.parametrize("first", [kernels_meminfo(), kernels_meminfo(huge_pages=b""), b"MemTotal: 1 kB\n", b""])
def test_where_the_lines_lay_before_changes_nothing(first: bytes, later: bytes) -> None:
    parser = meminfo.Parser()
    for text in (first, first, later, later, first):
        assert parser.parse(text) == meminfo.parse(text)


def test_psi_gives_totals_and_averages() -> None:
    text = (
        b"some avg10=70.24 avg60=68.52 avg300=69.91 total=3559632828\n"
        b"full avg10=57.59 avg60=58.06 avg300=60.38 total=3300487258\n"
    )
    assert psi.parse(text) == Stall(3559632828, 3300487258, 70.24, 57.59)


def test_psi_that_stands_still_is_zero_and_not_unknown() -> None:
    text = b"some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    assert psi.parse(text) == Stall(0, 0, 0.0, 0.0)


def test_psi_with_a_some_line_only_leaves_full_unknown() -> None:
    assert psi.parse(b"some avg10=1.50 avg60=0.00 avg300=0.00 total=12\n") == Stall(12, None, 1.5, None)


@pytest.mark.parametrize("text", [b"", b"some", b"some avg10=nan avg60=0.00 avg300=0.00 total=1\n", b"\xff\x00"])
def test_psi_that_is_empty_or_nonsense_is_unknown(text: bytes) -> None:
    assert psi.parse(text) is None


def test_the_file_cache_is_given_back_and_shared_memory_is_not() -> None:
    cache = cgroup.parse_cache(RAY_STAT, V1)
    assert cache == 1534701568
    room = cgroup.room(24000000000, 12432060416, cache)
    assert room == Room(limit_bytes=24000000000, used_bytes=10897358848, available_bytes=13102641152)


def test_v2_names_its_lines_without_total() -> None:
    assert cgroup.parse_cache(b"anon 5\nfile 9\ninactive_file 3\nactive_file 4\n", V2) == 7


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b"max\n", None),
        (b"0", None),
        (b"", None),
        (b"garbage", None),
        (b"-1\n", None),
        (b"9" * 20, None),
        (b"9" * 19, None),
        (b"9223372036854775807\n", 2**63 - 1),
        (b"9223372036854775808\n", None),
        (b"9223372036854771712\n", 9223372036854771712),
        (b"34359738368\n", 34359738368),
    ],
)
def test_a_limit_is_a_positive_number_or_none(text: bytes, limit: int | None) -> None:
    assert cgroup.parse_limit(text) == limit


def test_a_limit_above_that_is_past_what_the_kernel_counts_is_none() -> None:
    assert cgroup.parse_inherited(b"hierarchical_memory_limit 9999999999999999999\n") is None
    assert cgroup.parse_inherited(b"hierarchical_memory_limit 402653184\n") == 402653184


def test_events_are_summed_by_what_they_mean() -> None:
    text = b"low 0\nhigh 3\nmax 4\noom 1\noom_kill 2\noom_group_kill 9\n"
    assert cgroup.parse_events(text, V2) == Events(oom=3, limit=7)
    assert cgroup.parse_events(b"oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", V1) == Events(oom=2, limit=None)


def test_membership_tells_the_hierarchies_apart() -> None:
    text = "9:name=systemd:/\n4:cpu,memory:/jobs/one:two\n0::/\n"
    assert cgroup.parse_membership(text) == ("/jobs/one:two", "/")
    assert cgroup.parse_membership("nonsense\n\n1:x\n") == (None, None)


def test_mounts_tell_the_hierarchies_apart_and_unescape_their_paths() -> None:
    text = (
        r"31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755" + "\n"
        r"35 31 0:32 /docker/a /sys/fs/cgroup/my\040memory rw,relatime shared:1 - cgroup cgroup rw,memory" + "\n"
        r"32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu" + "\n"
        r"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw" + "\n"
    )
    assert cgroup.parse_mounts(text) == (
        [Mount(PurePosixPath("/docker/a"), PurePosixPath("/sys/fs/cgroup/my memory"))],
        [Mount(PurePosixPath("/"), PurePosixPath("/sys/fs/cgroup/unified"))],
    )


def test_a_mount_over_another_hides_it() -> None:
    _, mounts = cgroup.parse_mounts("1 0 0:28 / /cg rw - cgroup2 a rw\n2 1 0:28 /pod /cg rw - cgroup2 a rw\n")
    assert mounts == [Mount(PurePosixPath("/pod"), PurePosixPath("/cg"))]


@pytest.mark.parametrize(
    ("mounted", "path", "expected"),
    [
        ("/", "/a/b", ["cg/a/b", "cg/a", "cg"]),
        ("/", "/", ["cg"]),
        ("/docker/x", "/docker/x/init", ["cg/init", "cg"]),
        ("/docker/x", "/docker/x", ["cg"]),
        ("/docker/x", "/elsewhere", ["cg"]),
        ("/", "/../sibling", ["cg"]),
    ],
)
def test_the_walk_goes_from_the_own_cgroup_to_the_mount(mounted: str, path: str, expected: list[str]) -> None:
    mount = Mount(PurePosixPath(mounted), PurePosixPath("/cg"))
    assert cgroup.directories(mount, path, Path("/tree")) == [Path("/tree", part) for part in expected]


@ANY_PACE
@given(st.binary(max_size=300) | numbered("MemTotal: {} kB\nMemAvailable:{}\nMemFree: {}kB\n"))
def test_meminfo_never_raises_and_gives_no_negative(text: bytes) -> None:
    assert all(value is None or 0 <= value < 2**64 for value in meminfo.parse(text))


@ANY_PACE
@given(st.binary(max_size=300) | numbered("some avg10={}.5 avg60=0.00 avg300=0.00 total={}\n"))
def test_psi_never_raises_and_gives_shares_within_bounds(text: bytes) -> None:
    stall = psi.parse(text) or Stall()
    assert all(pct is None or 0 <= pct <= 100 for pct in (stall.some_avg10_pct, stall.full_avg10_pct))


@ANY_PACE
@given(st.binary(max_size=300) | numbered("{}") | numbered("oom {}\nmax {}\ninactive_file {}\nactive_file {}"))
def test_the_cgroup_parsers_never_raise(text: bytes) -> None:
    assert cgroup.parse_limit(text) != 0
    assert cgroup.parse_cache(text, V2) >= 0
    assert all(count is None or count >= 0 for count in cgroup.parse_events(text, V2))


@ANY_PACE
@given(st.text(max_size=300) | st.text(":/\n0acemory,", max_size=60) | st.text(" -/\\0cgroup2", max_size=60))
def test_the_cgroup_tables_never_raise(text: str) -> None:
    cgroup.parse_membership(text)
    cgroup.parse_mounts(text)


@ANY_PACE
@given(st.integers(1, 2**63), st.integers(0, 2**63), st.integers(0, 2**63))
def test_the_room_under_a_limit_is_between_nothing_and_the_limit(limit: int, usage: int, cache: int) -> None:
    room = cgroup.room(limit, usage, cache)
    assert room.used_bytes is not None
    assert room.available_bytes is not None
    assert 0 <= room.available_bytes <= limit
    assert room.used_bytes + room.available_bytes == limit


def test_zfs_gives_back_its_cache_down_to_its_minimum() -> None:
    text = b"13 1 0x01 123\nname                            type data\nc_min      4    1073741824\nsize 4 12884901888\n"
    assert zfs.parse(text) == 11 * (1 << 30)
    assert zfs.parse(text.replace(b"12884901888", b"1")) == 0
    assert zfs.parse(b"size 4 12884901888\n") is None
    assert zfs.parse(b"") is None
