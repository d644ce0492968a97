"""What is read of a shard's process."""

from __future__ import annotations

import os
import subprocess
import sys

from services.runner.process import reading_of


def test_a_process_that_has_given_its_memory_back_is_gone_though_it_is_still_there() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running = reading_of(child.pid)
    assert running is not None
    assert running.resident_bytes > 0

    child.kill()
    # It has ended, and nobody has taken note of that yet.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert reading_of(child.pid) is None

    child.communicate()
    assert reading_of(child.pid) is None
