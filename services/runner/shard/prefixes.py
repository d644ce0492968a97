"""Beginnings of prompts whose caches are still there, for prompts that begin alike. On the first rank.

Rules this module lives by:
- Only whole chunks of a prompt are kept: they were computed as they would be again, so that an answer is, bit for bit,
  what it would have been.
- What is kept stands in the place of a sequence the instance was placed for. Whoever needs that place comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Prefix(NamedTuple):
    """The first `tokens` of the kept sequence."""

    sequence_id: str
    tokens: int


class Prefixes:
    """Those that are kept, by the sequence they were of; the one kept longest first."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._kept: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence_id: str, prompt: Sequence[int]) -> int:
        """How many of the prompt's tokens are kept from now on; 0 where it is too short for that."""
        tokens = len(prompt) // self._chunk_tokens * self._chunk_tokens
        if tokens:
            self._kept[sequence_id] = tuple(prompt[:tokens])
        return tokens

    def take(self, prompt: Sequence[int]) -> Prefix | None:
        """The longest beginning of `prompt` that is kept, if one is. It is kept no longer."""
        found = max((self._shared(each, prompt) for each in self._kept), key=lambda each: each.tokens, default=None)
        if found is None or found.tokens == 0:
            return None
        del self._kept[found.sequence_id]
        return found

    def _shared(self, sequence_id: str, prompt: Sequence[int]) -> Prefix:
        # One token at least is to be computed: the next one depends on it.
        kept, room = self._kept[sequence_id], len(prompt) - 1
        size, tokens = self._chunk_tokens, 0
        while tokens + size <= min(len(kept), room) and kept[tokens : tokens + size] == tuple(
            prompt[tokens : tokens + size]
        ):
            tokens += size
        return Prefix(sequence_id, tokens)

    def drop(self, sequence_id: str) -> bool:
        """Keep it no longer; False where it was not kept."""
        return self._kept.pop(sequence_id, None) is not None

    def oldest(self) -> str:
        """The one that was kept longest. Only while there is one."""
        return next(iter(self._kept))
