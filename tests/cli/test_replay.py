"""`ullage replay` at a terminal: its keys stop the past, and move it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from services.cli.replay import READ_BYTES_MAX, _Keys

LOG: Final = Path(__file__).parents[1] / "recorded" / "logs" / "three_nodes.db"
SECONDS_MAX: Final = 180.0
LEFT, RIGHT, ESCAPE = "\x1b[D", "\x1b[C", "\x1b"


class Terminal:
    """A terminal in which a recorded log is played, slowly enough to stand still."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "services.cli", "replay", "--log", str(LOG), "--speed", "0.01"]
        environment = os.environ | {"COLUMNS": "160", "LINES": "50", "TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self._shown = ""

    def press(self, keys: str) -> None:
        self._shown = ""
        os.write(self._ours, keys.encode())

    def wait_for(self, position: int) -> None:
        """Return once a frame shows the past at this character of the bar, as the last so far."""
        deadline = time.monotonic() + SECONDS_MAX
        bars: list[str] = []
        while not bars or len(bars[-1]) != position:
            assert time.monotonic() < deadline, f"never at {position}: {[len(bar) for bar in bars]}"
            readable, _, _ = select.select([self._ours], [], [], 1.0)
            if readable:
                self._shown += os.read(self._ours, 65536).decode(errors="replace")
            bars = re.findall("(━*)─+  ", self._shown)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_keys_move_the_past_and_end_it(terminal: Terminal) -> None:
    terminal.wait_for(0)
    terminal.press(" ")  # However long the rest takes, time does not go on by itself.
    terminal.press(RIGHT * 8)  # In one go, as a key held down comes.
    terminal.wait_for(24)
    terminal.press(RIGHT)
    terminal.wait_for(27)
    terminal.press(ESCAPE + "x")  # Neither means anything, and neither is waited behind.
    terminal.wait_for(27)
    terminal.press(LEFT * 4)
    terminal.wait_for(15)
    terminal.press(" q")
    assert terminal.process.wait(SECONDS_MAX) == 0


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_a_key_held_down_while_a_frame_is_made_loses_none(ends: tuple[int, int]) -> None:
    count = READ_BYTES_MAX
    os.write(ends[1], (RIGHT * count).encode())
    keys = _Keys(ends[0])
    assert [keys.wait(0) for _ in range(count + 1)] == ["right"] * count + [None]


def test_a_key_that_comes_in_two_pieces_is_one(ends: tuple[int, int]) -> None:
    keys = _Keys(ends[0])
    pressed = []
    for piece in ("\x1b", "[", "Dq", ESCAPE, "q"):
        os.write(ends[1], piece.encode())
        pressed.append(keys.wait(0))
    assert pressed == [None, None, "left", "q", ESCAPE]
