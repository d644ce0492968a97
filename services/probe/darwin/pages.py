"""Page counts made bytes, and what may be concluded where one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from services.probe.reading import Pages, added

PAGE_SIZES: Final = frozenset({4096, 16384})
"""Intel, and Apple silicon. A process under Rosetta is told 4096 while the counts are of 16384."""

_BYTES_MAX: Final = 2**63


def from_counts(counts: Mapping[str, int], page_size_bytes: int) -> Pages:
    """`counts` by the names of Pages' fields without their unit; a count that no machine has is unknown.

    The pages in the queues are either file-backed or anonymous, so of these three one follows from the others.
    """
    sizes: dict[str, int | None] = {name: _bytes(count, page_size_bytes) for name, count in counts.items()}
    pages = Pages(**{f"{name}_bytes": size for name, size in sizes.items()})
    if pages.file_backed_bytes is None:
        pages = pages._replace(file_backed_bytes=_file_backed(pages))
    return pages


def freshened(told: Pages, counted: Pages) -> Pages:
    """`told`, with what can be had without compressing as it is `counted` now; `told` itself where that is not known.

    What has changed in the queues meanwhile is put down to the active one, so that they still hold what is
    file-backed and what is anonymous. Wired and the compressor's own nobody counts.
    """
    if added(counted.reclaimable_bytes, counted.anonymous_bytes, counted.speculative_bytes) is None:
        return told
    held = (counted.file_backed_bytes or 0) + (counted.anonymous_bytes or 0)
    others = (told.inactive_bytes or 0) + (counted.speculative_bytes or 0)
    return told._replace(
        free_bytes=counted.free_bytes,
        active_bytes=max(0, held - others),
        speculative_bytes=counted.speculative_bytes,
        purgeable_bytes=counted.purgeable_bytes,
        file_backed_bytes=counted.file_backed_bytes,
        anonymous_bytes=counted.anonymous_bytes,
    )


def _file_backed(pages: Pages) -> int | None:
    """What of the queues is not anonymous; speculative pages that are not told count as none."""
    if pages.anonymous_bytes is None or pages.active_bytes is None or pages.inactive_bytes is None:
        return None
    queued = pages.active_bytes + pages.inactive_bytes + (pages.speculative_bytes or 0)
    return max(0, queued - pages.anonymous_bytes)


def _bytes(count: int, page_size_bytes: int) -> int | None:
    size = count * page_size_bytes
    return size if 0 <= size < _BYTES_MAX else None
