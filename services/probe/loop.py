"""The probe's beat: memory every period, the system more seldom, each told to the master and kept as latest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from services.clock import Clock
from services.probe.estimator import Override, estimate
from services.probe.latest import Latest
from services.probe.machine import Machine
from services.probe.memory_sample import memory_sample
from services.probe.pressure import Verdict, judge
from services.probe.reporter import Reporter
from services.probe.system import SystemSampler
from ullage.v1 import event_pb2, node_pb2

PERIOD_SECONDS_MIN: Final = 0.1
PERIOD_SECONDS_MAX: Final = 60.0
"""A master's wish is followed within these."""

log = structlog.get_logger()


class Loop:
    """Reads inline on the event loop: a thread would cost more than the reading."""

    def __init__(
        self,
        *,
        machine: Machine,
        system: SystemSampler,
        override: Override | None,
        node_id: str,
        reporter: Reporter,
        latest: Latest,
        clock: Clock,
        period_s: float,
        system_period_s: float,
        host_name: Callable[[], str] | None = None,
    ) -> None:
        """`host_name` is asked what the node goes by, which may change; None where somebody named it."""
        self._machine = machine
        self._system = system
        self._override = override
        self._node_id = node_id
        self._reporter = reporter
        self._latest = latest
        self._clock = clock
        self._period_s = period_s
        self._system_period_s = system_period_s
        self._host_name = host_name
        self._verdict: Verdict | None = None

    async def run(self) -> None:
        """Sample until cancelled."""
        due_s = system_due_s = self._clock.monotonic()
        while True:
            memory = self.take_memory()
            if self._clock.monotonic() >= system_due_s:
                self.take_system(memory)
                system_due_s += self._system_period_s
            now_s = self._clock.monotonic()
            # Beats that were missed, asleep or stopped, are not made up for.
            due_s = max(due_s + self._current_period_s(), now_s)
            system_due_s = max(system_due_s, now_s - self._system_period_s)
            await self._clock.sleep(due_s - now_s)

    def take_memory(self) -> node_pb2.MemorySample:
        """Read the memory, judge it, and report it."""
        reading = self._machine.read()
        verdict = judge(self._verdict, reading, self._clock.monotonic())
        estimated = estimate(reading, verdict.level, self._override)
        sample = memory_sample(reading, verdict, estimated, self._clock.now_ns())
        self._log_level(verdict)
        self._verdict = verdict
        self._latest.publish(sample)
        fact = event_pb2.MemorySampled(node_id=self._node_id, sample=sample)
        self._reporter.offer(event_pb2.Fact(memory_sampled=fact))
        return sample

    def take_system(self, memory: node_pb2.MemorySample) -> None:
        """Read the rest of the system around `memory`, and report it; the node's name too, where that has changed."""
        if self._host_name is not None:
            self._reporter.rename(self._host_name())
        sample = self._system.read(memory)
        self._latest.system = sample
        fact = event_pb2.SystemSampled(node_id=self._node_id, sample=sample)
        self._reporter.offer(event_pb2.Fact(system_sampled=fact))

    def _current_period_s(self) -> float:
        wished = self._reporter.memory_period_s
        return self._period_s if wished is None else min(max(wished, PERIOD_SECONDS_MIN), PERIOD_SECONDS_MAX)

    def _log_level(self, verdict: Verdict) -> None:
        if self._verdict is not None and self._verdict.level == verdict.level:
            return
        level = node_pb2.PressureLevel.Name(verdict.level).removeprefix("PRESSURE_LEVEL_")
        reasons = "; ".join(reason.detail for reason in verdict.reasons)
        log.info("memory pressure", pressure=level, reasons=reasons or None)
