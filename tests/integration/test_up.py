"""`ullage up` as people use it: what it says, and that nothing it started outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.integration.cluster import HANG_SECONDS, PATIENT, ROOT, ULLAGE, Cluster, eventually, ullage

SERVICES: Final = {"cli.leash", "master", "probe", "runner"}


class Up:
    """`ullage up` with one node, as a process."""

    def __init__(self, folder: Path, *options: str) -> None:
        arguments = ["up", "--nodes", "1", "--listen", "127.0.0.1:0", "--data-dir", str(folder), *options]
        environment = {**PATIENT, **os.environ, "ULLAGE_MODELS_DIR": str(folder / "models")}
        self.process = subprocess.Popen(
            [*ULLAGE, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def services(self) -> dict[str, psutil.Process]:
        """The processes it started, by the module they run."""
        return eventually("each of its processes is what it was started as", self._services)

    def _services(self) -> dict[str, psutil.Process]:
        """Nothing while one of them has not become itself yet, or is one that measures something and goes again."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        with suppress(psutil.Error, IndexError):
            found = {child.cmdline()[2].removeprefix("services.").removesuffix(".lean"): child for child in children}
            if set(found) == SERVICES:
                return found
        return {}

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        _, err = self.process.communicate(timeout=HANG_SECONDS)
        return self.process.returncode, err


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `ullage up` on the same data each time; what is left of it ends with the test."""
    started: list[Up] = []

    def start(*options: str) -> Up:
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
        running.end()


@pytest.fixture
def up(start: Start) -> Up:
    return start("--memory", "300MiB", "--json")


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_it_says_when_everything_is_ready_and_stops_it_all_when_asked(up: Up) -> None:
    ready = json.loads(up.first_line())
    [node] = ready["state"]["nodes"]
    assert node["identity"]["friendly_name"] == "node-1"
    assert "MEMORY_FLAG_OVERRIDDEN" in node["memory"]["flags"]
    status = ullage("status", "--master", ready["master"])
    assert status.stdout.splitlines()[1].split()[:2] == ["node-1", "live"]

    services = up.services()
    up.process.send_signal(signal.SIGINT)
    code, err = up.end()
    assert (code, err) == (0, "")
    assert gone(list(services.values()))


def test_several_nodes_on_one_machine_give_no_byte_twice(start: Start) -> None:
    nodes = json.loads(start("--nodes", "2", "--json").first_line())["state"]["nodes"]
    given = [int(node["memory"]["balanced_available_bytes"]) for node in nodes]
    assert given[0] == given[1] > 0
    assert sum(given) <= int(nodes[0]["memory"]["ram_total_bytes"])
    assert all("MEMORY_FLAG_OVERRIDDEN" in node["memory"]["flags"] for node in nodes)


def test_a_service_that_dies_stops_everything_and_is_named_with_its_last_lines(up: Up) -> None:
    up.first_line()
    services = up.services()
    services["probe"].kill()
    code, err = up.end()
    assert code == 1
    message = json.loads(err.splitlines()[-1])["error"]["message"]
    assert message.startswith("node-1 probe was killed by SIGKILL; its last lines:\n")
    assert "event=listening" in message
    assert gone(list(services.values()))


def test_nothing_outlives_it_when_it_is_killed(up: Up) -> None:
    up.first_line()
    services = up.services()
    up.process.kill()
    up.end()
    eventually("its services are gone", lambda: gone(list(services.values())))


def test_a_bad_option_of_a_service_is_told_as_the_service_tells_it(start: Start) -> None:
    code, err = start("--memory", "much").end()
    assert code == 1
    assert "node-1 probe ended with exit code" in err
    assert "much" in err
    assert "Traceback" not in err


def test_the_same_data_has_the_same_nodes_again(start: Start) -> None:
    ids = []
    for _ in range(2):
        running = start("--json")
        ids.append(json.loads(running.first_line())["state"]["nodes"][0]["identity"]["node_id"])
        running.process.terminate()
        assert running.end() == (0, "")
    assert ids[0] == ids[1]


def test_a_node_joins_a_master_with_its_probe_and_its_runner_as_one_command(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tmp_path / "models")
    try:
        cluster.start_master()
        options = ["--master", cluster.address, "--name", "solo", "--state-dir", str(tmp_path / "solo")]
        ports = ["--listen", "127.0.0.1:0", "--probe-listen", "127.0.0.1:0"]
        command = [*ULLAGE, "node", *options, *ports]
        node = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert node.stdout is not None
        assert node.stdout.readline().endswith(f"master at {cluster.address}; Ctrl-C stops them\n")
        cluster.wait_until_known(["solo"])
        node.terminate()
        assert (node.communicate(timeout=HANG_SECONDS)[1], node.returncode) == ("", 0)
    finally:
        cluster.stop()
