"""The memory limits on this process: every cgroup from its own up to the root of the mount, v1, v2 or both.

Rules this module lives by:
- What is used of a limit is `usage - inactive_file - active_file`: the file cache goes when it is needed.
  tmpfs is not in those two, and does not go.
- A limit at or above the machine's memory is none: v1 writes a number near 2^63 for it, v2 "max".
- The kernel enforces every limit on the way up, so the least room on the way is what there is. What lies above the
  mount cannot be seen; of its limits v1 tells the least, in memory.stat of whatever is below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from services.probe.failures import Failures
from services.probe.linux.open_file import OpenFile, existing, whole_text
from services.probe.linux.psi import StallFile
from services.probe.reading import Stall

_DIGITS_MAX: Final = 19
_NUMBER_BOUND: Final = 2**63
"""The kernel counts in 64 bits with a sign; 19 digits can say more."""

_LEVELS_MAX: Final = 32
"""Deeper than any hierarchy that was seen; each level costs a read or two."""

_ROOMS_PER_LIMITS: Final = 8
"""Limits are changed by hand, so they are read at every eighth reading: a desktop has ten files of them."""

_UNLIMITED_BYTES_MIN: Final = 2**62
"""The first version writes a number near 2^63, which depends on the size of a page."""


class Room(NamedTuple):
    """What the limits leave; all None where nothing limits."""

    limit_bytes: int | None = None
    used_bytes: int | None = None
    available_bytes: int | None = None


class Events(NamedTuple):
    """How often the cgroup ran out of memory or was held at its limit, or at one above it, since they were made."""

    oom: int | None = None
    limit: int | None = None


_UNLIMITED: Final = Room()
_UNCOUNTED: Final = Events()


class Mount(NamedTuple):
    """A mounted hierarchy, and the cgroup mounted there: not "/" in a container that sees only its own part."""

    root: PurePosixPath
    point: PurePosixPath


class Dialect(NamedTuple):
    """What the files are called, and how the lines in them begin: after the end of the one before, with a space."""

    limits: tuple[str, ...]
    usage: str
    events: str
    events_above: str | None
    """Of a cgroup above: what its own limit did, and not those of all others below it."""
    cache: tuple[bytes, ...]
    oom: tuple[bytes, ...]
    held: tuple[bytes, ...]


V1: Final = Dialect(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    events="memory.oom_control",
    events_above=None,  # The first version counts at whoever was killed.
    cache=(b"\ntotal_inactive_file ", b"\ntotal_active_file "),
    oom=(b"\noom_kill ",),
    held=(),
)
V2: Final = Dialect(
    # Above "high" a process is slowed until it gives memory back: there is no room to promise there.
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    events="memory.events",
    events_above="memory.events.local",
    cache=(b"\ninactive_file ", b"\nactive_file "),
    oom=(b"\noom ", b"\noom_kill "),
    held=(b"\nhigh ", b"\nmax "),
)


def parse_limit(text: bytes) -> int | None:
    """The limit a file states, in bytes; None for "max", for nothing and for nonsense. Never raises.

    0 is none as well: the process that reads it lives under it, so it cannot be in force.
    """
    return _number(text) or None


def parse_cache(text: bytes, dialect: Dialect) -> int:
    """The bytes of file cache in a memory.stat. A line that is missing counts as no cache, so as used."""
    return _sum(text, dialect.cache) or 0


def parse_inherited(text: bytes) -> int | None:
    """The least limit above and in a v1 cgroup, as its memory.stat has it; None where it says none. Never raises."""
    return _count(b"\n" + text, b"\nhierarchical_memory_limit ") or None


def parse_events(text: bytes, dialect: Dialect) -> Events:
    """The counters of memory.events (v2) or memory.oom_control (v1), None where there are none. Never raises."""
    return Events(oom=_sum(text, dialect.oom), limit=_sum(text, dialect.held))


def _summed(events: Sequence[Events]) -> Events:
    """All of them together; None for what none of them counts."""
    oom = [each.oom for each in events if each.oom is not None]
    limit = [each.limit for each in events if each.limit is not None]
    return Events(sum(oom) if oom else None, sum(limit) if limit else None)


def room(limit_bytes: int, usage_bytes: int, cache_bytes: int) -> Room:
    """What a limit leaves: between 0 and the limit, whatever the counters say."""
    used = min(max(usage_bytes - cache_bytes, 0), limit_bytes)
    return Room(limit_bytes, used, limit_bytes - used)


def parse_membership(text: str) -> tuple[str | None, str | None]:
    """The paths of /proc/self/cgroup in the v1 memory hierarchy and in v2, None where it has no part."""
    v1 = v2 = None
    for line in text.splitlines():
        _, separator, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            continue
        if "memory" in controllers.split(","):
            v1 = path
        elif not controllers:
            v2 = path
    return v1, v2


def parse_mounts(text: str) -> tuple[list[Mount], list[Mount]]:
    """Everywhere that /proc/self/mountinfo says the v1 memory hierarchy and v2 are mounted."""
    v1: dict[PurePosixPath, Mount] = {}
    v2: dict[PurePosixPath, Mount] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(" "), after.split(" ")
        if len(fields) < 5 or not kind.startswith("cgroup"):
            continue
        mount = Mount(PurePosixPath(_unescaped(fields[3])), PurePosixPath(_unescaped(fields[4])))
        # A later mount at the same place hides the one before.
        if kind == "cgroup2":
            v2[mount.point] = mount
        elif rest and "memory" in rest[-1].split(","):
            v1[mount.point] = mount
    return list(v1.values()), list(v2.values())


def telling(mounts: Sequence[Mount], path: str) -> Mount | None:
    """Of several mounts of one hierarchy, the one that shows most of the way up from `path`; None where there is none.

    Where none shows the cgroup itself, it is the first.
    """
    showing = [mount for mount in mounts if _below(mount, path) is not None]
    return min(showing or mounts[:1], key=lambda mount: len(mount.root.parts), default=None)


def directories(mount: Mount, path: str, root: Path) -> list[Path]:
    """The cgroup's directory and all above it, up to where the hierarchy is mounted; `root` is before both.

    A path outside the mounted part cannot be seen from here: the mount itself is then the nearest there is.
    """
    top = root / str(mount.point).lstrip("/")
    parts = (_below(mount, path) or ())[:_LEVELS_MAX]
    return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _below(mount: Mount, path: str) -> tuple[str, ...] | None:
    """The way from the mounted cgroup down to `path`, None where that is not below it.

    Both are told as they are seen from this process's cgroup namespace, so both may begin with "/..": what is beside
    the namespace is below what is mounted from above it.
    """
    own = PurePosixPath(path)
    parts = own.relative_to(mount.root).parts if own.is_relative_to(mount.root) else ("..",)
    return None if ".." in parts else parts


class Cgroups:
    """The cgroups above this process, found once. What is used of a limit is read every time."""

    def __init__(self, root: Path, failures: Failures) -> None:
        """`root` holds proc and sys: "/", or a recorded tree."""
        paths = parse_membership(whole_text(root / "proc/self/cgroup", failures))
        mounts = parse_mounts(whole_text(root / "proc/self/mountinfo", failures))
        v1, v2 = (
            directories(mount, path, root) if path is not None and (mount := telling(all_of_it, path)) else []
            for all_of_it, path in zip(mounts, paths, strict=True)
        )
        dialect, limiting = (V1, v1) if v1 else (V2, v2)
        self._levels = [_Level(directory, dialect, failures) for directory in limiting]
        if v1:
            self._levels[-1].look_above()
        telling_of_events = [directory / dialect.events for directory in limiting[:1]]
        if dialect.events_above is not None:
            telling_of_events += [directory / dialect.events_above for directory in limiting[1:]]
        self._events = [file for path in telling_of_events if (file := existing(path, failures)) is not None]
        # In a hybrid, v1 limits while only v2 has stall information. The root cgroup's is the machine's own, which
        # is read already; only the others have a type.
        inside = bool(v2) and existing(v2[0] / "cgroup.type", failures) is not None
        pressure = existing(v2[0] / "memory.pressure", failures) if inside else None
        self._pressure = None if pressure is None else StallFile(pressure)
        self.stall_files = [v2[0] / "memory.pressure"] if inside else []
        self.event_files = telling_of_events if inside and dialect is V2 else []
        """What can be watched for changes, where it exists."""
        self.v1_folder = v1[0] if v1 else None
        """The process's own v1 cgroup, which announces instead."""
        self._dialect = dialect
        self._limited: list[_Level] = []
        self._rooms_until_limits = 0

    def room(self, ram_total_bytes: int | None) -> Room:
        """The tightest limit, what is used of it, and the least room left under any limit."""
        if self._rooms_until_limits == 0:
            self._rooms_until_limits = _ROOMS_PER_LIMITS
            self._limited = [level for level in self._levels if level.read_limit(ram_total_bytes)]
        self._rooms_until_limits -= 1
        if not self._limited:
            return _UNLIMITED
        rooms = [level.room() for level in self._limited]
        tightest = min(rooms, key=lambda found: found.limit_bytes or 0)
        known = [found.available_bytes for found in rooms if found.available_bytes is not None]
        return tightest._replace(available_bytes=min(known, default=None))

    def stall(self) -> Stall | None:
        """The stall information of the process's own cgroup, None where it has none."""
        return None if self._pressure is None else self._pressure.read()

    def events(self) -> Events:
        """How often the process's own cgroup hit the limits; unknown while nothing limits, since nothing can hit."""
        if not self._limited:
            return _UNCOUNTED
        texts = [file.read() for file in self._events]
        # Without one of them the sum would fall, and rise when it is back.
        found = [parse_events(text, self._dialect) for text in texts if text is not None]
        return _summed(found) if len(found) == len(texts) else _UNCOUNTED


class _Level:
    """One cgroup on the way up."""

    def __init__(self, directory: Path, dialect: Dialect, failures: Failures) -> None:
        self._dialect = dialect
        self._limits = [file for name in dialect.limits if (file := existing(directory / name, failures)) is not None]
        self._usage = OpenFile(directory / dialect.usage, failures)
        self._stat = OpenFile(directory / "memory.stat", failures)
        self._limit_bytes = 0
        self._inherits = False

    def look_above(self) -> None:
        """See whether there is a limit above a v1 cgroup, of which its own memory.stat tells: then it counts."""
        inherited = parse_inherited(self._stat.read() or b"")
        self._inherits = inherited is not None and inherited < _UNLIMITED_BYTES_MIN

    def read_limit(self, ram_total_bytes: int | None) -> bool:
        """Whether this cgroup sets a limit below the machine's memory, which then counts until the next call."""
        texts = [text for file in self._limits if (text := file.read()) is not None]
        limits = [parse_limit(text) for text in texts]
        if self._inherits:
            limits.append(parse_inherited(self._stat.read() or b""))
        if texts:  # Where they cannot be read, the last known limit is the best there is.
            self._limit_bytes = min((limit for limit in limits if limit is not None), default=0)
        return 0 < self._limit_bytes < (ram_total_bytes or _UNLIMITED_BYTES_MIN)

    def room(self) -> Room:
        """What this cgroup leaves under its limit."""
        usage = _number(self._usage.read() or b"")
        if usage is None:
            return Room(self._limit_bytes)
        return room(self._limit_bytes, usage, parse_cache(self._stat.read() or b"", self._dialect))


def _sum(text: bytes, keys: tuple[bytes, ...]) -> int | None:
    """The sum of the lines "name number" that are there, None where none is."""
    if not keys:
        return None
    text = b"\n" + text
    counts = [count for key in keys if (count := _count(text, key)) is not None]
    return sum(counts) if counts else None


def _count(text: bytes, key: bytes) -> int | None:
    start = text.find(key)
    if start < 0:
        return None
    start += len(key)
    return _number(text[start : start + _DIGITS_MAX + 1].partition(b"\n")[0])


def _number(text: bytes) -> int | None:
    digits = text.strip()
    number = int(digits) if digits.isdigit() and len(digits) <= _DIGITS_MAX else None
    return number if number is None or number < _NUMBER_BOUND else None


def _unescaped(field: str) -> str:
    r"""A mountinfo field with its \040 and the like made characters again."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
