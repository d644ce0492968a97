"""Inputs that are nearly right: recorded ones, cut, spliced, swapped and with numbers of any size.

    python -m tests.probe.mutations [COUNT]     COUNT for each parser, 100000 unless told

Every parser must take each without raising, and give no figure below 0, none above 2^63, and nothing available
beyond its total.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from services.probe.darwin import host_statistics, macmon, sysctl, vm_stat
from services.probe.darwin.sampler import Seen, conclude
from services.probe.estimator import estimate
from services.probe.linux import cgroup, meminfo, psi, zfs
from services.probe.linux.cgroup import V1, V2
from services.probe.memory_sample import memory_sample
from services.probe.pressure import judge
from services.probe.reading import Pages, Reading, bounded
from services.probe.windows import memory as windows
from ullage.v1 import node_pb2

RECORDED: Final = Path(__file__).parents[1] / "recorded"
BYTES_MAX: Final = 2**63

_NUMBERS: Final = (
    b"0", b"-1", b"-18014398509481878", b"9223372036854771712", b"9223372036854775807", b"18446744073709551615",
    b"99999999999999999999999", b"1e400", b"NaN", b"0x10", b"1,5", b"N/A", b"max", b"\xd9\xa3", b"",
)  # fmt: skip

MEMINFO: Final = (
    b"MemTotal:       24684092 kB\nMemFree:        24036684 kB\nMemAvailable:   24308384 kB\nCached: 445992 kB\n"
    b"Active(file):     107880 kB\nInactive(file):   346108 kB\nSwapTotal:       1024 kB\nSwapFree:  512 kB\n"
    b"Hugetlb:               0 kB\n"
)
STALLS: Final = (
    b"some avg10=70.24 avg60=68.52 avg300=69.91 total=3559632828\n"
    b"full avg10=57.59 avg60=58.06 avg300=60.38 total=3300487258\n"
)
STAT: Final = b"anon 5\nfile 9\ninactive_file 3\nactive_file 4\noom 1\noom_kill 2\nhigh 3\nmax 4\n"
ARC: Final = b"name type data\nc_min                    4    1073741824\nsize                     4    12884901888\n"
SYSCTL: Final = (
    b"kern.memorystatus_vm_pressure_level: 2\nhw.memsize: 17179869184\nvm.page_free_count: 12216\nhw.pagesize: 16384\n"
    b"vm.page_pageable_external_count: 486128\nvm.page_purgeable_count: 16362\niogpu.wired_limit_mb: 0\n"
    b"vm.swapusage: total = 2048.00M  used = 1024.50M  free = 1023.50M  (encrypted)\n"
)
MOUNTS: Final = (
    b"35 31 0:32 /docker/a /sys/fs/cgroup/my\\040memory rw,relatime shared:1 - cgroup cgroup rw,memory\n"
    b"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def mutations(seeds: list[bytes], count: int, chance: random.Random) -> Iterator[bytes]:
    """`count` inputs near `seeds`."""
    for _ in range(count):
        text = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 4)):
            _mutate(text, seeds, chance)
        yield bytes(text)


def _mutate(text: bytearray, seeds: list[bytes], chance: random.Random) -> None:
    """Change `text` in one place or another."""
    at = chance.randrange(len(text) + 1)
    end = min(len(text), at + chance.randint(0, 12))
    match chance.randrange(7):
        case 0:
            del text[at:]
        case 1:
            del text[at:end]
        case 2:
            text[at:end] = bytes(chance.randrange(256) for _ in range(end - at))
        case 3:
            other = chance.choice(seeds)
            text[at:at] = other[chance.randrange(len(other) + 1) :][: chance.randint(0, 200)]
        case 4:
            text[at:at] = text[:at]
            del text[8192:]
        case _:
            _replace_number(text, chance)


def _replace_number(text: bytearray, chance: random.Random) -> None:
    """Put another number in the place of one."""
    places = [place for place, byte in enumerate(text) if 48 <= byte <= 57]
    if not places:
        return
    at = end = chance.choice(places)
    while at > 0 and 48 <= text[at - 1] <= 57:
        at -= 1
    while end < len(text) and 48 <= text[end] <= 57:
        end += 1
    text[at:end] = chance.choice(_NUMBERS)


def _within(*values: int | None) -> None:
    for value in values:
        assert value is None or 0 <= value < BYTES_MAX, value


def _whole(reading: Reading) -> None:
    """All that is concluded from a reading, to the message that is sent."""
    verdict = judge(None, reading, 1.0)
    estimated = estimate(reading, verdict.level, None)
    sample = memory_sample(reading, verdict, estimated, 0)
    _within(reading.total_bytes, reading.available_bytes)
    if sample.HasField("ram_total_bytes") and sample.HasField("ram_available_bytes"):
        assert sample.ram_available_bytes <= sample.ram_total_bytes
    assert sample.strict_available_bytes <= sample.balanced_available_bytes <= sample.ceiling_available_bytes
    assert (verdict.pressure_pct is None) == (verdict.level == node_pb2.PRESSURE_LEVEL_UNKNOWN)


def _mac(pages: Pages | None) -> None:
    _within(*(pages or Pages()))
    numbers = {sysctl.TOTAL: 48 << 30, sysctl.LEVEL: 1}
    _whole(conclude(Seen(numbers, sysctl.Swap(), pages), node_pb2.MEMORY_SOURCE_VM_STAT, None))


def _meminfo(text: bytes) -> None:
    found = meminfo.parse(text)
    _within(*found)
    parser = meminfo.Parser()
    for before in (text, MEMINFO):
        parser.parse(before)
        # Where a line is there twice, the one that was there before may count.
        assert parser.parse(text) == found or any(text.count(key) > 1 for key in meminfo.KEYS)
    available = bounded(found.available_bytes, found.total_bytes)
    _whole(Reading(node_pb2.MEMORY_SOURCE_PROCFS, ram_total_bytes=found.total_bytes, ram_available_bytes=available))


def _psi(text: bytes) -> None:
    stall = psi.parse(text)
    for pct in (stall.some_avg10_pct, stall.full_avg10_pct) if stall is not None else ():
        assert pct is None or 0 <= pct <= 100
    _whole(Reading(node_pb2.MEMORY_SOURCE_PROCFS, ram_total_bytes=8, ram_available_bytes=4, host_stall=stall))


def _cgroup(text: bytes) -> None:
    limit, cache = cgroup.parse_limit(text.partition(b" ")[2]), cgroup.parse_cache(text, V2)
    assert limit != 0
    assert cgroup.parse_cache(text, V1) >= 0
    _within(cgroup.parse_inherited(text.replace(b"inactive_file", b"hierarchical_memory_limit")))
    room = cgroup.room(limit or 1, cache, cache // 2)
    assert 0 <= (room.available_bytes or 0) <= (limit or 1)
    for dialect in (V1, V2):
        assert all(count is None or count >= 0 for count in cgroup.parse_events(text, dialect))


def _tables(text: bytes) -> None:
    decoded = text.decode("utf-8", "replace")
    cgroup.parse_mounts(decoded)
    cgroup.parse_membership(decoded)


def _sysctl(text: bytes) -> None:
    numbers, swap = sysctl.parse(text)
    _within(*numbers.values(), *swap)
    _whole(conclude(Seen(numbers, swap), node_pb2.MEMORY_SOURCE_SYSCTL, None))


def _macmon(line: bytes) -> None:
    for said in macmon.parse(line):
        memory = said.memory
        if memory is not None:
            assert memory.used_bytes <= memory.total_bytes
            _within(memory.total_bytes, memory.used_bytes, *memory.swap)
        assert all(value is None or 0 <= value < 1e9 for value in said[1:])
        _whole(conclude(Seen({sysctl.LEVEL: 1}), node_pb2.MEMORY_SOURCE_MACMON, memory))


def _structure(buffer: bytes) -> None:
    _mac(host_statistics.parse(buffer, 38, 16384))
    swap = sysctl.swap(buffer[:32])
    _within(*swap, sysctl.number(buffer[:8]))
    low = bool(buffer and buffer[0] & 1)
    _whole(windows.conclude(windows.parse(buffer[: windows.SIZE_BYTES]), low=low))


def _recorded(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(RECORDED.glob(pattern)) if path.suffix != ".md"]


PARSERS: Final[dict[str, tuple[Callable[[bytes], None], list[bytes]]]] = {
    "meminfo": (_meminfo, [MEMINFO, *_recorded("proc/*/proc/meminfo")]),
    "psi": (_psi, [STALLS]),
    "cgroup": (_cgroup, [STAT, b"x 34359738368\n", b"x max\n"]),
    "cgroup tables": (_tables, [MOUNTS, b"4:cpu,memory:/jobs/one:two\n0::/\n"]),
    "arcstats": (lambda text: _within(zfs.parse(text)), [ARC]),
    "vm_stat": (lambda text: _mac(vm_stat.parse(text)), _recorded("vm_stat/*")),
    "sysctl": (_sysctl, [SYSCTL]),
    "macmon": (_macmon, _recorded("macmon/*")),
    "structures": (_structure, [bytes(range(152)), b"\0" * 152, (104).to_bytes(4, "little") + b"\x01" * 148]),
}
"""Each parser with what it must hold, and inputs to start from."""


def run(name: str, count: int, seed: int) -> None:
    """Give the parser `count` inputs. Raises AssertionError with the input it did not take well."""
    check, seeds = PARSERS[name]
    for text in mutations(seeds, count, random.Random(seed)):  # noqa: S311 - to be had again, not to be secret
        try:
            check(text)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r} for {text!r}") from error


def main() -> None:
    """All parsers in turn; the counts as JSON."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seconds = {}
    for name in PARSERS:
        started = time.perf_counter()
        run(name, count, seed=int(time.time()))
        seconds[name] = round(time.perf_counter() - started, 1)
        print(json.dumps({"parser": name, "inputs": count, "seconds": seconds[name]}), flush=True)


if __name__ == "__main__":
    main()
