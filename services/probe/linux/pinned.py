"""Keeping the probe's own pages in memory: it is needed most when the machine has none left.

Under pressure the kernel takes back the pages of programs that sleep, and a probe sleeps nearly always; it would
then wait for its own code to be read again while it should tell that everybody waits. Pages are locked as they
are first used, so nothing grows by it. Where a limit is set on locked memory nothing is locked at all: beyond the
limit every later allocation would fail.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_CURRENT_AND_FUTURE_ON_FAULT: Final = 1 | 2 | 4


def pin() -> bool:
    """Lock this process's pages, now and as they come; whether that is allowed here."""
    import resource  # noqa: PLC0415 - other systems import this module too, and not all have it

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        return False
    return bool(ctypes.CDLL(None).mlockall(_CURRENT_AND_FUTURE_ON_FAULT) == 0)
