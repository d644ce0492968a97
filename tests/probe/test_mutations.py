"""Every parser takes whatever comes: some thousands here, as many as wished by `python -m tests.probe.mutations`."""

from __future__ import annotations

import pytest

from tests.probe import mutations


@pytest.mark.parametrize("name", sorted(mutations.PARSERS))
def test_no_mutated_input_raises_or_gives_more_than_there_is(name: str) -> None:
    mutations.run(name, count=2000, seed=20261130)
