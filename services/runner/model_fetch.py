"""A shard's part of a model, fetched from runners that have it: only its bytes, checked, resumed, and kept.

Rules this module lives by:
- What is on the disk is never fetched again, whatever broke meanwhile; each try goes on where the last one was.
- Room on the disk is looked at before anything is fetched.
- A source that gives nothing for its bound is left for the next one; when none gives anything, that is the failure.
"""

from __future__ import annotations

import asyncio
import shutil
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import structlog

from services import rpc
from services.clock import Clock
from services.model_folder import ModelFolderError, StoredFile
from services.runner.model_files import TURN_SECONDS
from services.runner.partial_model import (
    HEADER_BYTES_MAX,
    HEADER_LENGTH_BYTES,
    WEIGHTS_SUFFIX,
    Cut,
    PartialModel,
    Range,
    joined,
    tensor_ranges,
    without,
)
from ullage.v1 import dispatch_service_pb2, model_file_service_pb2, model_file_service_pb2_grpc, model_pb2

CHUNK_SECONDS: Final = 15.0
"""Without a chunk: the source is gone, or too slow to wait for."""

PIECE_BYTES: Final = 8 << 20
"""Asked for at once, so that many nodes that fetch from one take turns, and each gets on within a minute."""

KEEP_BYTES: Final = 32 << 20
"""After so many bytes the disk is waited for: at most this much is fetched twice."""

SPARE_BYTES: Final = 64 << 20
"""Room that is left on the disk for others."""

IDLE_TRIES_MAX: Final = 3
"""Rounds over all sources in which not one byte arrives."""

log = structlog.get_logger()

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes that will be."""


class FetchError(Exception):
    """The model's part cannot be had; str() says why and what to do."""


@dataclass
class _Fetch:
    """One shard's part on its way."""

    assignment: dispatch_service_pb2.Assignment
    folder: PartialModel
    progress: Progress
    files: tuple[StoredFile, ...] = ()
    needed: dict[str, list[Range]] = field(default_factory=dict)
    """Of every file; empty until that is known."""

    def done_bytes(self) -> int:
        return self.total_bytes() - sum(map(_size, self.missing().values()))

    def total_bytes(self) -> int:
        return sum(map(_size, self.needed.values()))

    def tell(self, unkept_bytes: int = 0) -> None:
        """Say how far it is, once that is known: whoever has 0 of 0 bytes is taken for one that fetches nothing."""
        if self.needed:
            self.progress(self.done_bytes() + unkept_bytes, self.total_bytes())

    def missing(self) -> dict[str, list[Range]]:
        missing = {name: without(ranges, self.folder.held(name)) for name, ranges in self.needed.items()}
        return {name: ranges for name, ranges in missing.items() if ranges}


class Fetcher:
    """Fetches for all the shards of one runner."""

    def __init__(self, node_id: str, models_dir: Path, clock: Clock) -> None:
        self._node_id = node_id
        self._models_dir = models_dir
        self._clock = clock
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By digest: two shards of one model share a folder."""
        self._queued: defaultdict[str, list[Progress]] = defaultdict(list)
        """Of the shards that wait for a folder, by digest: how another gets on is told to each."""

    async def fetch(self, assignment: dispatch_service_pb2.Assignment, progress: Progress) -> Path:
        """The folder with what the shard needs. Raises FetchError."""
        sources = [peer for peer in assignment.sources if peer.node_id != self._node_id and peer.address]
        if not sources:
            raise FetchError(
                f"{assignment.model.model_id} is not on this node, nor on another that is known: "
                "run `ullage models add` on one"
            )
        async with self._turn(assignment, progress) as tell:
            fetch = _Fetch(assignment, PartialModel(self._models_dir, assignment.model), tell)
            try:
                await asyncio.to_thread(fetch.folder.open)
                await self._from_any(fetch, sources)
            except OSError as error:
                raise FetchError(
                    f"the model cannot be kept in {self._models_dir}: {error.strerror or error}"
                ) from error
            return fetch.folder.path

    @asynccontextmanager
    async def _turn(self, assignment: dispatch_service_pb2.Assignment, progress: Progress) -> AsyncIterator[Progress]:
        """The model's folder to itself, and where to tell how far it is: to those also that wait for it meanwhile.

        Without that, the other ranks would give up on one that waits for longer than they let it stand still.
        """
        lock, queued = self._writing[assignment.model.digest], self._queued[assignment.model.digest]
        layers = assignment.model.layers[assignment.shard.first_layer : assignment.shard.end_layer]
        own_bytes = sum(layer.weight.stored_bytes for layer in layers)

        def of_another(done_bytes: int, total_bytes: int) -> None:
            progress(done_bytes, total_bytes + own_bytes)

        def tell(done_bytes: int, total_bytes: int) -> None:
            for each in (progress, *queued):
                each(done_bytes, total_bytes)

        queued.append(of_another)
        try:
            await lock.acquire()
        finally:
            queued.remove(of_another)
        try:
            yield tell
        finally:
            lock.release()

    async def _from_any(self, fetch: _Fetch, sources: Sequence[dispatch_service_pb2.Peer]) -> None:
        """Ask one source after the other, again and again while bytes arrive; no more one whose model is damaged."""
        idle_tries, said = 0, ""
        sources = list(sources)
        while sources and idle_tries < IDLE_TRIES_MAX:
            before = fetch.done_bytes()
            for source in tuple(sources):
                try:
                    await self._from(fetch, source)
                except (grpc.aio.AioRpcError, TimeoutError, _DamagedError, ModelFolderError) as error:
                    if isinstance(error, ModelFolderError):
                        sources.remove(source)
                    said = f"node {source.node_id} at {source.address}: {_words(error)}"
                    log.warning("model not fetched", model=fetch.assignment.model.model_id, source=said)
                else:
                    return
            idle_tries = 0 if fetch.done_bytes() > before else idle_tries + 1
            await self._clock.sleep(1.0)
        raise FetchError(
            f"{fetch.assignment.model.model_id} is not on this node and cannot be fetched; the last try was {said}"
        )

    async def _from(self, fetch: _Fetch, source: dispatch_service_pb2.Peer) -> None:
        async with rpc.channel(source.address) as channel:
            stub = model_file_service_pb2_grpc.ModelFileServiceStub(channel)
            await self._find_out(fetch, stub)
            await asyncio.to_thread(self._check_room, fetch)
            fetch.tell()
            for name, ranges in fetch.missing().items():
                for wanted in ranges:
                    await self._bring(fetch, stub, name, wanted)
        cut = Cut.of(fetch.assignment.model, fetch.assignment.shard)
        for file in fetch.files:
            await asyncio.to_thread(fetch.folder.check, file, cut)

    async def _find_out(self, fetch: _Fetch, stub: Any) -> None:
        """Learn which files there are, and which of their bytes are needed."""
        model = fetch.assignment.model
        asked = model_file_service_pb2.ListModelFilesRequest(model_id=model.model_id, digest=model.digest)
        answer = await stub.ListModelFiles(asked, timeout=CHUNK_SECONDS)
        fetch.files = tuple(
            StoredFile(Path(file.name).name, file.size_bytes, file.sha256, dict(file.tensor_crc32s))
            for file in answer.files
        )
        await asyncio.to_thread(fetch.folder.lay_out, fetch.files)
        cut = Cut.of(model, fetch.assignment.shard)
        needed: dict[str, list[Range]] = {}
        for file in fetch.files:
            if file.name.endswith(WEIGHTS_SUFFIX):
                try:
                    needed[file.name] = tensor_ranges(await self._header(fetch, stub, file), cut, file.size_bytes)
                except ModelFolderError:
                    # Held, it would be read again each time, also once the source's file is whole.
                    await asyncio.to_thread(fetch.folder.forget, file.name)
                    raise
            else:
                needed[file.name] = joined([Range(0, file.size_bytes)])
        fetch.needed = needed

    async def _header(self, fetch: _Fetch, stub: Any, file: StoredFile) -> bytes:
        length = Range(0, min(HEADER_LENGTH_BYTES, file.size_bytes))
        await self._bring_missing(fetch, stub, file.name, length)
        header_bytes = int.from_bytes(await asyncio.to_thread(fetch.folder.read, file.name, length), "little")
        if not 0 < header_bytes <= min(HEADER_BYTES_MAX, file.size_bytes - HEADER_LENGTH_BYTES):
            raise ModelFolderError(f"{file.name} does not begin like a safetensors file")
        whole = Range(0, HEADER_LENGTH_BYTES + header_bytes)
        await self._bring_missing(fetch, stub, file.name, whole)
        return await asyncio.to_thread(fetch.folder.read, file.name, whole)

    def _check_room(self, fetch: _Fetch) -> None:
        """Raise FetchError unless the disk takes what is missing."""
        missing_bytes = fetch.total_bytes() - fetch.done_bytes()
        free_bytes = shutil.disk_usage(self._models_dir).free
        if missing_bytes and missing_bytes + SPARE_BYTES > free_bytes:
            short_bytes = missing_bytes + SPARE_BYTES - free_bytes
            kept_bytes, kept_in = fetch.folder.others_bytes(), fetch.folder.path.parent
            kept = f" ({kept_bytes:,} are parts of other models in {kept_in}, and may go)" if kept_bytes else ""
            raise FetchError(
                f"{missing_bytes:,} bytes of {fetch.assignment.model.model_id} are to be fetched and the disk of its "
                f"models directory has {free_bytes:,} free: free {short_bytes:,} more{kept}, "
                "or choose another --models-dir"
            )

    async def _bring_missing(self, fetch: _Fetch, stub: Any, name: str, wanted: Range) -> None:
        for missing in without([wanted], fetch.folder.held(name)):
            await self._bring(fetch, stub, name, missing)

    async def _bring(self, fetch: _Fetch, stub: Any, name: str, wanted: Range) -> None:
        """Fetch a range; what of it has arrived is kept, however this ends, and told: a slow way is not a stuck one."""
        at, kept = wanted.begin, wanted.begin
        try:
            async with aclosing(_chunks(fetch.assignment.model, stub, name, wanted)) as chunks:
                async for data in chunks:
                    await asyncio.to_thread(fetch.folder.write, name, at, data)
                    at += len(data)
                    if at - kept >= KEEP_BYTES:
                        await asyncio.to_thread(fetch.folder.keep, name, Range(kept, at))
                        kept = at
                    fetch.tell(at - kept)
        finally:
            if at > kept:
                await asyncio.to_thread(fetch.folder.keep, name, Range(kept, at))
                fetch.tell()


async def _chunks(model: model_pb2.Model, stub: Any, name: str, wanted: Range) -> AsyncGenerator[bytes, None]:
    """The bytes of a range as they arrive, asked for piece by piece."""
    at = wanted.begin
    while at < wanted.end:
        piece_end = min(at + PIECE_BYTES, wanted.end)
        call = stub.FetchModelFile(
            model_file_service_pb2.FetchModelFileRequest(
                model_id=model.model_id, digest=model.digest, file_name=name, offset=at, length=piece_end - at
            )
        )
        # Others may be served first.
        bound_seconds = TURN_SECONDS + CHUNK_SECONDS
        try:
            while at < piece_end:
                async with asyncio.timeout(bound_seconds):
                    chunk = await call.read()
                data = _checked(chunk, piece_end - at)
                yield data
                at, bound_seconds = at + len(data), CHUNK_SECONDS
        except TimeoutError:
            raise TimeoutError(f"nothing arrived within {bound_seconds:g} s") from None
        finally:
            call.cancel()


class _DamagedError(Exception):
    """Bytes did not arrive as they were read."""


def _checked(chunk: Any, room_bytes: int) -> bytes:
    if chunk is grpc.aio.EOF:
        raise _DamagedError("it ended before all bytes were there")
    data: bytes = chunk.data
    if not 0 < len(data) <= room_bytes or zlib.crc32(data) != chunk.crc32:
        raise _DamagedError("a chunk arrived damaged")
    return data


def _size(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _words(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return str(error)
