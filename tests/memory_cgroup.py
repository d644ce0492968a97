"""A memory cgroup of a test's own, and a process in it that does with memory what it is told.

It limits in v1 where the machine has that, else in v2; stalls are read from v2 in both. Without the rights to make
one, or a kernel that keeps them, `Unavailable` says why.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from services.probe.linux.cgroup import parse_mounts

MIB = 1 << 20

ACTOR = """
import os, select, sys
held = []
block = bytes(1 << 20)
def told():
    return select.select([sys.stdin], [], [], 0)[0]
for line in sys.stdin:
    word, _, argument = line.strip().partition(" ")
    if word == "hold":
        held.append(bytearray(int(argument)))
        held[-1][::4096] = b"x" * len(held[-1][::4096])
    else:
        file = os.open(argument, os.O_RDWR)
        if word == "cache":
            while os.read(file, 1 << 20):
                pass
        else:
            print("pressing", flush=True)
            while not told():
                for at in range(0, os.fstat(file).st_size, 1 << 20):
                    os.pwrite(file, block, at)
    print("done", flush=True)
"""


class Unavailable(Exception):
    """No cgroup can be made here; the message says why."""


class MemoryCgroup:
    """A limit, and the processes under it."""

    def __init__(self, limiting: Path, pressure: Path, limit_bytes: int) -> None:
        """`limiting` sets the limit, and in `pressure` its stalls are counted; one folder in v2.

        In v1 the limit is on a cgroup within one that has none, which is told of what happens below.
        """
        self.limit_bytes = limit_bytes
        self.pressure_file = pressure / "memory.pressure"
        self.limiting = limiting
        self.v1_watching = limiting.parent if limiting != pressure else None
        self._pressure = pressure

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, run in this cgroup."""
        return _entering({self.limiting, self._pressure}, command)

    def watching(self, command: Sequence[str]) -> list[str]:
        """`command`, run where this cgroup's stalls are its own; its limit is not, where these are apart (v1)."""
        return _entering({self.v1_watching or self.limiting, self._pressure}, command)

    @property
    def usage_bytes(self) -> int:
        """What the kernel counts as used, the file cache too."""
        names = ("memory.usage_in_bytes", "memory.current")
        return next(int((self.limiting / name).read_text()) for name in names if (self.limiting / name).exists())

    def remove(self) -> None:
        """Take it away, once its processes are gone."""
        folders = (self.limiting, self.v1_watching, self._pressure)
        for folder in filter(None, dict.fromkeys(folders)):
            for _ in range(1200):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                time.sleep(0.05)


def _entering(folders: Iterable[Path], command: Sequence[str]) -> list[str]:
    enter = "".join(f"echo $$ > '{folder}/cgroup.procs' && " for folder in folders)
    return ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", *command]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup with that limit, taken away at the end. Raises Unavailable."""
    try:
        v1, v2 = (next(iter(mounts), None) for mounts in parse_mounts(Path("/proc/self/mountinfo").read_text()))
    except OSError as error:
        raise Unavailable(f"no cgroups: {error}") from error
    if v2 is None:
        raise Unavailable("the kernel has no cgroup v2, which keeps the stalls")
    name = f"ullage-test-{os.getpid()}"
    pressure = Path(str(v2.point)) / name
    limiting = Path(str(v1.point)) / name / "limited" if v1 is not None else pressure
    made = MemoryCgroup(limiting, pressure, limit_bytes)
    try:
        for folder in {limiting, pressure}:
            folder.mkdir(parents=True)
        limit = limiting / ("memory.limit_in_bytes" if v1 else "memory.max")
        limit.write_text(str(limit_bytes))
        made.pressure_file.read_text()
    except OSError as error:
        made.remove()
        raise Unavailable(f"no right to make a memory cgroup with stall information: {error}") from error
    try:
        yield made
    finally:
        made.remove()


class Actor:
    """A process in a cgroup that holds memory, caches files, and presses."""

    def __init__(self, group: MemoryCgroup) -> None:
        self._process = subprocess.Popen(
            group.command([sys.executable, "-c", ACTOR]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hold(self, size_bytes: int) -> None:
        """Have it allocate and write so much, and keep it."""
        self._tell(f"hold {size_bytes}", "done")

    def cache(self, file: Path) -> None:
        """Have it read the whole file once."""
        self._tell(f"cache {file}", "done")

    def press(self, file: Path) -> None:
        """Have it write the file again and again, until it is told something else.

        A page of it is had only by writing another one out, and that takes any disk long enough to be a stall; what is
        only read comes back from a fast disk with hardly one.
        """
        self._tell(f"press {file}", "pressing")

    def rest(self) -> None:
        """Have it stop pressing, and hold what it holds."""
        self._tell("hold 0", "done")
        self._expect("done")

    def end(self) -> None:
        """Have it exit, and give everything back."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str, answer: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._expect(answer)

    def _expect(self, answer: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        assert said == answer, said


def uncached_file(path: Path, size_bytes: int) -> Path:
    """A file of that size which is on the disk and in no cache, so that whoever reads it is charged for it."""
    with path.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path
