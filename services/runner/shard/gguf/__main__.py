"""`python -m services.runner.shard.gguf SOURCE DESTINATION`: convert a GGUF file, with progress as JSON on stdout."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from services.runner.shard.gguf.conversion import convert
from services.runner.shard.gguf.file import GgufError


def main() -> int:
    """Exit status: 0 when the folder is there, 1 with one line on stderr when it is not."""
    parser = argparse.ArgumentParser(prog="python -m services.runner.shard.gguf", description=__doc__)
    parser.add_argument("source", type=Path, help="the GGUF file")
    parser.add_argument("destination", type=Path, help="the folder to make; its parent exists, it does not")
    arguments = parser.parse_args()
    # As an exception, so that the half-made folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        convert(arguments.source, arguments.destination, _print_progress)
    except GgufError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{arguments.destination} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _print_progress(step: str, done_bytes: int, total_bytes: int) -> None:
    print(json.dumps({"step": step, "done_bytes": done_bytes, "total_bytes": total_bytes}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
