"""How far the preparation of a model is: bars on a terminal's stderr, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from services.cli.output import errors_console


class Steps(Protocol):
    """What hears of progress."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """A step begins; the one before it is done. Without `total_bytes` nobody knows how long it takes."""
        ...

    def at(self, done_bytes: int) -> None:
        """So much of the step is done."""
        ...


class Silent:
    """Progress nobody looks at."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        pass

    def at(self, done_bytes: int) -> None:
        pass


class _SizeColumn(DownloadColumn):
    """Bytes done and in all, for steps that count bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["sized"] else Text()


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._total_bytes: int | None = None

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        self._finish()
        self._total_bytes = total_bytes
        self._task = self._progress.add_task(what, total=total_bytes, sized=total_bytes is not None)

    def at(self, done_bytes: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done_bytes)

    def _finish(self) -> None:
        if self._task is not None:
            total = 1 if self._total_bytes is None else self._total_bytes
            self._progress.update(self._task, total=total, completed=total)


@contextmanager
def shown() -> Iterator[Steps]:
    """Progress as bars, where stderr is a terminal."""
    console = errors_console()
    if not console.is_terminal:
        yield Silent()
        return
    columns = (TextColumn("{task.description:<12}"), BarColumn(), _SizeColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)
