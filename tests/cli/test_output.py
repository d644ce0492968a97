import io
import json

import pytest
from rich.console import Console
from rich.table import Table

from services.cli import decisions, model_table, tables
from services.cli.output import bytes_text, known_bytes_text, level_text, message_json
from tests.cli.canned import instance, node
from ullage.v1 import config_service_pb2, model_pb2, node_pb2, state_pb2


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (12 * 2**10, "12 KiB"),
        (1_500_000, "1.4 MiB"),
        (450 * 2**20, "450 MiB"),
        (2**30 + 2**28, "1.25 GiB"),
        (17_179_869_184, "16.0 GiB"),
    ],
)
def test_a_size_carries_its_binary_unit(size_bytes: int, text: str) -> None:
    assert bytes_text(size_bytes) == text


def test_an_absent_size_is_unknown_and_a_zero_is_zero() -> None:
    assert known_bytes_text(node_pb2.MemorySample(), "balanced_available_bytes") == "unknown"
    zero = node_pb2.MemorySample(balanced_available_bytes=0)
    assert known_bytes_text(zero, "balanced_available_bytes") == "0 B"


def test_json_shows_a_zero_that_was_measured_and_leaves_out_what_was_not() -> None:
    sample = node_pb2.MemorySample(balanced_available_bytes=0, pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL)
    shown = json.loads(message_json(sample))
    assert shown["balanced_available_bytes"] == "0"
    assert shown["pressure_level"] == "PRESSURE_LEVEL_NORMAL"
    assert "ram_total_bytes" not in shown


def test_a_level_is_told_by_its_name_and_its_colour() -> None:
    critical = level_text(node_pb2.PRESSURE_LEVEL_CRITICAL)
    assert (critical.plain, critical.style) == ("CRITICAL", "bold red")
    assert level_text(node_pb2.PRESSURE_LEVEL_UNSPECIFIED).plain == "UNKNOWN"


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_is_shown_every_figure_whole(columns: int) -> None:
    running = instance("smollm2-135m-e98342", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
    decided = running.placement
    state = state_pb2.ClusterState(nodes=[node("aaaa-1", "living-room", runner="192.168.100.101:50502")])
    option = config_service_pb2.Setting(flag="--runner-stalled-after-ms", value="3500")
    model = model_pb2.Model(model_id="smollm2-135m", model_type="llama", quantization="4-bit, groups of 32")
    for table in (
        tables.placement(decided),
        tables.nodes(state),
        tables.instances(state, [running]),
        tables.settings([option]),
        decisions.budgets(decided.nodes),
        model_table.models([model]),
    ):
        lines = drawn(table, columns).splitlines()
        assert max(len(line) for line in lines) <= columns
        assert sorted("".join("".join(lines).split())) == sorted("".join(drawn(table, 1000).split()))


def drawn(table: Table, columns: int) -> str:
    text = io.StringIO()
    Console(file=text, width=columns).print(table)
    return text.getvalue()
