"""The command line, run against a master of canned answers behind a real gRPC server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import pytest

from services.cli.__main__ import run
from tests.cli.canned import CannedMaster
from ullage.v1 import event_service_pb2_grpc, placement_service_pb2_grpc

Serve = Callable[[Callable[[grpc.Server], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A function that serves what a `register` function adds, and returns the address."""
    servers: list[grpc.Server] = []

    def start(register: Callable[[grpc.Server], None]) -> str:
        server = grpc.server(ThreadPoolExecutor(4))
        register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.fixture
def master() -> CannedMaster:
    return CannedMaster()  # type: ignore[abstract]  # the calls no command makes


@pytest.fixture
def master_address(serve: Serve, master: CannedMaster) -> str:
    def register(server: grpc.Server) -> None:
        event_service_pb2_grpc.add_EventServiceServicer_to_server(master, server)
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(master, server)

    return serve(register)


class Said(NamedTuple):
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


Ullage = Callable[..., Said]


@pytest.fixture
def ullage(capsys: pytest.CaptureFixture[str], master_address: str, monkeypatch: pytest.MonkeyPatch) -> Ullage:
    """The command line, with the canned master as its master."""
    monkeypatch.setenv("ULLAGE_MASTER", master_address)

    def command(*arguments: str) -> Said:
        code = run(arguments)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return command
