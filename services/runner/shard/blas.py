"""The library that multiplies matrices for MLX on a Linux CPU, chosen and loaded before MLX is.

MLX's Linux wheels bring a reference BLAS, some twenty times slower than a real one. A library loaded with
RTLD_GLOBAL before the first `import mlx.core` is found before the one in the wheel, so `load` must run
before any module that imports MLX. macOS needs none of this: MLX uses Accelerate there.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs
import structlog

CHOICE_VARIABLE: Final = "ULLAGE_BLAS"
"""The path of a library to use instead of those searched for, or "none" for the one in MLX's wheel."""

NONE: Final = "none"
COMPILE_SECONDS_MAX: Final = 60.0

_SHIM_SOURCE: Final = Path(__file__).with_name("openblas_shim.c")
_COMPILE_OPTIONS: Final = ("-O3", "-shared", "-fPIC")
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

log = structlog.get_logger()


@dataclass(frozen=True)
class Library:
    """A BLAS on this machine. `prefix` is what its symbols begin with, e.g. "scipy_"."""

    path: str
    origin: str
    prefix: str = ""


@dataclass(frozen=True)
class Loaded:
    """What MLX multiplies with. `shim` is what stands between the two, where something does."""

    name: str
    shim: ctypes.CDLL | None = None

    def products(self) -> int | None:
        """How many matrix products came through the shim, or None without one."""
        if self.shim is None:
            return None
        self.shim.ullage_blas_products.restype = ctypes.c_ulong
        return int(self.shim.ullage_blas_products())


def load(threads: int) -> Loaded:
    """Load the best BLAS here, with `threads` threads, and say which it is.

    In this order: what ULLAGE_BLAS names, MKL, the system's OpenBLAS, the one in the scipy-openblas32 wheel.
    One that cannot be used is logged and the next is tried.
    """
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(threads)
    if sys.platform != "linux":
        return Loaded("accelerate" if sys.platform == "darwin" else NONE)
    for library in _candidates():
        try:
            return _load(library)
        except OSError as error:
            log.warning("blas not usable", path=library.path, origin=library.origin, error=str(error))
    return Loaded(NONE)


def _candidates() -> Iterator[Library]:
    chosen = os.environ.get(CHOICE_VARIABLE)
    if chosen == NONE:
        return
    if chosen:
        yield Library(chosen, CHOICE_VARIABLE, "scipy_" if "scipy_openblas" in Path(chosen).name else "")
    mkl = Path(sys.prefix, "lib", "libmkl_rt.so.2")
    if mkl.exists():
        yield Library(str(mkl), "mkl")
    if ctypes.util.find_library("openblas"):
        yield Library("libopenblas.so.0", "system")
    wheel = importlib.util.find_spec("scipy_openblas32")
    for folder in wheel.submodule_search_locations or () if wheel else ():
        yield Library(str(Path(folder, "lib", "libscipy_openblas.so")), "scipy-openblas32", "scipy_")


def _load(library: Library) -> Loaded:
    """Put `library` before MLX's own. Raises OSError where that cannot be done."""
    if library.origin == "mkl":
        ctypes.CDLL(library.path, ctypes.RTLD_GLOBAL)
        return Loaded("mkl")
    shim_path = _compiled_shim()
    if shim_path is None:
        if library.prefix:
            raise OSError("its symbols are prefixed, and there is no C compiler to make the shim it needs")
        return Loaded(_name(ctypes.CDLL(library.path, ctypes.RTLD_GLOBAL), library))
    name = _name(ctypes.CDLL(library.path), library)
    shim = ctypes.CDLL(str(shim_path), ctypes.RTLD_GLOBAL)
    if shim.ullage_blas_bind(library.path.encode(), library.prefix.encode()) != 0:
        raise OSError("it lacks a cblas function that MLX calls")
    return Loaded(name, shim)


def _name(loaded: ctypes.CDLL, library: Library) -> str:
    """E.g. "openblas-0.3.34 (scipy-openblas32)"."""
    try:
        config = getattr(loaded, f"{library.prefix}openblas_get_config")
    except AttributeError:
        return f"{Path(library.path).name} ({library.origin})"
    config.restype = ctypes.c_char_p
    version = re.search(r"\d+\.\d+\.\d+", (config() or b"").decode())
    return f"openblas-{version.group() if version else 'unknown'} ({library.origin})"


def _compiled_shim() -> Path | None:
    """The shim, compiled once for each content of its source and each set of options; None without a compiler."""
    made_of = (_SHIM_SOURCE.read_bytes(), " ".join(_COMPILE_OPTIONS).encode(), platform.machine().encode())
    digest = hashlib.sha256(b"".join(made_of)).hexdigest()[:16]
    target = platformdirs.user_cache_path("ullage") / f"openblas_shim-{digest}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        log.warning("no C compiler: matrix products stay slow where only a prefixed BLAS is at hand", looked_for="cc")
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Compiled beside its place and renamed into it: another shard never loads half a file.
        made = Path(folder, target.name)
        command = [compiler, *_COMPILE_OPTIONS, "-o", str(made), str(_SHIM_SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX, check=False)
        if done.returncode != 0:
            log.warning("the BLAS shim does not compile", command=" ".join(command), error=done.stderr[-500:])
            return None
        made.replace(target)
    return target
