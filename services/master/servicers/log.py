"""How operators look after the log: its size, its soundness, its age, and a copy of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from services import log_format
from services.master import errors
from services.master.cluster import Cluster
from services.master.keeper import Keeper
from services.master.log_check import check
from services.master.retention import Policy
from services.master.servicers.errors import translated
from ullage.v1 import log_service_pb2, log_service_pb2_grpc

PIECE_BYTES: Final = 1 << 20


class LogServicer(log_service_pb2_grpc.LogServiceServicer):
    """LogService over the one log."""

    def __init__(self, cluster: Cluster, keeper: Keeper | None, policy: Policy, path: Path) -> None:
        """`keeper` is None where the log is only read."""
        self._cluster = cluster
        self._keeper = keeper
        self._policy = policy
        self._path = path

    async def GetLog(self, request: log_service_pb2.GetLogRequest, context: Any) -> log_service_pb2.GetLogResponse:
        with translated():
            reader = self._cluster.log
            size = await asyncio.to_thread(reader.size)
            wal = self._path.with_name(self._path.name + "-wal")
            answer = log_service_pb2.GetLogResponse(
                head_sequence=self._cluster.state.sequence,
                compacted_sequence=reader.mark(),
                file_bytes=self._path.stat().st_size,
                wal_bytes=wal.stat().st_size if wal.exists() else 0,
                free_bytes=size.free_bytes,
                kinds=[
                    log_service_pb2.KindSize(
                        kind=log_format.KIND_NAMES.get(kind, "unknown"), events=events, payload_bytes=payload_bytes
                    )
                    for kind, events, payload_bytes in size.kinds
                ],
                checkpoint_sequences=reader.checkpoint_sequences(),
                checkpoint_bytes=size.checkpoint_bytes,
            )
            if self._keeper is not None:
                answer.keep_samples_seconds = round(self._policy.samples_seconds)
                answer.keep_minutes_seconds = round(self._policy.minutes_seconds)
            return answer

    async def VerifyLog(
        self, request: log_service_pb2.VerifyLogRequest, context: Any
    ) -> log_service_pb2.VerifyLogResponse:
        with translated():
            report = await asyncio.to_thread(check, self._cluster.log.engine, self._path)
            return log_service_pb2.VerifyLogResponse(
                findings=report.findings,
                head_sequence=report.head_sequence,
                events=report.events,
                commits=report.commits,
                ranges=report.ranges,
            )

    async def CompactLog(
        self, request: log_service_pb2.CompactLogRequest, context: Any
    ) -> log_service_pb2.CompactLogResponse:
        with translated():
            if self._keeper is None:
                raise errors.NotNow("this master only reads a log: ask the one that runs the cluster")
            policy = self._asked(request)
            if not policy.samples_seconds <= policy.minutes_seconds:
                raise errors.InvalidRequest("samples cannot be kept longer than one of them a minute is")
            await self._keeper.checkpoint()
            removed = await self._keeper.compact(policy)
            return log_service_pb2.CompactLogResponse(
                removed_events=removed, compacted_sequence=self._cluster.log.mark()
            )

    def _asked(self, request: log_service_pb2.CompactLogRequest) -> Policy:
        own = self._policy
        return Policy(
            request.keep_samples_seconds if request.HasField("keep_samples_seconds") else own.samples_seconds,
            request.keep_minutes_seconds if request.HasField("keep_minutes_seconds") else own.minutes_seconds,
        )

    async def BackUpLog(
        self, request: log_service_pb2.BackUpLogRequest, context: Any
    ) -> AsyncIterator[log_service_pb2.BackUpLogResponse]:
        with translated(), tempfile.TemporaryDirectory(prefix="ullage-backup-") as folder:
            copy = Path(folder) / "events.db"
            await asyncio.to_thread(self._cluster.log.copy_to, copy)
            with copy.open("rb") as file:
                while content := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield log_service_pb2.BackUpLogResponse(content=content)
