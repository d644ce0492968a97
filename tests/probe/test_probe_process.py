"""The probe as a process: what it answers, prints and exits with."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services import rpc
from services.clock import SystemClock
from services.probe import once
from services.probe.estimator import Override
from services.probe.failures import Failures
from services.probe.machine import Machine, find
from ullage.v1 import node_pb2, probe_service_pb2, probe_service_pb2_grpc

RECORDED = Path(__file__).parents[1] / "recorded/proc"

HEAVY = ("ssl", "typer", "pydantic", "rich", "numpy", "importlib.metadata", "platformdirs")

COMMAND = (sys.executable, "-m", "services.probe", "--master", "127.0.0.1:1")


def recorded(folder: str, failures: Failures) -> Machine:
    return find(RECORDED / folder, Path("/nowhere"), SystemClock(), failures)


@asynccontextmanager
async def probe(folder: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A probe that listens, and its address."""
    ready = folder / "ready"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--listen", "127.0.0.1:0", "--state-dir", str(folder), "--ready-file", str(ready), *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while not ready.exists():  # noqa: ASYNC110 - another process makes the file
                await asyncio.sleep(0.02)
        yield process, ready.read_text().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(*options: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, output.decode(), errors.decode()


async def test_a_probe_answers_with_its_samples_and_stops_cleanly(tmp_path: Path) -> None:
    async with probe(tmp_path, "--name", "anna", "--root", str(RECORDED / "normal"), "--memory", "4GiB") as (
        process,
        address,
    ):
        async with rpc.channel(address) as channel:
            stub = probe_service_pb2_grpc.ProbeServiceStub(channel)
            sample = await stub.GetSample(probe_service_pb2.GetSampleRequest(), timeout=60, wait_for_ready=True)
            watched = stub.WatchSamples(probe_service_pb2.WatchSamplesRequest(), timeout=60)
            first = await watched.read()
        process.send_signal(signal.SIGTERM)
        output, errors = await process.communicate()
    assert sample.identity.friendly_name == "anna"
    assert sample.identity.node_id == (tmp_path / "node_id").read_text().strip()
    assert sample.memory.ram_total_bytes == 16 << 30
    assert sample.memory.balanced_available_bytes == 4 << 30
    assert sample.system.memory.ram_total_bytes == 16 << 30
    assert not sample.connected_to_master
    assert sample.buffered_facts >= 3
    assert isinstance(first, probe_service_pb2.WatchSamplesResponse)
    assert first.memory.pressure_level == node_pb2.PRESSURE_LEVEL_NORMAL
    assert (process.returncode, output) == (0, b"")
    assert b"event=listening" in errors
    assert address.encode() in errors


@pytest.mark.parametrize(
    ("folder", "level"),
    [
        ("normal", node_pb2.PRESSURE_LEVEL_NORMAL),
        ("warning", node_pb2.PRESSURE_LEVEL_WARNING),
        ("critical", node_pb2.PRESSURE_LEVEL_CRITICAL),
    ],
)
def test_a_recorded_machine_says_its_level_at_its_first_reading(
    folder: str, level: node_pb2.PressureLevel.ValueType
) -> None:
    failures = Failures()
    sample = once.read_once(recorded(folder, failures), Override(size_bytes=1 << 30), SystemClock())
    assert sample.pressure_level == level
    assert sample.strict_available_bytes == (0 if level == node_pb2.PRESSURE_LEVEL_CRITICAL else 1 << 30)
    assert node_pb2.MEMORY_FLAG_OVERRIDDEN in sample.flags
    assert not failures.counts


def test_once_for_a_person_gives_values_conclusions_and_reasons() -> None:
    text = once.as_text(once.read_once(recorded("critical", Failures()), None, SystemClock()))
    assert "ram total               16.00 GiB" in text
    assert "ram available           0.30 GiB      MemAvailable + ARC above its minimum" in text
    assert "cgroup limit            none          the least of memory.max and memory.high" in text
    assert "compressed" not in text
    assert "ceiling available       0.00 GiB      0 under CRITICAL, whatever is left" in text
    assert "pressure level          CRITICAL" in text
    assert "0.30 GiB available, below 0.80 GiB (available)" in text


async def test_once_prints_json_and_exits() -> None:
    code, output, _ = await run("--once", "--json", "--memory", "1GiB", "--root", str(RECORDED / "critical"))
    assert code == 0
    said = json.loads(output)
    assert said["flags"] == ["MEMORY_FLAG_OVERRIDDEN", "MEMORY_FLAG_CRITICAL_ZEROED"]
    assert said["formulas"]["ram_free_bytes"] == "MemFree: no measure of anything, caches fill it"
    assert said["formulas"].keys() <= said.keys()


def test_the_lean_program_brings_in_nothing_that_only_its_start_takes() -> None:
    code = f"""
import sys
from services.probe import lean
try:
    lean.run("error", "{{}}")
except KeyError:
    print([name for name in {HEAVY} if sys.modules.get(name)])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


async def test_what_keeps_a_probe_from_starting_is_one_line_and_exit_1(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/node_id").write_text("nonsense")
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    state = ("--state-dir", str(tmp_path))
    ended = await asyncio.gather(
        run(*state, "--memory", "4x"),
        run(*state, "--listen", f"127.0.0.1:{port}"),
        run("--state-dir", str(tmp_path / "bad"), "--listen", "127.0.0.1:0"),
    )
    await server.stop(None)
    for (code, output, errors), message in zip(
        ended, ("'4x' is no amount of memory", "it is in use", "holds no node id"), strict=True
    ):
        assert (code, output) == (1, "")
        # gRPC's core says of a taken port what it thinks, before.
        assert message in errors.splitlines()[-1]
        assert "Traceback" not in errors


_WITHOUT_SIGNALS = """
import asyncio, signal
from services.probe.process import stop_signal

class Loop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, *_):
        raise NotImplementedError

async def stopped():
    stop = stop_signal()
    signal.raise_signal(signal.SIGTERM)
    await stop.wait()

with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(stopped())
"""


def test_a_signal_stops_a_probe_whose_event_loop_knows_none_as_on_windows() -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_SIGNALS], capture_output=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
