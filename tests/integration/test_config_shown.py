"""Every real process shows what it was told at its start."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster


def test_master_probe_and_runner_show_what_they_go_by(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULLAGE_RUNNER_LOST_AFTER_MS", "600000")
    own.start_master("--suspect-after-ms", "300000", "--lost-after-ms", "900000")
    probe = own.start_probe("anna", "--period-ms", "400")
    runner = own.start_runner("anna", "--stall-after-ms", "900000")

    assert shown(own, "--lost-after-ms") == ("900000", "COMMAND_LINE", "ULLAGE_LOST_AFTER_MS")
    assert shown(own, "--runner-lost-after-ms") == ("600000", "ENVIRONMENT", "ULLAGE_RUNNER_LOST_AFTER_MS")
    # A node may be silent for so long and be live: its runner is blamed after that, and not before.
    assert shown(own, "--runner-stalled-after-ms") == ("300500", "DEFAULT", "ULLAGE_RUNNER_STALLED_AFTER_MS")
    assert shown(own, "--log") == (str(own.log_path), "DEFAULT", "ULLAGE_LOG")
    assert shown(own, "--period-ms", probe) == ("400", "COMMAND_LINE", None)
    assert shown(own, "--memory", probe) == (None, "DEFAULT", None)
    assert shown(own, "--stall-after-ms", runner) == ("900000", "COMMAND_LINE", "ULLAGE_STALL_AFTER_MS")


def shown(cluster: Cluster, flag: str, *address: str) -> tuple[str | None, str, str | None]:
    """An option's value, who said it, and the variable that would."""
    settings = {setting["flag"]: setting for setting in cluster.ask("config", *address)["settings"]}
    setting = settings[flag]
    source = setting["source"].removeprefix("SETTING_SOURCE_")
    return setting.get("value"), source, setting.get("environment_variable")
