"""What a shard was promised, and when it holds so much more that this must be told.

MLX enforces no limit on a CPU, so that the watch on resident bytes is ours. Above the margin the shard is overdrawn:
a fact says so, and its instance takes no new requests until it is within the margin again.
"""

from __future__ import annotations

from typing import Final

MARGIN_SHARE: Final = 8
"""The margin is this part of the promise: what allocators and interpreters take and nobody reckons."""

MARGIN_BYTES_MIN: Final = 64 << 20


def over_grant_bytes(resident_bytes: int, granted_bytes: int) -> int | None:
    """Resident bytes beyond the promise where these exceed the margin, else None; None without a promise too."""
    over = resident_bytes - granted_bytes
    margin = max(granted_bytes // MARGIN_SHARE, MARGIN_BYTES_MIN)
    return over if granted_bytes and over > margin else None
