"""What is made of libSystem's answers: counts that go in and come out, refusals, and answers that are copies."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import cast

import pytest

from services.probe.darwin import sysctl, vm_stat
from services.probe.darwin.sampler import DarwinSampler, Library, MacmonMemory, Seen
from services.probe.failures import Failures
from services.probe.pressure import judge
from services.probe.reading import Pages
from tests.probe.libsystem import LibSystem, packed
from ullage.v1 import node_pb2

GIB = 1 << 30
PAGE = 16384

TEXT = (Path(__file__).parents[1] / "recorded/vm_stat/g.txt").read_bytes()

NUMBERS = {
    sysctl.LEVEL: (1).to_bytes(4, "little"),
    sysctl.TOTAL: (48 * GIB).to_bytes(8, "little"),
    sysctl.PAGE_SIZE: PAGE.to_bytes(8, "little"),
    sysctl.SWAP: struct.pack("<QQQII", 8 * GIB, GIB, 7 * GIB, PAGE, 1),
}


class Silent:
    """Commands and a helper that say nothing."""

    def read(self) -> Seen:
        return Seen({})

    def memory(self) -> MacmonMemory | None:
        return None


def pages() -> Pages:
    found = vm_stat.parse(TEXT)
    assert found is not None
    return found


def counts(told: Pages) -> dict[str, bytes]:
    """What sysctl counts of `told`."""
    return {
        name: ((getattr(told, f"{field}_bytes") or 0) // PAGE).to_bytes(4, "little")
        for name, field in sysctl.PAGE_COUNTS.items()
    }


def library(mac: LibSystem, failures: Failures | None = None) -> Library:
    return Library(cast("ctypes.CDLL", mac), failures or Failures())


def test_one_reading_asks_each_name_once_and_the_pages_with_the_count_that_covers_them() -> None:
    mac = LibSystem(packed(pages(), PAGE, 62), NUMBERS, integers=62)
    source = library(mac)
    for _ in range(3):
        seen = source.read()
    assert seen.pages == pages()
    assert seen.numbers == {sysctl.LEVEL: 1, sysctl.TOTAL: 48 * GIB, sysctl.PAGE_SIZE: PAGE}
    assert seen.swap == sysctl.Swap(8 * GIB, GIB)
    # The count comes out changed, and the port is leaked by whoever asks for it again.
    assert mac.asked == [38, 38, 38]
    assert (mac.mach_host_self.calls, mac.host_page_size.calls) == (1, 1)


@pytest.mark.parametrize("least", [40, 62, 104])
def test_a_kernel_that_wants_to_be_asked_for_more_is_asked_once_again(least: int) -> None:
    mac = LibSystem(packed(pages(), PAGE, least), NUMBERS, integers=least, least=least)
    assert library(mac).read().pages == pages()
    assert mac.asked == [38, least]


@pytest.mark.parametrize("integers", [0, 36, 37])
def test_a_kernel_that_knows_fewer_fields_is_counted_and_leaves_the_pages_to_others(integers: int) -> None:
    failures = Failures()
    mac = LibSystem(packed(pages(), PAGE), NUMBERS, integers=integers)
    seen = library(mac, failures).read()
    assert (seen.pages, seen.numbers[sysctl.LEVEL]) == (None, 1)
    assert failures.counts == {"host_statistics64": 1}


def test_a_kernel_that_wants_more_than_there_is_room_for_is_counted() -> None:
    failures = Failures()
    mac = LibSystem(b"", NUMBERS, least=5000)
    assert library(mac, failures).read().pages is None
    assert mac.asked == [38]
    assert failures.errors == {"host_statistics64": "OSError: [Errno -307] host_statistics64 answers -307"}


def test_an_answer_that_is_the_same_to_the_last_counter_is_a_copy() -> None:
    mac = LibSystem(packed(pages(), PAGE), NUMBERS)
    source = library(mac)
    copies = [source.read().is_copy, source.read().is_copy]
    mac.written = packed(pages(), PAGE, faults=6)
    copies += [source.read().is_copy, source.read().is_copy]
    assert copies == [False, True, False, True]


def test_beside_a_copy_sysctl_says_what_can_be_had_now() -> None:
    mac = LibSystem(packed(pages(), PAGE), NUMBERS)
    sampler = DarwinSampler(library(mac), Silent(), Silent())
    before = sampler.read()
    now = pages()._replace(free_bytes=10 * PAGE, anonymous_bytes=(pages().anonymous_bytes or 0) + 1000 * PAGE)
    mac.numbers = NUMBERS | counts(now)
    after = sampler.read()
    assert before.ram_available_bytes == 553157 * PAGE
    assert after.ram_available_bytes == (553157 - 50667 + 10) * PAGE
    assert after.wired_bytes == before.wired_bytes
    assert after.darwin is not None
    assert (after.darwin.is_copy, after.darwin.pages.surplus_bytes) == (True, 0)
    assert after.darwin.pages.anonymous_bytes == now.anonymous_bytes
    assert after.source == node_pb2.MEMORY_SOURCE_SYSCTL


def test_a_translated_process_counts_the_kernels_pages_and_not_its_own() -> None:
    numbers = NUMBERS | counts(pages()) | {sysctl.PAGE_SIZE: (4096).to_bytes(8, "little")}
    sampler = DarwinSampler(library(LibSystem(packed(pages(), PAGE), numbers)), Silent(), Silent())
    assert [sampler.read().ram_available_bytes for _ in range(2)] == [553157 * PAGE] * 2  # The second is a copy.
    deaf = DarwinSampler(library(LibSystem(b"", numbers, least=5000)), Silent(), Silent())
    assert deaf.read().ram_available_bytes == 553157 * PAGE


def test_a_copy_without_sysctls_counts_is_the_best_there_is() -> None:
    sampler = DarwinSampler(library(LibSystem(packed(pages(), PAGE), NUMBERS)), Silent(), Silent())
    assert [sampler.read().ram_available_bytes for _ in range(2)] == [553157 * PAGE] * 2


def test_a_copy_is_no_mark_of_what_was_swapped_out_meanwhile() -> None:
    mac = LibSystem(packed(pages(), PAGE), NUMBERS)
    sampler = DarwinSampler(library(mac), Silent(), Silent())
    verdict = judge(None, sampler.read(), 0.0)
    for index in (1, 2, 3):
        verdict = judge(verdict, sampler.read(), index * 0.5)
    assert [at_s for at_s, _ in verdict.history.flows.swapped_out] == [0.0]
    mac.written = packed(pages()._replace(swapped_out_bytes=(pages().swapped_out_bytes or 0) + (2 << 20)), PAGE)
    verdict = judge(verdict, sampler.read(), 2.0)
    assert [at_s for at_s, _ in verdict.history.flows.swapped_out] == [0.0, 2.0]
    assert "swapping" in {reason.signal for reason in verdict.reasons}
