"""The shard's process: `python -m services.runner.shard`, started by a runner for one shard.

It serves on a unix socket and ends when its stdin closes, so that it never outlives its runner. With
--describe it says what shards of this machine compute on, as one JSON object, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

import psutil
import structlog

from services import logs
from services.runner.shard import blas

STOP_SECONDS_MAX: Final = 1.0
"""How long an orderly end may take; after it the process ends anyway, for it has nothing to save."""

log = structlog.get_logger()


def main() -> None:
    """Run as the arguments say."""
    arguments = _arguments()
    logs.configure("shard")
    # Before anything imports MLX: see blas.py.
    loaded = blas.load(arguments.threads)
    if arguments.describe:
        json.dump(asyncio.run(_description(arguments, loaded)), sys.stdout)
        print()
        return
    structlog.contextvars.bind_contextvars(instance=arguments.instance, rank=arguments.rank)
    asyncio.run(_serve(arguments, loaded))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.runner.shard", description=__doc__)
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--socket", type=Path, metavar="PATH", help="where to serve")
    parser.add_argument("--instance", metavar="ID")
    parser.add_argument("--rank", type=int, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a matrix product")
    parser.add_argument("--weights", choices=("auto", "float32", "stored"), default="auto")
    arguments = parser.parse_args()
    if arguments.threads < 1:
        parser.error(f"--threads is {arguments.threads}: it must be at least 1")
    if not arguments.describe and None in (arguments.socket, arguments.instance, arguments.rank):
        parser.error("--socket, --instance and --rank are needed")
    return arguments


async def _serve(arguments: argparse.Namespace, loaded: blas.Loaded) -> None:
    # Imports MLX, so not before blas.load.
    from services.runner.shard.process import Process  # noqa: PLC0415 - MLX comes after the BLAS

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _stop_with_stdin(loop, stop)
    process = Process(arguments.instance, arguments.rank, arguments.weights, loaded)
    await process.start(arguments.socket)
    await stop.wait()
    # A step may hold the MLX thread for long, and an interpreter waits for its threads.
    loop.call_later(STOP_SECONDS_MAX, os._exit, 0)
    await process.stop()
    os._exit(0)


def _stop_with_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    def wait() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


async def _description(arguments: argparse.Namespace, loaded: blas.Loaded) -> dict[str, Any]:
    """What a runner says of its shards.

    `shard_overhead_bytes` is what this process holds, being one without layers, and the freed buffers MLX may
    keep once there are some: no reading before the first step shows these.
    """
    from services.runner.shard import device, speed  # noqa: PLC0415 - imports MLX, so not before blas.load
    from services.runner.shard.process import Process  # noqa: PLC0415 - MLX comes after the BLAS

    process = Process("describe", 0, arguments.weights, loaded)
    with tempfile.TemporaryDirectory() as folder:
        await process.start(Path(folder, "socket"))
        here = device.this_device()
        described = {
            "device": here.kind,
            "device_name": here.name,
            "weight_form": here.weight_form(arguments.weights),
            "compute_element_bytes": here.compute_element_bytes,
            "shard_overhead_bytes": psutil.Process().memory_info().rss + device.CACHE_BYTES_MAX,
            "blas": process.blas_name,
            "device_limit_bytes": here.limit_bytes,
            "can_hold_as_stored": arguments.weights == "auto" and here.weight_form("auto") != "stored",
        }
        await process.stop()
    # After the overhead was read: this takes memory that a shard does not.
    described |= speed.measured(here.compute_element_bytes)._asdict()
    return {name: value for name, value in described.items() if value is not None}


if __name__ == "__main__":
    main()
