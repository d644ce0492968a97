"""The runner's options."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runner.settings import Settings, SettingsError


def settings(address: str, advertise: str | None = None) -> Settings:
    return Settings(
        master="127.0.0.1:50500",
        address=address,
        advertise=advertise,
        state_dir=Path("state"),
        models_dir=Path("models"),
        threads=1,
        weights="auto",
        ready_file=None,
    )


@pytest.mark.parametrize(
    ("address", "advertise", "expected"),
    [
        ("127.0.0.1:0", None, "127.0.0.1:4711"),
        ("[::1]:0", None, "[::1]:4711"),
        ("0.0.0.0:50502", "node-a.lan:50502", "node-a.lan:50502"),
    ],
)
def test_others_dial_where_it_listens_or_what_it_advertises(address: str, advertise: str | None, expected: str) -> None:
    assert settings(address, advertise).advertised(4711) == expected


@pytest.mark.parametrize("address", ["0.0.0.0:50502", "[::]:50502"])
def test_an_address_that_stands_for_all_has_to_be_advertised_as_one(address: str) -> None:
    with pytest.raises(SettingsError, match="say --advertise HOST:PORT"):
        settings(address)


@pytest.mark.parametrize(
    "advertise", ["", "node-a", "node-a:0", "node-a:65536", "0.0.0.0:50502", "http://node-a:50502", "::1", ":50502"]
)
def test_what_nobody_can_dial_is_not_advertised(advertise: str) -> None:
    with pytest.raises(SettingsError, match=f"nobody can dial --advertise '{advertise}': write HOST:PORT"):
        settings("127.0.0.1:0", advertise)
