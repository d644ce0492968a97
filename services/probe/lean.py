"""`python -m services.probe.lean LOG-LEVEL SETTINGS`: the probe itself, told its settings as JSON.

What reads a command line (typer, and pydantic under it) weighs 11 MiB, a fifth of a probe that runs for months. So
the program that was started reads it, and then becomes this one: the process, its id and its outputs stay.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from services.probe.settings import Settings


def become(settings: Settings, log_level: str) -> NoReturn:
    """Go on as the lean program, in this process."""
    arguments = [log_level, settings.to_json()]
    if sys.platform == "win32":
        # Windows would start another process, and end this one before it has done anything.
        sys.exit(run(*arguments))
    os.execv(sys.executable, [sys.executable, "-m", "services.probe.lean", *arguments])  # noqa: S606 - no shell wanted


def run(log_level: str, settings: str) -> int:
    """Probe until told to stop; the exit code."""
    # asyncio does without, and so it must not be there before: OpenSSL weighs 4 MiB, and gRPC brings its own.
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # the import system takes None for "not there"
    import asyncio  # noqa: PLC0415 - after OpenSSL is left out

    from services import logs  # noqa: PLC0415 - after OpenSSL is left out
    from services.probe import process  # noqa: PLC0415 - after OpenSSL is left out
    from services.probe.identity import IdentityError  # noqa: PLC0415 - after OpenSSL is left out
    from services.rpc import AddressError  # noqa: PLC0415 - after OpenSSL is left out

    logs.configure("probe", level=log_level)
    try:
        asyncio.run(process.run(Settings.from_json(settings)))
    except (AddressError, IdentityError) as error:
        print(f"ullage probe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
