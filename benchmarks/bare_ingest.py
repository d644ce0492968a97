"""The floor of ingest: a gRPC server that stores and acknowledges batches, and does nothing else with them.

`python -m benchmarks.bare_ingest LOG READY`: it takes TelemetryService/Report, looks into no fact, keeps no state, and
stores what waits with one executemany and one durable commit.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import grpc

from services import log_format, rpc
from ullage.v1 import telemetry_service_pb2

MEMORY_SAMPLED = log_format.KIND_NUMBERS["memory_sampled"]

Asked: TypeAlias = tuple[list[tuple[int, bytes]], asyncio.Future[int]]


class Writer:
    """A thread that stores whatever waits, in one transaction."""

    def __init__(self, path: Path) -> None:
        self.queue: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._path = path
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=8000"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(
            "CREATE TABLE events (seq INTEGER PRIMARY KEY, recorded_at_ns INTEGER, kind INTEGER, source INTEGER, "
            "source_seq INTEGER, crc INTEGER, payload BLOB) STRICT"
        )
        sequence = 0
        while True:
            waiting = [self.queue.get()]
            while not self.queue.empty():
                waiting.append(self.queue.get())
            rows, now_ns = [], time.time_ns()
            for said, _ in waiting:
                for number, payload in said:
                    sequence += 1
                    rows.append((sequence, now_ns, MEMORY_SAMPLED, 1, number, crc32(payload), payload))
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            connection.execute("COMMIT")
            self._loop.call_soon_threadsafe(self._acknowledge, waiting)

    @staticmethod
    def _acknowledge(waiting: list[Asked]) -> None:
        for said, done in waiting:
            if not done.done():
                done.set_result(said[-1][0])


class Reports:
    """Report, as bare as it can be."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def report(
        self, requests: AsyncIterator[telemetry_service_pb2.UnopenedReport], _context: object
    ) -> AsyncIterator[telemetry_service_pb2.ReportResponse]:
        waiting: asyncio.Queue[asyncio.Future[int] | None] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
                if request.observations:
                    said = [(one.source_sequence, one.fact) for one in request.observations]
                    self._writer.queue.put((said, done))
                else:
                    done.set_result(0)
                waiting.put_nowait(done)
            waiting.put_nowait(None)

        reading = asyncio.create_task(read())
        while (done := await waiting.get()) is not None:
            yield telemetry_service_pb2.ReportResponse(acknowledged_source_sequence=await done)
        await reading


async def main(log: Path, ready: Path) -> None:
    """Serve until killed."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(
        Reports(Writer(log)).report,
        telemetry_service_pb2.UnopenedReport.FromString,
        telemetry_service_pb2.ReportResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("ullage.v1.TelemetryService", {"Report": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.write_text(f"127.0.0.1:{port}")  # noqa: ASYNC240 - nobody waits for this process yet
    await server.wait_for_termination()


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
