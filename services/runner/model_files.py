"""ModelFileService: the bytes of the models on this runner's disk, for runners that lack them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import grpc

from services import model_folder
from services.model_folder import ModelFolderError, StoredFile, manifest
from services.model_folder.manifest import BLOCK_BYTES
from services.rpc import RpcError
from services.runner import models
from ullage.v1 import model_file_service_pb2, model_file_service_pb2_grpc

SERVICE: Final = "ullage.v1.ModelFileService"

AT_ONCE_MAX: Final = 4
"""Files sent at once: more would only share the disk and the cable, which answers need too."""


class ModelFileServicer(model_file_service_pb2_grpc.ModelFileServiceServicer):
    """ModelFileService over one models directory."""

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir
        self._sending = 0

    async def ListModelFiles(
        self, request: model_file_service_pb2.ListModelFilesRequest, context: Any
    ) -> model_file_service_pb2.ListModelFilesResponse:
        _, files = await asyncio.to_thread(self._found, request.model_id, request.digest)
        return model_file_service_pb2.ListModelFilesResponse(
            files=[
                model_file_service_pb2.ModelFile(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
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
        if self._sending >= AT_ONCE_MAX:
            raise _error(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{AT_ONCE_MAX} files are being fetched here: try again", "BUSY"
            )
        self._sending += 1
        try:
            async for data in _checked(folder / file.name, file, request.offset, request.offset + request.length):
                yield model_file_service_pb2.FetchModelFileResponse(data=data, crc32=zlib.crc32(data))
        finally:
            self._sending -= 1

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


async def _checked(path: Path, file: StoredFile, begin: int, end: int) -> AsyncIterator[bytes]:
    """The bytes [begin, end) of the file, block by block, each as it was when the model was prepared."""
    try:
        with await asyncio.to_thread(path.open, "rb") as opened:
            while begin < end:
                number, skipped = divmod(begin, BLOCK_BYTES)
                block = await asyncio.to_thread(_block, opened, number)
                if len(block) <= skipped:
                    raise _error(grpc.StatusCode.DATA_LOSS, f"{path.name} has become shorter", "FILE_CUT")
                if file.block_crc32s and (zlib.crc32(block),) != file.block_crc32s[number : number + 1]:
                    raise _error(
                        grpc.StatusCode.DATA_LOSS,
                        f"{path.name} is damaged after byte {number * BLOCK_BYTES:,}: run `ullage models add` again",
                        "DAMAGED",
                    )
                data = block[skipped : skipped + end - begin]
                begin += len(data)
                yield data
    except OSError as error:
        raise _error(
            grpc.StatusCode.DATA_LOSS, f"{path.name} cannot be read: {error.strerror or error}", "UNREADABLE"
        ) from error


def _block(file: BinaryIO, number: int) -> bytes:
    file.seek(number * BLOCK_BYTES)
    return file.read(BLOCK_BYTES)


def _error(code: grpc.StatusCode, message: str, reason: str) -> RpcError:
    return RpcError(code, message, reason=reason)
