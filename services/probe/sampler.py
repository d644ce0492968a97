"""Where readings come from: one sampler for each operating system, and one source for each kind of part."""

from __future__ import annotations

from typing import Protocol

from services.probe.reading import Reading
from ullage.v1 import node_pb2


class Sampler(Protocol):
    """Reads the memory of one machine."""

    def read(self) -> Reading:
        """The memory now, within microseconds. Never raises: what the OS does not say is absent."""
        ...


class SystemSource(Protocol):
    """Knows something of a machine's parts that psutil does not."""

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Set what it knows in `sample`, at once, and leave the rest as it is. Never raises."""
        ...
