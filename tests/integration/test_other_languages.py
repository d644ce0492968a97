"""Programs that share no code with us: grpcurl by reflection, and a Node.js client."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import COMMAND_SECONDS_MAX, HANG_SECONDS, ROOT, Cluster, eventually
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

GRPCURL = str(Path(sysconfig.get_path("scripts")) / "grpcurl")
NODE_EXAMPLE = ROOT / "examples" / "node"


def grpcurl(
    cluster: Cluster, *arguments: str, data: object = None, code: int = 0, options: tuple[str, ...] = ()
) -> str:
    body = () if data is None else ("-d", json.dumps(data))
    command = [GRPCURL, "-plaintext", *body, cluster.address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_grpcurl_lists_and_describes_the_services_by_reflection(shared: Cluster) -> None:
    listed = set(grpcurl(shared, "list").split())
    assert {
        "grpc.health.v1.Health",
        "ullage.v1.DispatchService",
        "ullage.v1.EventService",
        "ullage.v1.ModelService",
        "ullage.v1.PlacementService",
        "ullage.v1.TelemetryService",
    } <= listed
    described = grpcurl(shared, "describe", "ullage.v1.PlacementService")
    assert "rpc Place ( .ullage.v1.PlaceRequest ) returns ( .ullage.v1.PlaceResponse );" in described
    health = json.loads(grpcurl(shared, "grpc.health.v1.Health/Check"))
    assert health == {"status": "SERVING"}


def test_grpcurl_places_reads_the_state_and_follows_events(released: Cluster) -> None:
    spec = {"model_id": MODEL, "context_tokens": "512", "requested_by": "grpcurl"}
    placed = json.loads(grpcurl(released, "ullage.v1.PlacementService/Place", data={"spec": spec}))["instance"]

    state = json.loads(grpcurl(released, "ullage.v1.EventService/GetState"))["state"]
    known = {one["instance_id"] for one in state["instances"]}
    assert placed["instance_id"] in known

    # Follow has no end: grpcurl leaves it at its deadline, with what it has read until then.
    request = {"from_sequence": placed["placed_at_sequence"], "filter": {"kinds": ["instance_placed"]}}
    followed = eventually("a follower sees it", lambda: followed_with(released, request, placed["instance_id"]))
    assert "DeadlineExceeded" in followed.stderr


def followed_with(cluster: Cluster, request: object, instance_id: str) -> subprocess.CompletedProcess[str] | None:
    """What grpcurl followed within three seconds, if it saw the instance in these: it dials in them too."""
    command = [GRPCURL, "-plaintext", "-max-time", "3", "-d", json.dumps(request), cluster.address]
    done = subprocess.run(
        [*command, "ullage.v1.EventService/Follow"], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    return done if f'"instance_id": "{instance_id}"' in done.stdout else None


def test_every_command_of_the_grpcurl_readme_works(released: Cluster) -> None:
    readme = (ROOT / "examples" / "grpcurl" / "README.md").read_text()
    commands = re.findall(r"^\$ (grpcurl .*)$", readme, flags=re.MULTILINE)
    assert len(commands) == 12
    for command in commands[:-1]:
        said = written(command.replace("$ULLAGE_MASTER", released.address))
        # Its deadline may find it dialling, which it says in other words.
        is_over = "-max-time" in command and re.search("deadline ?exceeded", said.stderr, flags=re.IGNORECASE)
        assert said.returncode == 0 or is_over, f"{command}\n{said.stderr}"

    [instance] = [one for one in released.state()["state"]["instances"] if one["spec"].get("request_id") == "readme-1"]
    eventually("the instance runs", lambda: released.runs(instance["instance_id"]))
    runner = released.runner_of(instance["placement"]["shards"][0]["node_id"])
    said = written(commands[-1].replace("INSTANCE", instance["instance_id"]).replace("RUNNER", runner))
    assert '"summary"' in said.stdout


def written(command: str) -> subprocess.CompletedProcess[str]:
    """A command as it is written in a README."""
    [_, *arguments] = shlex.split(command)
    return subprocess.run([GRPCURL, *arguments], capture_output=True, text=True, check=False, timeout=HANG_SECONDS)


def test_grpcurl_shows_a_refusal_with_its_proof(released: Cluster) -> None:
    spec = {"model_id": MODEL, "context_tokens": "8192", "concurrent_sequences": 64}
    said = grpcurl(released, "ullage.v1.PlacementService/Place", data={"spec": spec}, code=72)
    assert "Code: ResourceExhausted" in said
    assert '"@type":"type.googleapis.com/ullage.v1.Refusal"' in said


@pytest.mark.parametrize(("context", "code"), [("0", "InvalidArgument"), ("-5", "")])
def test_a_context_that_is_no_positive_number_is_refused(released: Cluster, context: str, code: str) -> None:
    spec = {"model_id": MODEL, "context_tokens": context}
    command = [GRPCURL, "-plaintext", "-d", json.dumps({"spec": spec}), released.address]
    done = subprocess.run(
        [*command, "ullage.v1.PlacementService/Place"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode != 0
    assert code in done.stderr


def test_an_unknown_model_is_not_found(shared: Cluster) -> None:
    said = grpcurl(shared, "ullage.v1.PlacementService/Place", data={"spec": {"model_id": "gpt-9"}}, code=69)
    assert "Code: NotFound" in said
    assert "no model is called 'gpt-9': add it with `ullage models add`" in said


@pytest.fixture(scope="module")
def node_client() -> Path:
    """The Node.js example with its packages, which npm fetches once for a checkout."""
    npm = shutil.which("npm")
    assert npm is not None, "install Node.js 18 or later: the Node.js client is part of what is tested"
    installed = NODE_EXAMPLE / "node_modules" / ".package-lock.json"
    lock = NODE_EXAMPLE / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        done = subprocess.run(
            [npm, "ci", "--ignore-scripts"],
            cwd=NODE_EXAMPLE,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
    return NODE_EXAMPLE / "client.js"


def test_a_node_js_client_places_reads_follows_and_generates(released: Cluster, node_client: Path) -> None:
    def client(*arguments: str) -> str:
        done = subprocess.run(
            ["node", str(node_client), *arguments],
            env={**os.environ, "ULLAGE_MASTER": released.address},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    [model] = [json.loads(line) for line in client("models").splitlines()]
    assert model == {"model_id": MODEL, "model_type": "llama", "layers": 30}

    placed: dict[str, Any] = json.loads(client("place", MODEL, "512"))
    assert placed["state"] == "INSTANCE_STATE_RUNNING"
    assert sum(shard["end_layer"] - shard["first_layer"] for shard in placed["shards"]) == 30

    state = json.loads(client("state"))["state"]
    assert len(state["nodes"]) == 3
    # What was not measured is absent in JavaScript too.
    assert "system_power_watts" not in state["nodes"][0].get("system", {})

    followed = [json.loads(line) for line in client("follow", "5").splitlines()]
    assert [event["sequence"] for event in followed] == ["1", "2", "3", "4", "5"]
    assert followed[0]["fact"]["fact"] == "master_started"

    assert len(client("generate", MODEL, "Name a colour.").strip()) > 0
    assert json.loads(client("release", placed["instance_id"]))["instance_id"] == placed["instance_id"]


def test_the_python_client_places_and_asks(released: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "python" / "client.py"), MODEL, "Name a colour."],
        env={**os.environ, "ULLAGE_MASTER": released.address},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr
    nodes, answer = done.stdout.splitlines()[:3], done.stdout.splitlines()[3:]
    assert sorted(line.split(":")[0] for line in nodes) == ["node-1", "node-2", "node-3"]
    assert "".join(answer).strip()
