"""Writes the Python code of the protos beside them: `python protos/generate.py [--out DIR]`."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
OUTPUTS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    """Write the code of every proto under `out`, in the protos' own folders. Raises RuntimeError if protoc refuses."""
    # protoc finds the mypy-protobuf plugins by PATH, and the interpreter's scripts need not be on it.
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("ullage/**/*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={well_known}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with {status}; its message is above")
    for source in sources:
        # A file without a service gets an empty stub module, which nobody should import.
        if "service " not in (ROOT / source).read_text():
            for stub in out.glob(source.removesuffix(".proto") + "_pb2_grpc.py*"):
                stub.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder to write under (default: the protos' own)")
    generate(parser.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
