"""A second machine on this one: a network namespace with a cable that can be cut, made by the test that needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pytest

COMMAND_SECONDS_MAX: Final = 60.0


@dataclass(frozen=True)
class FarMachine:
    """The namespace, and the near end of its cable."""

    namespace: str
    cable: str
    near_address: str
    far_address: str

    @property
    def command(self) -> tuple[str, ...]:
        """What runs a command over there."""
        return ("ip", "netns", "exec", self.namespace)

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        ip("link", "set", self.cable, "up")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=COMMAND_SECONDS_MAX)


@contextmanager
def far_machine() -> Iterator[FarMachine]:
    """A far machine, or the test is skipped where none can be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip (iproute2) and root")
    number = os.getpid()
    # Addresses of its own, as other tests may run on this machine.
    network = f"10.{number // 64 % 64 + 128}.{number % 64 + 128}"
    machine = FarMachine(f"ullage-{number}", f"ulla{number % 100_000}n", f"{network}.1", f"{network}.2")
    far_end = f"ulla{number % 100_000}f"
    try:
        ip("netns", "add", machine.namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", machine.cable, "type", "veth", "peer", "name", far_end)
        ip("link", "set", far_end, "netns", machine.namespace)
        ip("addr", "add", f"{machine.near_address}/30", "dev", machine.cable)
        ip("link", "set", machine.cable, "up")
        for arguments in (
            ("addr", "add", f"{machine.far_address}/30", "dev", far_end),
            ("link", "set", far_end, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", machine.namespace, *arguments)
        yield machine
    finally:
        # The cable goes with it.
        subprocess.run(["ip", "netns", "del", machine.namespace], check=False, timeout=COMMAND_SECONDS_MAX)
