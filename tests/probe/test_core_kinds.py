"""Performance and efficiency cores, by what kernels say of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.probe.failures import Failures
from services.probe.linux.core_kinds import CoreKinds, Kinds, find, parse_list
from ullage.v1 import node_pb2


def put(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("a-b,-1,2-,7", {7}), ("3-1", set())],
)
def test_a_list_of_cores_is_read_as_far_as_it_is_one(text: str, cores: set[int]) -> None:
    assert parse_list(text) == cores


def test_a_list_without_an_end_is_cut_off() -> None:
    assert len(parse_list("0-99999")) == 4097


def test_intels_driver_lists_both_kinds(tmp_path: Path) -> None:
    put(tmp_path, "sys/devices/cpu_core/cpus", "0-1\n")
    put(tmp_path, "sys/devices/cpu_atom/cpus", "2-5\n")
    assert find(tmp_path) == Kinds(frozenset({0, 1}), frozenset({2, 3, 4, 5}))


def test_arm_cores_differ_in_capacity(tmp_path: Path) -> None:
    for core, capacity in enumerate(("446", "446", "871", "1024", "1024")):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpu_capacity", f"{capacity}\n")
    assert find(tmp_path) == Kinds(frozenset({3, 4}), frozenset({0, 1, 2}))


@pytest.mark.parametrize("capacities", [(), ("1024", "1024"), ("", "junk")])
def test_cores_that_are_alike_are_of_no_kind(tmp_path: Path, capacities: tuple[str, ...]) -> None:
    for core, capacity in enumerate(capacities):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpu_capacity", capacity)
    assert find(tmp_path) == Kinds()
    sample = node_pb2.SystemSample()
    CoreKinds(tmp_path, Failures()).fill(sample)
    assert sample == node_pb2.SystemSample()


def test_the_use_of_each_kind_is_that_of_its_cores(tmp_path: Path) -> None:
    put(tmp_path, "sys/devices/cpu_core/cpus", "0\n")
    put(tmp_path, "sys/devices/cpu_atom/cpus", "1-4000\n")
    failures, sample = Failures(), node_pb2.SystemSample()
    CoreKinds(tmp_path, failures).fill(sample)
    assert 0 <= sample.performance_cores_pct <= 100
    assert not failures.counts
