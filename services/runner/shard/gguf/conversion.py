"""A GGUF file made a model folder: config.json, model.safetensors and the tokenizer's files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from services.runner.shard.gguf import blocks, llama, tokenizer
from services.runner.shard.gguf.file import GgufError, GgufFile, TensorInfo, open_gguf

Progress = Callable[[str, int, int], None]
"""Hears the step, the bytes done and the bytes in all."""

_SAFETENSORS_NAMES: Final[Mapping[str, str]] = {"<u4": "U32", "<f2": "F16", "<f4": "F32"}
_HEADER_ALIGNMENT_BYTES: Final = 8


def convert(source: Path, destination: Path, progress: Progress) -> None:
    """Make `destination` from the GGUF file `source`, whole or not at all. Raises GgufError with what to do."""
    total_bytes = source.stat().st_size if source.is_file() else 0
    progress("reading", 0, total_bytes)
    file = open_gguf(source)
    tensors = llama.modules(file)
    config = llama.config(file, tensors)
    built = tokenizer.tokenizer(file)
    with _appearing(destination) as folder:
        _write_json(folder / "config.json", config)
        _write_json(folder / "tokenizer_config.json", tokenizer.settings(file, config["max_position_embeddings"]))
        _write_json(folder / "generation_config.json", tokenizer.generation(file))
        built.save(str(folder / "tokenizer.json"))
        with (folder / "model.safetensors").open("wb") as weights:
            _write_weights(weights, file, tensors, progress)


@contextlib.contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` that becomes it on success and is gone otherwise."""
    if destination.exists():
        raise GgufError(f"{destination} exists: remove it, or choose another folder")
    folder = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        folder.chmod(0o755)
        yield folder
        folder.rename(destination)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(out: BinaryIO, file: GgufFile, tensors: Mapping[str, TensorInfo], progress: Progress) -> None:
    ordered = sorted(tensors.items())
    out.write(_header(ordered))
    total_bytes = sum(info.stored_bytes for info in tensors.values())
    done_bytes = 0
    for module, info in ordered:
        progress("weights", done_bytes, total_bytes)
        out.writelines(part.tobytes() for part in _parts(file, module, info).values())
        done_bytes += info.stored_bytes
    out.flush()
    os.fsync(out.fileno())
    progress("weights", done_bytes, total_bytes)


def _header(ordered: list[tuple[str, TensorInfo]]) -> bytes:
    """The header of the safetensors file, with its length before it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    begin = 0
    for module, info in ordered:
        for part, (dtype, shape) in blocks.part_shapes(info.kind, info.shape).items():
            end = begin + blocks.part_bytes(dtype, shape)
            entries[f"{module}.{part}"] = {
                "dtype": _SAFETENSORS_NAMES[dtype],
                "shape": shape,
                "data_offsets": [begin, end],
            }
            begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _parts(file: GgufFile, module: str, info: TensorInfo) -> dict[str, blocks.Array]:
    try:
        parts = blocks.unpack(info.kind, file.read(info), info.shape)
    except OverflowError as error:
        raise GgufError(
            f"tensor {info.name} of {file.path.name} has scales that are no numbers: download it again"
        ) from error
    heads = llama.heads_permuted(file, module)
    return parts if heads is None else {name: blocks.unpermuted(part, heads) for name, part in parts.items()}
