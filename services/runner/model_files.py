"""ModelFileService: the bytes of the models on this runner's disk, for runners that lack them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from services import model_folder
from services.model_folder import ModelFolderError, StoredFile, manifest
from services.rpc import RpcError
from services.runner import models
from ullage.v1 import model_file_service_pb2, model_file_service_pb2_grpc

SERVICE: Final = "ullage.v1.ModelFileService"

CHUNK_BYTES: Final = 1 << 20

AT_ONCE_MAX: Final = 4
"""Files sent at once: more would only share the disk and the cable, which answers need too."""

TURN_SECONDS: Final = 30.0
"""For one of those to be over: whoever asks meanwhile is served in turn, as all ask for little at once."""


class ModelFileServicer(model_file_service_pb2_grpc.ModelFileServiceServicer):
    """ModelFileService over one models directory."""

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)

    async def ListModelFiles(
        self, request: model_file_service_pb2.ListModelFilesRequest, context: Any
    ) -> model_file_service_pb2.ListModelFilesResponse:
        _, files = await asyncio.to_thread(self._found, request.model_id, request.digest)
        return model_file_service_pb2.ListModelFilesResponse(
            files=[
                model_file_service_pb2.ModelFile(
                    name=file.name,
                    size_bytes=file.size_bytes,
                    sha256=file.sha256,
                    tensor_crc32s=file.tensor_crc32s,
                )
                for file in files
            ]
        )

    async def FetchModelFile(
        self, request: model_file_service_pb2.FetchModelFileRequest, context: Any
    ) -> AsyncIterator[model_file_service_pb2.FetchModelFileResponse]:
        folder, files = await asyncio.to_thread(self._found, request.model_id, request.digest)
        file = next((file for file in files if file.name == request.file_name), None)
        if file is None:
            raise _error(grpc.StatusCode.NOT_FOUND, f"{request.model_id} has no file {request.file_name!r}", "NO_FILE")
        if request.offset + request.length > file.size_bytes:
            raise _error(
                grpc.StatusCode.OUT_OF_RANGE,
                f"{file.name} has {file.size_bytes:,} bytes: there are none at {request.offset + request.length:,}",
                "NO_SUCH_BYTES",
            )
        await self._turn()
        try:
            async for chunk in _chunks(folder / file.name, request.offset, request.length):
                yield chunk
        finally:
            self._turns.release()

    async def _turn(self) -> None:
        """Wait until there is room for another file to be sent, those first that asked first. Raises RpcError."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            busy = f"{AT_ONCE_MAX} files have been under way here for {TURN_SECONDS:g} s: try again"
            raise _error(grpc.StatusCode.RESOURCE_EXHAUSTED, busy, "BUSY") from None

    def _found(self, model_id: str, digest: str) -> tuple[Path, tuple[StoredFile, ...]]:
        """The model's folder and its files. Raises RpcError."""
        try:
            folder = models.folder(self._models_dir, model_id)
            if not (folder / model_folder.MANIFEST_FILE).exists():
                raise _error(grpc.StatusCode.NOT_FOUND, f"{model_id} is not on this node", "NO_MODEL")
            model, files = manifest.read(folder)
            if model.digest != digest:
                raise ModelFolderError(f"{model_id} here has the digest {model.digest[:12]}, not {digest[:12]}")
            for file in files:
                if (folder / file.name).stat().st_size != file.size_bytes:
                    raise ModelFolderError(f"{file.name} is not whole here: run `ullage models add` again")
        except (ModelFolderError, OSError) as error:
            raise _error(grpc.StatusCode.FAILED_PRECONDITION, str(error), "OTHER_MODEL") from error
        return folder, files


async def _chunks(path: Path, offset: int, length: int) -> AsyncIterator[model_file_service_pb2.FetchModelFileResponse]:
    try:
        with await asyncio.to_thread(path.open, "rb") as file:
            file.seek(offset)
            while length > 0:
                data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, length))
                if not data:
                    raise _error(grpc.StatusCode.DATA_LOSS, f"{path.name} has become shorter", "FILE_CUT")
                length -= len(data)
                yield model_file_service_pb2.FetchModelFileResponse(data=data, crc32=zlib.crc32(data))
    except OSError as error:
        raise _error(
            grpc.StatusCode.DATA_LOSS, f"{path.name} cannot be read: {error.strerror or error}", "UNREADABLE"
        ) from error


def _error(code: grpc.StatusCode, message: str, reason: str) -> RpcError:
    return RpcError(code, message, reason=reason)
