"""`ullage replay`: the cluster's past, moving, in the terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from services.cli import connection, offline, tables
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, console, print_json
from services.cli.why import DECIDE_SECONDS_MAX
from ullage.v1 import event_service_pb2, model_pb2, state_pb2

try:
    import termios
    import tty
except ImportError:
    _KEYS = False  # Windows has neither: there it plays without keys.
else:
    _KEYS = True

SPEED_MAX: Final = 1e9
"""A year in a thirtieth of a second."""

FRAME_SECONDS: Final = 0.25
BAR_CHARACTERS: Final = 60
JUMP_SHARE: Final = 0.05
"""How much of the whole an arrow key goes."""

READ_BYTES_MAX: Final = 64
"""Enough for whatever is pressed between two frames."""

_KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_BEGUN: Final = re.compile(r"\x1b([\[O][0-9;]*)?\Z")
"""A key of which the rest may still come: a read ends anywhere, and a key held down fills it while a frame is made."""

_ARROWS: Final = {"\x1b[D": "left", "\x1b[C": "right", "\x1bOD": "left", "\x1bOC": "right"}
"""What terminals send for an arrow, in either of their modes."""


def replay(
    *,
    first: Annotated[int, typer.Option("--from", metavar="SEQ", min=1, help="From this sequence on.")] = 1,
    last: Annotated[int | None, typer.Option("--to", metavar="SEQ", min=1, help="Up to this one; else to now.")] = None,
    speed: Annotated[float, typer.Option(min=0.01, help="So many seconds of the past in one.")] = 10.0,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Watch the past move. Space stops it, the arrows go back and on, q ends it.

    With --json each state on the way is one line.

    Example: `ullage replay --log events.db --speed 60`
    """
    if not speed <= SPEED_MAX:
        raise CommandError(f"a speed is a number up to {SPEED_MAX:g}", ExitCode.USAGE)
    with offline.master_or_log(master, log) as there:
        begin_ns, end_ns = _time_ns(there, first), _time_ns(there, last)
        if last is not None and last < first:
            raise CommandError(f"{last} is before {first}: give --from the earlier sequence", ExitCode.USAGE)
        if end_ns < begin_ns:
            raise CommandError(
                "the master's clock was set back in between: give --from a sequence after that, or --to one before it"
            )
        if as_json:
            for at_ns in _moments(_Keys(None), begin_ns, end_ns, speed):
                print_json(_state(there, at_ns), one_line=True)
            return
        with _keys() as keys, Live(console=console(), auto_refresh=False) as live:
            for at_ns in _moments(keys, begin_ns, end_ns, speed):
                live.update(_frame(_state(there, at_ns), begin_ns, end_ns, at_ns), refresh=True)


def _time_ns(master: Master, sequence: int | None) -> int:
    """When a sequence was recorded; the last one where none is given."""
    request = event_service_pb2.ListEventsRequest(page_size=1, from_sequence=sequence or 0, descending=sequence is None)
    found = master.events.ListEvents(request, timeout=CALL_SECONDS_MAX).events
    if not found:
        raise CommandError(f"there is no sequence {sequence or 1}: see `ullage events`", ExitCode.NOT_FOUND)
    return found[0].recorded_at.ToNanoseconds()


def _state(master: Master, at_ns: int) -> state_pb2.ClusterState:
    request = event_service_pb2.GetStateRequest()
    request.at_time.FromNanoseconds(at_ns)
    return master.events.GetState(request, timeout=DECIDE_SECONDS_MAX).state


def _moments(keys: _Keys, begin_ns: int, end_ns: int, speed: float) -> Iterator[int]:
    """The moments to show, as time goes on and keys are pressed; the end is the last of them."""
    at_ns, stopped, jump_ns = begin_ns, False, round((end_ns - begin_ns) * JUMP_SHARE)
    while True:
        yield at_ns
        if at_ns >= end_ns and not stopped:
            return
        shown = time.monotonic()
        key = keys.wait(FRAME_SECONDS)
        match key:
            case "q":
                return
            case " ":
                stopped = not stopped
            case "left":
                at_ns -= jump_ns
            case "right":
                at_ns += jump_ns
            case _:
                pass  # Time goes on.
        if not stopped:
            at_ns += round((time.monotonic() - shown) * 1e9 * speed)
        at_ns = min(max(at_ns, begin_ns), end_ns)


def _frame(state: state_pb2.ClusterState, begin_ns: int, end_ns: int, at_ns: int) -> Group:
    done = round(BAR_CHARACTERS * (at_ns - begin_ns) / max(1, end_ns - begin_ns))
    recorded_at = state.recorded_at.ToDatetime().isoformat(sep=" ", timespec="seconds")
    bar = Text(f"{'━' * done}{'─' * (BAR_CHARACTERS - done)}  {recorded_at}Z  sequence {state.sequence}\n")
    shown = [one for one in state.instances if one.state != model_pb2.INSTANCE_STATE_RELEASED]
    if not shown:
        return Group(bar, tables.nodes(state))
    return Group(bar, tables.nodes(state), Text(), tables.instances(state, shown))


class _Keys:
    """Keys as they are pressed; none where nobody can press any."""

    def __init__(self, file: int | None) -> None:
        """`file` is the terminal's descriptor, None where there is none."""
        self._file = file
        self._pressed: deque[str] = deque()
        self._begun = ""

    def wait(self, seconds: float) -> str | None:
        """The key pressed within `seconds`, by its name; None when there was none."""
        if not self._pressed:
            self._read(seconds)
        if not self._pressed:
            return None
        key = self._pressed.popleft()
        return _ARROWS.get(key, key)

    def _read(self, seconds: float) -> None:
        if self._file is None:
            time.sleep(seconds)
            return
        readable, _, _ = select.select([self._file], [], [], seconds)
        if not readable:
            return
        # Past Python's own buffer, which select would not see into.
        said = os.read(self._file, READ_BYTES_MAX).decode(errors="replace")
        if not said:
            self._file = None  # The terminal has gone.
        keys = self._begun + said
        begun = _BEGUN.search(keys)
        whole, self._begun = (keys, "") if begun is None else (keys[: begun.start()], begun[0])
        self._pressed += _KEY.findall(whole)


@contextmanager
def _keys() -> Iterator[_Keys]:
    """The keyboard, a key at a time, where there is one."""
    if not _KEYS or not sys.stdin.isatty():
        yield _Keys(None)
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    try:
        yield _Keys(file)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
