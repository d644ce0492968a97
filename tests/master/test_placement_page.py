"""docs/placement.md shows what the allocator predicts now."""

from __future__ import annotations

from pathlib import Path

from benchmarks.published import table

PAGE = Path(__file__).parents[2] / "docs" / "placement.md"


def test_the_predictions_on_the_page_are_those_of_this_release() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
