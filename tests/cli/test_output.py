import json

import pytest

from services.cli.output import bytes_text, known_bytes_text, level_text, message_json
from ullage.v1 import node_pb2


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
