"""The probe's figures: what a reading costs, what its process weighs, and how soon the master knows of pressure."""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import psutil

from benchmarks.row import Row
from services.clock import SystemClock
from services.probe.estimator import estimate
from services.probe.failures import Failures
from services.probe.linux.alarms import STALL_TRIGGER
from services.probe.machine import MACHINE_ROOT, find
from services.probe.memory_sample import memory_sample
from services.probe.pressure import Verdict, judge
from tests.memory_cgroup import MIB, Actor, MemoryCgroup, Unavailable, memory_cgroup, uncached_file
from ullage.v1 import event_service_pb2, event_service_pb2_grpc

ROUNDS: Final = 250
READINGS_IN_ROUND: Final = 40  # Over before somebody else has his turn.
WATCHED_SECONDS: Final = 60.0
LIMIT_BYTES: Final = 384 * MIB
EVENTS: Final = 20
REST_SECONDS: Final = 3.0
EVENT_SECONDS_MAX: Final = 30.0
MEMORY_DISK: Final = Path("/dev/shm")  # noqa: S108 - a private folder is made in it
WOKEN_LATE_NANOSECONDS: Final = 5_000_000
POLL_SECONDS: Final = 0.004


def rows() -> Iterator[Row]:
    """All rows of the section."""
    yield from reading_rows()
    yield from process_rows()
    yield from latency_rows()


def reading_rows() -> Iterator[Row]:
    """One whole reading, to the sample that is sent, in turns with psutil's of the memory alone."""
    clock = SystemClock()
    machine = find(MACHINE_ROOT, Path("/nowhere"), clock, Failures())
    verdict: Verdict | None = None

    def whole() -> None:
        nonlocal verdict
        reading = machine.read()
        # Half a second apart, as they are in the field: the windows of the stalls then move as they do there.
        verdict = judge(verdict, reading, 0.0 if verdict is None else next(beats))
        memory_sample(reading, verdict, estimate(reading, verdict.level, None), clock.now_ns())

    beats = iter(count_seconds())
    ours, floors = [], []
    for _ in range(ROUNDS):
        floors.append(_microseconds(psutil.virtual_memory))
        ours.append(_microseconds(whole))
    # The quickest rounds are those in which nobody else ran.
    yield Row("probe", "one whole reading", min(ours), "µs", "lower", 30)
    ratio = statistics.median(one / other for one, other in zip(ours, floors, strict=True))
    floor = min(floors)
    yield Row("probe", "one whole reading", ratio * floor, "µs", "lower", 1.2, floor, "psutil.virtual_memory")


def count_seconds() -> Iterator[float]:
    """Half seconds, for ever."""
    now_s = 0.0
    while True:
        now_s += 0.5
        yield now_s


def _microseconds(read: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(READINGS_IN_ROUND):
        read()
    return (time.perf_counter() - started) / READINGS_IN_ROUND * 1e6


def process_rows() -> Iterator[Row]:
    """A probe at 2 Hz that reports to a master, for a minute."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address = stack.enter_context(_service(Path(folder), "master"))
        probe = stack.enter_context(_probe(Path(folder), address, None))
        time.sleep(3.0)  # Starting is not running.
        before, started = probe.cpu_times(), time.perf_counter()
        time.sleep(WATCHED_SECONDS)
        after, elapsed = probe.cpu_times(), time.perf_counter() - started
        share = (after.user + after.system - before.user - before.system) / elapsed
        resident = probe.memory_info().rss
    yield Row("probe", "process at 2 Hz, CPU", share * 100, "% of a core", "lower", 0.3)
    yield Row("probe", "process at 2 Hz, resident", resident / MIB, "MiB", "lower", 40)


def latency_rows() -> Iterator[Row]:
    """From the kernel's stall event of a real cgroup to the master's state, which is asked every few ms.

    What presses keeps the disk busy, so the master's log is not on it: its commits are the log section's to measure.
    """
    try:
        with (
            tempfile.TemporaryDirectory() as disk,
            tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.exists() else None) as folder,
            memory_cgroup(LIMIT_BYTES) as group,
        ):
            seconds = sorted(_latencies(Path(folder), uncached_file(Path(disk) / "large", LIMIT_BYTES), group))
    except Unavailable as error:
        print(f"probe: no latency: {error}", file=sys.stderr)
        return
    yield Row("probe", "stall event to the master's state, p50", statistics.median(seconds) * 1e3, "ms", "lower", 100)
    worst = seconds[int(len(seconds) * 0.99)]
    yield Row("probe", "stall event to the master's state, p99", worst * 1e3, "ms", "lower", 100)


def _latencies(folder: Path, file: Path, group: MemoryCgroup) -> list[float]:
    """The seconds from each event until the state has a sample that was taken after it."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_service(folder, "master"))
        stack.enter_context(_probe(folder, address, group))
        stub = event_service_pb2_grpc.EventServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        trigger = os.open(group.pressure_file, os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, trigger)
        os.write(trigger, STALL_TRIGGER)
        events = select.poll()
        events.register(trigger, select.POLLPRI)
        actor = Actor(group)
        stack.callback(actor.end)
        actor.hold(200 * MIB)
        return [_latency(events, stub, actor, file) for _ in range(EVENTS)]


def _latency(events: select.poll, stub: event_service_pb2_grpc.EventServiceStub, actor: Actor, file: Path) -> float:
    """From a trigger like the probe's, on the same file.

    The kernel gives each at most one event in 2 s, and not the same ones: so they are let rest between.
    """
    time.sleep(REST_SECONDS)
    events.poll(0)
    actor.press(file)
    if not events.poll(EVENT_SECONDS_MAX * 1000):
        raise TimeoutError(f"no stalls within {EVENT_SECONDS_MAX:.0f} s of pressing")
    at_ns = time.time_ns()
    # The probe may have read before this process was woken.
    while _taken_at_ns(stub) < at_ns - WOKEN_LATE_NANOSECONDS:
        time.sleep(POLL_SECONDS)
    seconds = (time.time_ns() - at_ns) / 1e9
    actor.rest()
    return seconds


def _taken_at_ns(stub: event_service_pb2_grpc.EventServiceStub) -> int:
    """When the memory sample in the master's state was taken, 0 while there is none."""
    nodes = stub.GetState(event_service_pb2.GetStateRequest(), timeout=10).state.nodes
    return max((node.memory.taken_at.ToNanoseconds() for node in nodes), default=0)


@contextlib.contextmanager
def _probe(folder: Path, master: str, group: MemoryCgroup | None) -> Iterator[psutil.Process]:
    process = _start(folder, "probe", group, "--master", master)
    try:
        _address(folder, "probe", process)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _service(folder: Path, name: str) -> Iterator[str]:
    process = _start(folder, name, None)
    try:
        yield _address(folder, name, process)
    finally:
        process.terminate()
        process.wait()


def _start(folder: Path, name: str, group: MemoryCgroup | None, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"services.{name}", "--listen", "127.0.0.1:0", "--state-dir", str(folder)]
    command += ["--ready-file", str(folder / f"{name}.ready"), "--log-level", "error", *options]
    # Under the limit itself the probe would wait as long as those it tells of.
    return subprocess.Popen(command if group is None else group.watching(command))


def _address(folder: Path, name: str, process: subprocess.Popen[bytes]) -> str:
    ready = folder / f"{name}.ready"
    while not ready.exists():
        if process.poll() is not None:
            raise ChildProcessError(f"the {name} ended with {process.returncode} before it listened")
        time.sleep(0.02)
    return ready.read_text().strip()
