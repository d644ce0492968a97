"""The operator's amounts of memory, as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import Setting
from services.probe.estimator import Override
from services.probe.settings import Settings, SettingsError, override, parse_memory
from ullage.v1 import config_service_pb2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("450MiB", Override(size_bytes=450 << 20)),
        ("4GB", Override(size_bytes=4 * 10**9)),
        ("4 gib", Override(size_bytes=4 << 30)),
        ("1.5GiB", Override(size_bytes=3 << 29)),
        ("512000000", Override(size_bytes=512_000_000)),
        ("50%", Override(fraction=0.5)),
        ("100 %", Override(fraction=1.0)),
    ],
)
def test_an_amount_is_absolute_or_a_share(text: str, expected: Override) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4x", "101%", "nan%", "1e9", "999999999999TiB", "4 GiB or so"])
def test_another_amount_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="write"):
        parse_memory(text)


def test_the_environment_counts_in_gib_unless_the_option_is_given() -> None:
    assert override(None, "16") == Override(size_bytes=16 << 30)
    assert override("1GiB", "16") == Override(size_bytes=1 << 30)
    assert override(None, None) is None
    with pytest.raises(SettingsError, match="OVERRIDE_MEMORY='16GiB' is no whole number of GiB"):
        override(None, "16GiB")


@pytest.mark.parametrize("override", [None, Override(size_bytes=5), Override(fraction=0.5)])
def test_settings_survive_being_passed_on(override: Override | None) -> None:
    settings = Settings(
        master="m:1",
        listen="127.0.0.1:0",
        insecure=True,
        state_dir=Path("/state dir"),
        override=override,
        period_ms=500,
        system_period_ms=2000,
        name=None if override else 'a "name"',
        version="0.1.0",
        root=Path("/"),
        ready_file=None if override is None else Path("/ready"),
        options=(
            Setting("--period-ms", "500", config_service_pb2.SETTING_SOURCE_COMMAND_LINE, None),
            Setting("--memory", None, config_service_pb2.SETTING_SOURCE_DEFAULT, "MEMORY"),
        ),
    )
    assert Settings.from_json(settings.to_json()) == settings
