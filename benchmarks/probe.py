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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

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
STARTING_SECONDS: Final = 4.0
"""In which the probe connects, and measures the memory's speed with all there is."""
EVENTS: Final = 20
TRIGGERS: Final = 5
EVENT_MILLISECONDS_MAX: Final = 30_000
KERNEL_APART_MS: Final = 200
"""A tenth of the trigger's window."""
MEMORY_DISK: Final = Path("/dev/shm")  # noqa: S108 - a private folder is made in it
WOKEN_LATE_NANOSECONDS: Final = 5_000_000
POLL_SECONDS: Final = 0.004


def rows() -> Iterator[Row]:
    """All rows of the section."""
    yield from reading_rows()
    yield from process_rows()
    yield from latency_rows()


def reading_rows() -> Iterator[Row]:
    """A reading alone, and the whole of it to the sample that is sent, in turns with psutil's of the memory alone."""
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
    ours, alone, floors = [], [], []
    for _ in range(ROUNDS):
        floors.append(_microseconds(psutil.virtual_memory))
        ours.append(_microseconds(whole))
        alone.append(_microseconds(machine.read))
    # The quickest rounds are those in which nobody else ran.
    yield Row("probe", "one reading, not yet judged", min(alone), "µs", "lower", 30)
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
        time.sleep(STARTING_SECONDS)
        before, started = probe.cpu_times(), time.perf_counter()
        time.sleep(WATCHED_SECONDS)
        after, elapsed = probe.cpu_times(), time.perf_counter() - started
        share = (after.user + after.system - before.user - before.system) / elapsed
        resident = probe.memory_info().rss
    yield Row("probe", "process at 2 Hz, CPU", share * 100, "% of a core", "lower", 0.3)
    yield Row("probe", "process at 2 Hz, resident", resident / MIB, "MiB", "lower", 40)


def latency_rows() -> Iterator[Row]:
    """From the kernel's word that a real cgroup is pressed to the master's state, which is asked every few ms.

    What presses keeps the disk busy, so the master's log is not on it: its commits are the log section's to measure.
    """
    try:
        with (
            tempfile.TemporaryDirectory() as disk,
            tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.exists() else None) as folder,
            memory_cgroup(LIMIT_BYTES) as group,
        ):
            file = uncached_file(Path(disk) / "large", LIMIT_BYTES)
            announced, stalls = _latencies(Path(folder), file, group)
    except Unavailable as error:
        print(f"probe: no latency: {error}", file=sys.stderr)
        return
    yield from _latency_rows("cgroup event", announced, 100)
    # The kernel looks at each process's trigger by itself, up to 200 ms apart; so this says more of it than of us.
    yield from _latency_rows("stall trigger", stalls, 100 + KERNEL_APART_MS)


def _latency_rows(event: str, latencies: Sequence[Latency], target_ms: float) -> Iterator[Row]:
    """The whole way, and the two parts of it: until the probe has read, and until the master knows."""
    for part, seconds in (
        ("to the master's state", sorted(latency.whole_s for latency in latencies)),
        ("to the probe's reading", sorted(latency.reading_s for latency in latencies)),
    ):
        for name, at in (("p50", 0.5), ("p99", 0.99)):
            value = seconds[int(len(seconds) * at)] * 1e3
            yield Row("probe", f"{event} {part}, {name}", value, "ms", "lower", target_ms)


class Latency(NamedTuple):
    """What one event took."""

    reading_s: float
    """Until the memory was read because of it."""
    whole_s: float
    """Until that reading was in the master's state."""


def _latencies(folder: Path, file: Path, group: MemoryCgroup) -> tuple[list[Latency], list[Latency]]:
    """Those of the cgroup's own events, and of stall triggers."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_service(folder, "master"))
        stack.enter_context(_probe(folder, address, group))
        stack.enter_context(_first_to_wake())
        stub = event_service_pb2_grpc.EventServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        actor = Actor(group)
        stack.callback(actor.end)
        actor.hold(200 * MIB)
        time.sleep(STARTING_SECONDS)
        announcements = stack.enter_context(_announcements(group))
        announced = [_latency(announcements, stub, actor, file, 0.6) for _ in range(EVENTS)]
        triggers = stack.enter_context(_triggers(group))
        # The kernel gives each trigger at most one event in 2 s, so they are let rest between.
        return announced, [_latency(triggers, stub, actor, file, 3.0) for _ in range(TRIGGERS)]


@contextlib.contextmanager
def _first_to_wake() -> Iterator[None]:
    """Whoever takes the time must not wait for a core himself, where he may go first. Whom he starts meanwhile may."""
    usual = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *usual)


@contextlib.contextmanager
def _announcements(group: MemoryCgroup) -> Iterator[Callable[[int], bool]]:
    """A wait for the event that the probe is told of in the same moment: by v1 eventfds, or by v2's memory.events."""
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        if group.v1_watching is None:
            file = os.open(group.limiting / "memory.events", os.O_RDONLY)
            stack.callback(os.close, file)
            poll.register(file, select.POLLPRI)
        else:
            file = os.eventfd(0, os.EFD_NONBLOCK)
            stack.callback(os.close, file)
            announcing = os.open(group.v1_watching / "memory.pressure_level", os.O_RDONLY)
            stack.callback(os.close, announcing)
            (group.v1_watching / "cgroup.event_control").write_text(f"{file} {announcing} medium")
            poll.register(file, select.POLLIN)

        def wait(milliseconds: int) -> bool:
            rang = bool(poll.poll(milliseconds))
            with contextlib.suppress(BlockingIOError):
                os.read(file, 4096) if group.v1_watching else os.pread(file, 4096, 0)
            return rang

        yield wait


@contextlib.contextmanager
def _triggers(group: MemoryCgroup) -> Iterator[Callable[[int], bool]]:
    """A wait for a trigger like the probe's, on the same file."""
    trigger = os.open(group.pressure_file, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(trigger, STALL_TRIGGER)
        poll = select.poll()
        poll.register(trigger, select.POLLPRI)
        yield lambda milliseconds: bool(poll.poll(milliseconds))
    finally:
        os.close(trigger)


def _latency(
    wait: Callable[[int], bool],
    stub: event_service_pb2_grpc.EventServiceStub,
    actor: Actor,
    file: Path,
    rest_seconds: float,
) -> Latency:
    """That of the next event, after a rest in which what happened before is forgotten."""
    time.sleep(rest_seconds)
    wait(0)
    actor.press(file)
    if not wait(EVENT_MILLISECONDS_MAX):
        raise TimeoutError(f"no event within {EVENT_MILLISECONDS_MAX} ms of pressing")
    at_ns = time.time_ns()
    # The probe may have read before this process was woken.
    while (taken_ns := _taken_at_ns(stub)) < at_ns - WOKEN_LATE_NANOSECONDS:
        time.sleep(POLL_SECONDS)
    latency = Latency(max(0.0, (taken_ns - at_ns) / 1e9), (time.time_ns() - at_ns) / 1e9)
    actor.rest()
    return latency


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
