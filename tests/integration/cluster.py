"""A cluster of real processes on loopback, started and asked through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from services.cli.output import message_json
from ullage.v1 import event_service_pb2, event_service_pb2_grpc

ROOT: Final = Path(__file__).resolve().parents[2]
ULLAGE: Final = (sys.executable, "-m", "services.cli")
RECORDED: Final = ROOT / "tests" / "recorded" / "proc"
HANG_SECONDS: Final = 180.0
"""For whatever comes soon on a machine of its own, and later on one that is shared: more would be a hang."""

COMMAND_SECONDS_MAX: Final = 600.0
"""For one command, which may wait for a model to be loaded."""

PATIENT: Final[Mapping[str, str]] = {
    "ULLAGE_SUSPECT_AFTER_MS": "30000",
    "ULLAGE_LOST_AFTER_MS": "60000",
    "ULLAGE_RUNNER_LOST_AFTER_MS": "60000",
    "ULLAGE_STUCK_AFTER_MS": "60000",
    "ULLAGE_ANSWER_WITHIN_MS": "60000",
}
"""Services that do not give up one which this machine does not let run for some seconds."""

IMPATIENT: Final[Mapping[str, str]] = {}
"""As people start them."""

T = TypeVar("T")


def eventually(what: str, ask: Callable[[], T | None], *, seconds: float = HANG_SECONDS) -> T:
    """What `ask` answers once that is true-ish. Fails when it is not within the bound."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)


def ullage(
    *arguments: str, environment: dict[str, str] | None = None, code: int = 0, timeout: float = COMMAND_SECONDS_MAX
) -> subprocess.CompletedProcess[str]:
    """One command, which must end with `code`."""
    done = subprocess.run(
        [*ULLAGE, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, f"ullage {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@dataclass
class Cluster:
    """A master and nodes, each process apart, so that a test can kill any of them."""

    folder: Path
    models_dir: Path
    bounds: Mapping[str, str] = field(default_factory=lambda: PATIENT)
    """How long its services wait for each other, as environment variables."""
    address: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What makes commands find this cluster."""
        return {"ULLAGE_MASTER": self.address, "ULLAGE_MODELS_DIR": str(self.models_dir)}

    @property
    def log_path(self) -> Path:
        return self.folder / "master" / "master" / "events.db"

    def start_master(self, *options: str, listen: str = "127.0.0.1:0") -> None:
        state_dir = str(self.folder / "master")
        self.address = self._start("master", "master", "--listen", listen, "--state-dir", state_dir, *options)

    def start_probe(self, name: str, *options: str, recorded: str = "normal", prefix: Sequence[str] = ()) -> str:
        """A probe that reads a recorded machine, so that the pressure of this one decides no test."""
        arguments = ("--name", name, *self._node_options(name), "--root", str(RECORDED / recorded), *options)
        return self._start(f"{name}-probe", "probe", *arguments, prefix=prefix)

    def start_runner(self, name: str, *options: str, prefix: Sequence[str] = ()) -> str:
        models = ("--models-dir", str(self.models_dir), "--threads", "1")
        return self._start(f"{name}-runner", "runner", *self._node_options(name), *models, *options, prefix=prefix)

    def start_nodes(self, names: Sequence[str], *, memory: str) -> None:
        """Start probes and runners, and wait until the master knows them all."""
        for name in names:
            self.start_probe(name, "--memory", memory)
            self.start_runner(name)
        self.wait_until_known(names)

    def wait_until_known(self, names: Sequence[str]) -> None:
        def known() -> bool:
            nodes = self.state()["state"]["nodes"]
            ready = {one["identity"].get("friendly_name") for one in nodes if "memory" in one and "runner" in one}
            return set(names) <= ready

        eventually(f"the master knows {', '.join(names)}", known)

    def _node_options(self, name: str) -> tuple[str, ...]:
        return ("--master", self.address, "--listen", "127.0.0.1:0", "--state-dir", str(self.folder / name))

    def _start(self, label: str, *arguments: str, prefix: Sequence[str] = ()) -> str:
        """Start a service, by the command in `prefix` if there is one, and return its address once it listens."""
        ready_file = self.folder / f"{label}.ready"
        ready_file.unlink(missing_ok=True)
        with self.log_of(label).open("ab") as stderr:
            process = subprocess.Popen(
                [*prefix, *ULLAGE, *arguments, "--ready-file", str(ready_file)],
                cwd=ROOT,
                env={**self.bounds, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.processes[label] = process

        def ready() -> bool:
            assert process.poll() is None, f"{label} ended: {self.log_of(label).read_text()}"
            return ready_file.exists()

        eventually(f"{label} listens", ready)
        return ready_file.read_text().strip()

    def log_of(self, label: str) -> Path:
        return self.folder / f"{label}.log"

    def ullage(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """One command, asked of this cluster."""
        return ullage(*arguments, environment=self.environment, code=code)

    def ask(self, *arguments: str) -> Any:
        """What a command answers with --json."""
        return json.loads(self.ullage(*arguments, "--json").stdout)

    def refused(self, *arguments: str, code: int) -> dict[str, Any]:
        """The error a command ends with."""
        said = self.ullage(*arguments, "--json", code=code).stderr
        error: dict[str, Any] = json.loads(said.splitlines()[-1])["error"]
        return error

    def state(self) -> Any:
        """GetState's answer now, as JSON; asked directly, since tests poll it."""
        with grpc.insecure_channel(self.address) as channel:
            events = event_service_pb2_grpc.EventServiceStub(channel)
            answer = events.GetState(event_service_pb2.GetStateRequest(), timeout=HANG_SECONDS, wait_for_ready=True)
        return json.loads(message_json(answer))

    def runs(self, instance_id: str) -> bool:
        instances = {one["instance_id"]: one["state"] for one in self.state()["state"]["instances"]}
        return bool(instances[instance_id] == "INSTANCE_STATE_RUNNING")

    def runner_of(self, node_id: str) -> str:
        """Where a node's runner listens."""
        nodes = self.state()["state"]["nodes"]
        found: str = next(one["runner"]["address"] for one in nodes if one["identity"]["node_id"] == node_id)
        return found

    def node_id(self, name: str) -> str:
        nodes = self.state()["state"]["nodes"]
        found: str = next(one["identity"]["node_id"] for one in nodes if one["identity"].get("friendly_name") == name)
        return found

    def generate(self, model: str, prompt: str, *options: str) -> Any:
        return self.ask("generate", model, prompt, *options)

    def kill(self, label: str) -> None:
        """kill -9."""
        process = self.processes.pop(label)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """Stop everything, the master last, and see that each ends well."""
        for label in sorted(self.processes, key=lambda name: name == "master"):
            self.processes[label].terminate()
        codes = {}
        for label, process in self.processes.items():
            try:
                codes[label] = process.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[label] = process.wait()
        self.processes.clear()
        last_words = "\n".join(self.log_of(label).read_text()[-2000:] for label, code in codes.items() if code != 0)
        assert set(codes.values()) <= {0}, f"{codes}\n{last_words}"
