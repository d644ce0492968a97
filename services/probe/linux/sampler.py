"""The Linux sampler: /proc/meminfo, stall information and cgroup limits, in one reading of some 20 us.

It is read inline on the event loop: handing it to a thread costs more than the reading itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.probe.failures import Failures
from services.probe.linux import meminfo, zfs
from services.probe.linux.alarms import Alarms
from services.probe.linux.cgroup import Cgroups
from services.probe.linux.meminfo import Meminfo
from services.probe.linux.open_file import OpenFile, existing, whole_text
from services.probe.linux.psi import StallFile
from services.probe.reading import Reading, bounded
from ullage.v1 import node_pb2

_NOTHING: Final = Meminfo()


class LinuxSampler:
    """Reads the memory of the machine, or of one recorded as files."""

    def __init__(self, root: Path, failures: Failures) -> None:
        """`root` holds proc and sys: "/", or a recorded tree."""
        self._failures = failures
        self._meminfo = OpenFile(root / "proc/meminfo", failures)
        self._parser = meminfo.Parser()
        # A kernel that has it switched off shows the file, and fails at reading.
        pressure = existing(root / "proc/pressure/memory", failures)
        self._pressure = None if pressure is None else StallFile(pressure)
        # The machine's cache is no part of what a container is told it has.
        is_container = meminfo.is_containers(whole_text(root / "proc/self/mountinfo", failures))
        self._arc = None if is_container else existing(root / "proc/spl/kstat/zfs/arcstats", failures)
        self._cgroups = Cgroups(root, failures)
        # The process's own cgroup before the machine: its neighbours' stalls are not its own.
        stall_files = [*self._cgroups.stall_files, root / "proc/pressure/memory"]
        self.alarms = Alarms(stall_files, self._cgroups.event_files, failures, self._cgroups.v1_folder)

    def read(self) -> Reading:
        """The memory now. Never raises: what cannot be read is absent, and was counted."""
        memory = self._memory()
        room = self._cgroups.room(memory.total_bytes)
        events = self._cgroups.events()
        if room.limit_bytes is not None:
            # How much of the machine's swap is for this cgroup nobody says here.
            memory = memory._replace(swap_total_bytes=None, swap_free_bytes=None)
        # Some kernels say 0 whatever is free (psutil 1915). Where the memory has really run out, next to none is.
        is_free_only = memory.available_bytes == 0 and bool(memory.free_bytes)
        if is_free_only:
            memory = memory._replace(available_bytes=memory.free_bytes)
        available = bounded(memory.available_bytes, memory.total_bytes)
        free = bounded(memory.free_bytes, memory.total_bytes)
        swap = bounded(memory.swap_free_bytes, memory.swap_total_bytes)
        return Reading(
            source=node_pb2.MEMORY_SOURCE_PROCFS,
            ram_total_bytes=memory.total_bytes,
            ram_available_bytes=available,
            ram_free_bytes=free,
            file_backed_bytes=memory.file_backed_bytes,
            swap_total_bytes=memory.swap_total_bytes,
            swap_available_bytes=swap,
            cgroup_limit_bytes=room.limit_bytes,
            cgroup_used_bytes=room.used_bytes,
            cgroup_available_bytes=room.available_bytes,
            host_stall=None if self._pressure is None else self._pressure.read(),
            cgroup_stall=self._cgroups.stall(),
            oom_events=events.oom,
            limit_events=events.limit,
            stall_alarm=self.alarms.stalled(),
            reclaim_alarm=self.alarms.hard_to_reclaim(),
            arc_bytes=self._arc_bytes(),
            huge_pages_bytes=memory.huge_pages_bytes,
            clamped=(available, free, swap) != (memory.available_bytes, memory.free_bytes, memory.swap_free_bytes),
            coarse=is_free_only or (room.limit_bytes is not None and room.used_bytes is None),
        )

    def _memory(self) -> Meminfo:
        text = self._meminfo.read()
        if text is None:
            return _NOTHING
        memory = self._parser.parse(text)
        if memory.total_bytes is None or memory.available_bytes is None:
            self._failures.add("MemAvailable", ValueError("/proc/meminfo lacks it or MemTotal, or gives no size"))
        # A machine that has none is one that does not say.
        return _NOTHING if memory.total_bytes == 0 else memory

    def _arc_bytes(self) -> int | None:
        text = self._arc.read() if self._arc is not None else None
        return None if text is None else zfs.parse(text)
