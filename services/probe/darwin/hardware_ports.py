"""What carries a Mac's interfaces: `networksetup -listallhardwareports`, since en0 may be Wi-Fi and en1 a cable.

    Hardware Port: Thunderbolt Bridge
    Device: bridge0
    Ethernet Address: 36:5a:12:00:00:00

Not run on hardware.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Final

from services.clock import Clock
from services.probe.failures import Failures
from ullage.v1 import node_pb2

COMMAND: Final = ("/usr/sbin/networksetup", "-listallhardwareports")
ANSWER_SECONDS_MAX: Final = 5.0
PERIOD_SECONDS: Final = 60.0
"""Adapters come and go with their cables."""

_PORT: Final = re.compile(r"^Hardware Port: (.{1,100})\nDevice: ([A-Za-z0-9]{1,15})$", re.MULTILINE)

_KINDS: Final = (
    ("wi-fi", node_pb2.INTERFACE_KIND_WIFI),
    ("airport", node_pb2.INTERFACE_KIND_WIFI),
    ("thunderbolt ethernet", node_pb2.INTERFACE_KIND_ETHERNET),
    ("thunderbolt", node_pb2.INTERFACE_KIND_THUNDERBOLT),
    ("ethernet", node_pb2.INTERFACE_KIND_ETHERNET),
    ("lan", node_pb2.INTERFACE_KIND_ETHERNET),
)
"""By a part of the port's name, the first that fits."""


def parse(text: str) -> dict[str, node_pb2.InterfaceKind.ValueType]:
    """The kind of each interface that is named, where its port's name tells. Never raises."""
    kinds = {}
    for port, name in _PORT.findall(text):
        kind = next((kind for part, kind in _KINDS if part in port.lower()), None)
        if kind is not None:
            kinds[name] = kind
    return kinds


class HardwarePorts:
    """Knows what carries this Mac's interfaces, from the first answer of the command on."""

    def __init__(self, clock: Clock, failures: Failures, command: Sequence[str] = COMMAND) -> None:
        self._clock = clock
        self._failures = failures
        self._command = command
        self._kinds: dict[str, node_pb2.InterfaceKind.ValueType] = {}

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Correct the kinds that were taken from names."""
        for interface in sample.interfaces:
            interface.kind = self._kinds.get(interface.name, interface.kind)

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            try:
                self._kinds = parse(await self._ask())
            except (OSError, RuntimeError) as error:  # RuntimeError where asyncio may start no thread to wait with.
                self._failures.add("networksetup", error)
            await self._clock.sleep(PERIOD_SECONDS)

    async def _ask(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        return output.decode("utf-8", "replace")
