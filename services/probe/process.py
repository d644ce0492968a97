"""One probe's life: read, report and answer until told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import structlog

from services import config_servicer, rpc
from services.clock import Clock, SystemClock
from services.probe.failures import Failures
from services.probe.identity import identity
from services.probe.latest import Latest
from services.probe.loop import Loop
from services.probe.machine import Machine, find
from services.probe.reporter import Reporter
from services.probe.servicer import ProbeServicer
from services.probe.settings import Settings
from services.probe.system import SystemSampler
from ullage.v1 import probe_service_pb2, probe_service_pb2_grpc

SERVICE_NAME = probe_service_pb2.DESCRIPTOR.services_by_name["ProbeService"].full_name

log = structlog.get_logger()


async def run(settings: Settings) -> None:
    """Probe until SIGTERM or SIGINT. Raises AddressError or IdentityError where it cannot start."""
    address = rpc.listen_address(settings.listen, insecure=settings.insecure)
    me = identity(settings.state_dir, settings.name, settings.version, settings.root)
    clock, latest = SystemClock(), Latest()
    reporter = Reporter(settings.master, me, clock)
    failures = Failures()
    machine = find(settings.root, settings.state_dir, clock, failures)
    if machine.pin is not None:
        log.debug("own pages kept in memory", allowed=machine.pin())
    loop = _loop(settings, machine, failures, me.node_id, reporter, latest, clock)
    server = rpc.Server()
    server.add(SERVICE_NAME, probe_service_pb2_grpc.add_ProbeServiceServicer_to_server, ProbeServicer(latest, reporter))
    config_servicer.add(server, "probe", settings.version, settings.options)
    port = await server.start(address)
    stop = stop_signal()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run()) for run in (loop.run, reporter.run, *machine.tasks)]
        if machine.alarms is not None:
            machine.alarms.watch(loop.take_memory)
        await server.set_serving(serving=True)
        _say_listening(address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}", settings)
        await stop.wait()
        latest.close()
        await server.stop()
        if machine.alarms is not None:
            machine.alarms.close()
        for task in running:
            task.cancel()


def _loop(
    settings: Settings,
    machine: Machine,
    failures: Failures,
    node_id: str,
    reporter: Reporter,
    latest: Latest,
    clock: Clock,
) -> Loop:
    return Loop(
        machine=machine,
        system=SystemSampler(settings.state_dir, settings.root, failures, machine.sources),
        override=settings.override,
        node_id=node_id,
        reporter=reporter,
        latest=latest,
        clock=clock,
        period_s=settings.period_ms / 1000,
        system_period_s=settings.system_period_ms / 1000,
        host_name=socket.gethostname if settings.name is None else None,
    )


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stop.set)
        except NotImplementedError:  # Windows' event loops know no signals.
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    return stop


def _say_listening(address: str, settings: Settings) -> None:
    log.info("listening", address=address, master=settings.master)
    if settings.ready_file is not None:
        _write_ready_file(settings.ready_file, address)


def _write_ready_file(path: Path, address: str) -> None:
    """Whoever waits for the file never sees half of it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(f"{address}\n", encoding="utf-8")
    draft.replace(path)
