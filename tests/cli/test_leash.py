import contextlib
import signal
import subprocess
import sys

import psutil

from services.cli.leash import held

HANG_SECONDS = 120
"""Much longer than a leash takes on any machine."""

SLEEPS = "import time; time.sleep(3600)"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
)


def python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)


def leash() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.cli.leash"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)


def test_what_was_started_and_not_seen_to_end_is_held() -> None:
    assert held(["+1\n", "+2\n", "-1\n", "+3\n"]) == {2, 3}


def test_when_the_pipe_closes_what_is_left_is_asked_to_stop_and_nothing_else() -> None:
    left, ended, foreign = (python(SLEEPS) for _ in range(3))
    try:
        with leash() as holder:
            assert holder.stdin is not None
            holder.stdin.write(f"+{left.pid}\n+{ended.pid}\n-{ended.pid}\n")
            holder.stdin.close()
            assert left.wait(timeout=HANG_SECONDS) == -signal.SIGTERM
        assert (ended.poll(), foreign.poll()) == (None, None)
    finally:
        for process in (left, ended, foreign):
            process.kill()
            process.communicate()


def test_what_does_not_stop_when_asked_is_killed() -> None:
    with python(IGNORES_SIGTERM) as stubborn:
        try:
            assert stubborn.stdout is not None
            stubborn.stdout.readline()
            with leash() as holder:
                assert holder.stdin is not None
                holder.stdin.write(f"+{stubborn.pid}\n")
                holder.stdin.close()
                assert stubborn.wait(timeout=HANG_SECONDS) == -signal.SIGKILL
        finally:
            stubborn.kill()


def test_the_leash_outlives_a_command_that_is_killed_and_ends_its_processes() -> None:
    command = (
        "import subprocess, sys, time\n"
        "leash = subprocess.Popen([sys.executable, '-m', 'services.cli.leash'], stdin=subprocess.PIPE, text=True,"
        " start_new_session=True)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])\n"
        "leash.stdin.write(f'+{child.pid}\\n'); leash.stdin.flush()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    with python(command) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    try:
        _, left = psutil.wait_procs([child], timeout=HANG_SECONDS)
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in left), "more than a zombie nobody waits for"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
