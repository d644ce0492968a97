"""The whole path here: three nodes, a model whose context fits on none of them alone, and an answer from all three.

`python -m examples.demo`, or `make demo`. It types what a person would: each command is printed, then run. The model
is kept in .cache/models of the checkout; everything else lives in a folder that is gone afterwards.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
ULLAGE: Final = (sys.executable, "-m", "services.cli")

MODEL: Final = "smollm2-135m"
CONTEXT_TOKENS: Final = "8192"
"""All that the model takes: its cache is then the larger part, however small the weights are held."""
NODE_MEMORY: Final = "600MiB"
"""Less than the model with its cache and a shard's process take on one node, and enough on three."""

PROMPT: Final = "Write two sentences about the sea."
TOLD_KINDS: Final = (
    "model_registered",
    "instance_placed",
    "shard_status_changed",
    "generation_started",
    "generation_finished",
)

CRITICAL: Final = "PRESSURE_LEVEL_CRITICAL"
REFUSED_EXIT_CODE: Final = 3
CALM_SECONDS_MAX: Final = 120.0
START_SECONDS_MAX: Final = 360.0
"""More than `ullage up` itself gives its services, as it says which of them was slow."""

COMMAND_SECONDS_MAX: Final = 600.0
STOP_SECONDS_MAX: Final = 60.0
LOG_TAIL_LINES: Final = 30


class DemoError(Exception):
    """A step did not do what it should; str() says which."""


def main() -> int:
    """Run every step; the exit code is 0 when all did what they should."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ullage-demo-") as folder:
        log = Path(folder) / "up.log"
        try:
            with cluster(Path(folder), log) as environment:
                steps(environment)
        except DemoError as error:
            print(f"\nThe demo failed: {error}", file=sys.stderr)
            tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:] if log.exists() else []
            print("\n".join(["The last lines of `ullage up`:", *tail]), file=sys.stderr)
            return 1
    say(f"Everything is stopped. That took {time.monotonic() - started:.0f} s.")
    return 0


def steps(environment: dict[str, str]) -> None:
    """What the demo shows, once the cluster is up."""
    say("A model for it, fetched and converted the first time.")
    ullage(environment, "models", "add", MODEL)
    await_calm(environment)
    say("With its whole context it fits on no node alone; the refusal says what is missing.")
    alone = ("place", MODEL, "--context", CONTEXT_TOKENS, "--max-nodes", "1", "--dry-run")
    ullage(environment, *alone, exit_codes=(REFUSED_EXIT_CODE,))
    say("Over all three it does.")
    place(environment)
    say("A question to all of them together.")
    ullage(environment, "generate", MODEL, PROMPT, "--max-tokens", "64")
    say("What happened is in the log.")
    kinds = [part for kind in TOLD_KINDS for part in ("--kind", kind)]
    ullage(environment, "events", "--limit", "16", *kinds)


@contextmanager
def cluster(folder: Path, log: Path) -> Iterator[dict[str, str]]:
    """A master and three nodes; gives the environment in which commands find them, and stops them at the end."""
    environment = {
        **os.environ,
        "ULLAGE_STATE_DIR": str(folder / "state"),
        "ULLAGE_MODELS_DIR": str(ROOT / ".cache" / "models"),
    }
    say(f"A master and three nodes on this machine, {NODE_MEMORY} each.")
    arguments = ("up", "--nodes", "3", "--memory", NODE_MEMORY, "--listen", "127.0.0.1:0")
    show(*arguments)
    with log.open("wb") as stderr:
        up = subprocess.Popen(
            [*ULLAGE, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            environment["ULLAGE_MASTER"] = master_address(up)
            yield environment
            say("Ctrl-C to `ullage up`.")
            stop(up)
        finally:
            if up.poll() is None:
                stop(up)


def master_address(up: subprocess.Popen[str]) -> str:
    """Where the master listens, from the first line `ullage up` prints, which is shown with the table after it."""
    if up.stdout is None:
        raise DemoError("`ullage up` has no output to read")
    timer = threading.Timer(START_SECONDS_MAX, up.kill)
    timer.start()
    first = up.stdout.readline()
    timer.cancel()
    found = re.match(r"master at (\S+),", first)
    if found is None:
        raise DemoError(f"`ullage up` did not start within {START_SECONDS_MAX:.0f} s, or said why not below")
    print(first, end="")
    for line in up.stdout:
        if line.startswith("In another terminal"):
            break
        print(line, end="")
    return found[1]


def place(environment: dict[str, str]) -> None:
    """Place the model, again where pressure came up after all since it was looked for."""
    deadline = time.monotonic() + CALM_SECONDS_MAX
    while True:
        await_calm(environment)
        arguments = ("place", MODEL, "--context", CONTEXT_TOKENS)
        code = ullage(environment, *arguments, exit_codes=(0, REFUSED_EXIT_CODE))
        if code == 0:
            return
        if CRITICAL not in state_json(environment) or time.monotonic() > deadline:
            raise DemoError("the model was refused: see above")


def ullage(environment: dict[str, str], *arguments: str, exit_codes: tuple[int, ...] = (0,)) -> int:
    """Show a command, run it, and return its exit code. Raises DemoError when that is none of `exit_codes`."""
    show(*arguments)
    try:
        code = subprocess.run(
            [*ULLAGE, *arguments], cwd=ROOT, env=environment, check=False, timeout=COMMAND_SECONDS_MAX
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"`ullage {arguments[0]}` took longer than {COMMAND_SECONDS_MAX:.0f} s") from error
    if code not in exit_codes:
        raise DemoError(f"`ullage {arguments[0]}` ended with exit code {code}")
    return code


def await_calm(environment: dict[str, str]) -> None:
    """Wait while a node is under CRITICAL pressure: nothing is placed there, and starting up may have caused it."""
    deadline = time.monotonic() + CALM_SECONDS_MAX
    told = False
    while CRITICAL in state_json(environment):
        if time.monotonic() > deadline:
            raise DemoError("this machine's memory pressure stays CRITICAL: close something and try again")
        if not told:
            say("This machine is hard pressed for memory at the moment; waiting until it is calmer.")
            told = True
        time.sleep(1.0)


def state_json(environment: dict[str, str]) -> str:
    """The nodes' latest readings, as `ullage state --json` prints them."""
    done = subprocess.run(
        [*ULLAGE, "state", "--json"],
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise DemoError(f"`ullage state` ended with exit code {done.returncode}")
    return done.stdout


def stop(up: subprocess.Popen[str]) -> None:
    """Ask `ullage up` to stop, as Ctrl-C does. Raises DemoError when it does not end well."""
    up.send_signal(signal.SIGINT)
    try:
        code = up.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired as error:
        # Its services end with it all the same.
        up.kill()
        raise DemoError(f"`ullage up` did not stop within {STOP_SECONDS_MAX:.0f} s") from error
    if code != 0:
        raise DemoError(f"`ullage up` ended with exit code {code}")


def show(*arguments: str) -> None:
    """Print a command as a person would type it."""
    print(f"$ {shlex.join(('ullage', *arguments))}", flush=True)


def say(what: str) -> None:
    """Print what comes next."""
    print(f"\n{what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
