"""An instance on its way to RUNNING, as people watch it: a bar for each shard, or a line for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from services.cli import tables
from services.cli.output import errors_console
from ullage.v1 import model_pb2

Show = Callable[[model_pb2.Instance], None]


@contextmanager
def shown(instance: model_pb2.Instance) -> Iterator[Show]:
    """A function to call with each new view of `instance`; draws to stderr."""
    console = errors_console()
    labels = _labels(instance)
    if not console.is_terminal:
        yield _lines(console, labels)
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[phase]}"),
        console=console,
    )
    with bars:
        yield _bars(bars, labels)


def failure_text(instance: model_pb2.Instance) -> str:
    """Why an instance failed, with the last lines of the process that did."""
    lines = [line for status in instance.shards for line in status.failure.stderr_lines]
    return "\n  ".join([instance.failure or f"{instance.instance_id} failed", *lines])


def _labels(instance: model_pb2.Instance) -> list[str]:
    by_id = {budget.node_id: budget for budget in instance.placement.nodes}
    return [
        f"rank {shard.rank} on {by_id[shard.node_id].friendly_name if shard.node_id in by_id else shard.node_id}"
        for shard in instance.placement.shards
    ]


def _lines(console: Console, labels: list[str]) -> Show:
    seen: dict[int, model_pb2.ShardPhase.ValueType] = {}

    def show(instance: model_pb2.Instance) -> None:
        for label, status in zip(labels, instance.shards, strict=False):
            if seen.get(status.rank) != status.phase:
                seen[status.rank] = status.phase
                console.print(f"{label}: {tables.phase_name(status.phase)}", markup=False)

    return show


def _bars(bars: Progress, labels: list[str]) -> Show:
    tasks: list[TaskID] = [bars.add_task(label, total=None, phase="ASSIGNED") for label in labels]

    def show(instance: model_pb2.Instance) -> None:
        for task, status in zip(tasks, instance.shards, strict=False):
            bars.update(task, phase=tables.phase_name(status.phase))
            if status.HasField("total_bytes"):
                bars.update(task, completed=status.done_bytes, total=status.total_bytes)
            elif status.phase == model_pb2.SHARD_PHASE_RUNNING:
                bars.update(task, completed=bars.tasks[task].total)

    return show
