"""A part of a model, fetched from a runner that has all of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from services import model_folder, rpc
from services.clock import SystemClock
from services.runner import model_fetch, model_files, models, partial_model
from services.runner.model_fetch import Fetcher, FetchError
from services.runner.partial_model import PARTIAL_FOLDER, Cut, Range, joined, without
from tests.runner.shard import tiny_weights
from tests.runner.told import until
from ullage.v1 import dispatch_service_pb2, model_file_service_pb2, model_file_service_pb2_grpc, model_pb2

FIRST, END = 1, 3
WEIGHTS: Final = "model.safetensors"


class Source:
    """A runner's ModelFileService, and what was asked of it."""

    def __init__(self, models_dir: Path) -> None:
        self.inner = model_files.ModelFileServicer(models_dir)
        self.sent_bytes = 0
        self.breaks_after_bytes: int | None = None
        self.damages = 0
        self.asked = 0
        self.goes_on = asyncio.Event()
        """Cleared, nothing more is sent than the beginning of what is asked for."""
        self.goes_on.set()

    async def ListModelFiles(self, request: Any, context: Any) -> Any:
        return await self.inner.ListModelFiles(request, context)

    async def FetchModelFile(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked += 1
        async for chunk in self.inner.FetchModelFile(request, context):
            for at in range(0, len(chunk.data), 4096):
                part = chunk.data[at : at + 4096]
                if self.breaks_after_bytes is not None and self.sent_bytes >= self.breaks_after_bytes:
                    self.breaks_after_bytes = None
                    return
                self.sent_bytes += len(part)
                response = model_file_service_pb2.FetchModelFileResponse(data=part, crc32=zlib.crc32(part))
                if self.damages:
                    self.damages -= 1
                    response.crc32 ^= 1
                yield response
                await self.goes_on.wait()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Where the model is."""
    return tiny_weights.write(tmp_path / "whole" / "tiny")


@pytest.fixture
def model(whole: Path) -> model_pb2.Model:
    return tiny_weights.prepared(whole)


@pytest.fixture
async def source(whole: Path) -> AsyncIterator[tuple[Source, str]]:
    server, source = rpc.Server(), Source(whole.parent)
    server.add(model_files.SERVICE, model_file_service_pb2_grpc.add_ModelFileServiceServicer_to_server, source)
    port = await server.start("127.0.0.1:0")
    yield source, f"127.0.0.1:{port}"
    await server.stop(0)


def assignment(model: model_pb2.Model, *addresses: str, first: int = FIRST, end: int = END) -> Any:
    return dispatch_service_pb2.Assignment(
        model=model,
        shard=model_pb2.Shard(first_layer=first, end_layer=end),
        sources=[dispatch_service_pb2.Peer(node_id=f"n{i}", address=each) for i, each in enumerate(addresses)],
    )


async def fetch(models_dir: Path, asked: Any) -> tuple[Path, list[tuple[int, int]]]:
    models_dir.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else runs here
    said: list[tuple[int, int]] = []
    path = await Fetcher("here", models_dir, SystemClock()).fetch(asked, lambda *progress: said.append(progress))
    return path, said


def flip(path: Path, tensor: str) -> None:
    """Flip a bit of a tensor, as a disk does; again, and it is whole."""
    data = bytearray(path.read_bytes())
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8:header_bytes])[tensor]["data_offsets"]
    data[header_bytes + begin] ^= 1
    path.write_bytes(data)


def tensors(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes by name."""
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    data = data[8 + header_bytes :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items() if name != "__metadata__"}


async def test_only_the_shards_bytes_are_fetched_and_they_are_the_models(
    whole: Path, model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    path, said = await fetch(tmp_path / "here", assignment(model, source[1]))

    model_folder.verify(path, model)
    cut = Cut(FIRST, END, len(model.layers), model.tied_embedding)
    there, here = tensors(whole / WEIGHTS), tensors(path / WEIGHTS)
    assert {name for name in there if cut.needs(name)} == {
        name for name in there if ".layers.1." in name or ".layers.2." in name
    }
    assert all(here[name] == there[name] for name in there if cut.needs(name))
    assert not any(any(here[name]) for name in there if not cut.needs(name))
    assert said[-1] == (source[0].sent_bytes, source[0].sent_bytes)
    assert source[0].sent_bytes < (whole / WEIGHTS).stat().st_size / 2


async def test_what_is_there_is_not_fetched_again_and_another_range_adds_to_it(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    await fetch(tmp_path / "here", assignment(model, source[1]))
    first_bytes = source[0].sent_bytes
    await fetch(tmp_path / "here", assignment(model, source[1]))
    assert source[0].sent_bytes == first_bytes

    await fetch(tmp_path / "here", assignment(model, source[1], first=FIRST, end=END + 1))

    one_layer_bytes = model.layers[END].weight.stored_bytes
    assert source[0].sent_bytes == first_bytes + one_layer_bytes


async def test_a_broken_stream_goes_on_where_it_broke(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    source[0].breaks_after_bytes = 100_000
    _, said = await fetch(tmp_path / "here", assignment(model, source[1]))

    assert said[-1][0] == said[-1][1]
    assert source[0].sent_bytes == said[-1][1]


async def test_a_damaged_chunk_is_fetched_again(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    source[0].damages = 1
    path, _ = await fetch(tmp_path / "here", assignment(model, source[1]))

    model_folder.verify(path, model)


async def test_bytes_are_told_as_they_arrive_long_before_the_disk_has_them(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    _, said = await fetch(tmp_path / "here", assignment(model, source[1]))

    done = [done_bytes for done_bytes, _ in said]
    assert done == sorted(done)
    assert len(set(done)) >= model.layers[FIRST].weight.stored_bytes // 4096


async def test_nobody_is_told_that_all_is_there_before_it_is_known_what_there_is_to_get(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    _, said = await fetch(tmp_path / "here", assignment(model, source[1]))

    assert {total_bytes for _, total_bytes in said} == {source[0].sent_bytes}
    assert [done_bytes == total_bytes for done_bytes, total_bytes in said].index(True) >= len(said) - 2


async def test_a_piece_is_asked_for_after_the_other(
    monkeypatch: pytest.MonkeyPatch, model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    monkeypatch.setattr(model_fetch, "PIECE_BYTES", 10_000)
    path, said = await fetch(tmp_path / "here", assignment(model, source[1]))

    model_folder.verify(path, model)
    assert source[0].sent_bytes == said[-1][1]
    assert source[0].asked >= source[0].sent_bytes // 10_000


async def test_a_shard_that_waits_for_another_of_the_same_model_tells_how_that_one_gets_on(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    fetcher = Fetcher("here", tmp_path, SystemClock())
    await asyncio.gather(
        fetcher.fetch(assignment(model, source[1], first=1, end=2), lambda *said: told.append(("first", *said))),
        fetcher.fetch(assignment(model, source[1], first=2, end=4), lambda *said: told.append(("second", *said))),
    )

    waited = told[: told.index(next(each for each in told if each[0] == "first" and each[1] == each[2])) + 1]
    second_bytes = sum(layer.weight.stored_bytes for layer in model.layers[2:4])
    first = [(done_bytes, total_bytes + second_bytes) for name, done_bytes, total_bytes in waited if name == "first"]
    second = [(done_bytes, total_bytes) for name, done_bytes, total_bytes in waited if name == "second"]
    assert len(second) > 1
    assert second == first[: len(second)]
    assert told[-1][0] == "second"
    assert told[-1][1] == told[-1][2]


async def test_more_nodes_than_are_served_at_once_wait_for_their_turn(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    source[0].goes_on.clear()
    count = model_files.AT_ONCE_MAX + 3
    fetches = [
        asyncio.create_task(fetch(tmp_path / str(number), assignment(model, source[1]))) for number in range(count)
    ]
    await until(lambda: source[0].asked >= count)
    source[0].goes_on.set()

    for path, said in await asyncio.gather(*fetches):
        model_folder.verify(path, model)
        assert said[-1][0] == said[-1][1]


async def test_a_source_that_has_no_turn_to_give_within_its_bound_says_so(
    monkeypatch: pytest.MonkeyPatch, model: model_pb2.Model, whole: Path
) -> None:
    monkeypatch.setattr(model_files, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(model_files, "AT_ONCE_MAX", 0)
    request = model_file_service_pb2.FetchModelFileRequest(
        model_id=model.model_id, digest=model.digest, file_name=WEIGHTS, length=1
    )

    with pytest.raises(rpc.RpcError, match="under way here for 0 s: try again"):
        await anext(model_files.ModelFileServicer(whole.parent).FetchModelFile(request, None))


async def test_what_has_changed_on_the_sources_disk_is_not_sent(
    whole: Path, model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    flip(whole / WEIGHTS, "model.layers.1.mlp.up_proj.weight")

    damaged = r"was not fetched as it is in the model: tensor model\.layers\.1\..* in model\.safetensors is damaged"
    with pytest.raises(FetchError, match=damaged):
        await fetch(tmp_path / "here", assignment(model, source[1]))

    # Nothing of it is kept: whole again, it is fetched again.
    flip(whole / WEIGHTS, "model.layers.1.mlp.up_proj.weight")
    path, _ = await fetch(tmp_path / "here", assignment(model, source[1]))
    model_folder.verify(path, model)


@pytest.mark.parametrize(
    ("was", "became", "told"),
    [
        (b'{"', b'z"', r"node n0 at .*: what was fetched is no safetensors file"),
        (b"data_offsets", b"data_offsetz", r"node n0 at .* entry for tensor .* makes no sense"),
        (b"layers.1.mlp.up", b"layers.9.mlp.up", r"node n0 at .* has no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
async def test_a_header_that_has_changed_on_the_sources_disk_is_read_again_once_it_is_whole(
    whole: Path,
    model: model_pb2.Model,
    source: tuple[Source, str],
    tmp_path: Path,
    was: bytes,
    became: bytes,
    told: str,
) -> None:
    data = (whole / WEIGHTS).read_bytes()
    (whole / WEIGHTS).write_bytes(data.replace(was, became, 1))
    with pytest.raises(FetchError, match=told):
        await fetch(tmp_path / "here", assignment(model, source[1]))

    (whole / WEIGHTS).write_bytes(data)
    path, _ = await fetch(tmp_path / "here", assignment(model, source[1]))
    model_folder.verify(path, model)


async def test_what_one_sources_disk_has_damaged_is_fetched_from_the_next(
    whole: Path, model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "damaged" / "tiny")
    flip(tmp_path / "damaged" / "tiny" / WEIGHTS, "model.layers.1.mlp.up_proj.weight")
    server, damaged = rpc.Server(), Source(tmp_path / "damaged")
    server.add(model_files.SERVICE, model_file_service_pb2_grpc.add_ModelFileServiceServicer_to_server, damaged)
    port = await server.start("127.0.0.1:0")

    path, _ = await fetch(tmp_path / "here", assignment(model, f"127.0.0.1:{port}", source[1]))

    await server.stop(0)
    assert damaged.sent_bytes
    assert (
        tensors(path / WEIGHTS)["model.layers.1.mlp.up_proj.weight"]
        == (tensors(whole / WEIGHTS)["model.layers.1.mlp.up_proj.weight"])
    )


def test_what_has_changed_on_a_nodes_own_disk_is_found_by_the_shard_it_concerns(
    whole: Path, model: model_pb2.Model
) -> None:
    def check(first: int, end: int) -> int:
        pieces: list[None] = []
        models.check(whole, model, model_pb2.Shard(first_layer=first, end_layer=end), lambda: pieces.append(None))
        return len(pieces)

    flip(whole / WEIGHTS, "model.layers.1.mlp.up_proj.weight")

    with pytest.raises(model_folder.ModelFolderError, match=r"^tensor model\.layers\.1\.mlp\.up_proj\.weight in "):
        check(FIRST, END)
    # A piece for each of a layer's nine tensors, and none of others.
    assert check(3, 4) == 9


async def test_the_next_source_is_asked_when_one_is_gone(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    path, _ = await fetch(tmp_path / "here", assignment(model, "127.0.0.1:1", source[1]))

    model_folder.verify(path, model)


async def test_when_nobody_has_it_the_last_try_is_told(model: model_pb2.Model, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"^tiny is not on this node and cannot be fetched; the last try was node n0"):
        await fetch(tmp_path / "here", assignment(model, "127.0.0.1:1"))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a mebibyte."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


async def test_a_disk_without_room_is_refused_before_anything_is_fetched_with_what_is_missing(
    model: model_pb2.Model, source: tuple[Source, str], full_disk: Path
) -> None:
    with pytest.raises(FetchError, match=r"are to be fetched and the disk of its models directory has .* free: free"):
        await fetch(full_disk, assignment(model, source[1]))
    assert source[0].sent_bytes < 20_000  # The header alone, which says what is needed.


async def test_a_disk_full_of_parts_of_other_models_is_told_of_them(
    model: model_pb2.Model, source: tuple[Source, str], full_disk: Path
) -> None:
    other = full_disk / PARTIAL_FOLDER / "other-0123456789ab"
    other.mkdir(parents=True)
    with (other / "model.safetensors").open("wb") as file:
        file.write(bytes(64 << 10))
        file.truncate(1 << 40)
    with pytest.raises(FetchError) as refused:
        await fetch(full_disk, assignment(model, source[1]))
    assert f"(65,536 are parts of other models in {other.parent}, and may go)" in str(refused.value)


async def test_another_model_of_that_name_is_not_taken(
    model: model_pb2.Model, source: tuple[Source, str], tmp_path: Path
) -> None:
    model.digest = "0" * 64
    with pytest.raises(FetchError, match="FAILED_PRECONDITION tiny here has the digest"):
        await fetch(tmp_path / "here", assignment(model, source[1]))


def test_ranges_are_joined_and_subtracted() -> None:
    assert joined([Range(5, 9), Range(0, 3), Range(3, 5), Range(12, 12)]) == [Range(0, 9)]
    assert without([Range(0, 10)], [Range(2, 4), Range(6, 7)]) == [Range(0, 2), Range(4, 6), Range(7, 10)]
    assert without([Range(3, 4)], [Range(0, 10)]) == []


def test_a_middle_rank_needs_neither_embedding_nor_head() -> None:
    middle, last = Cut(1, 2, 4, tied_embedding=True), Cut(3, 4, 4, tied_embedding=True)
    names = (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.up.weight",
        "model.layers.10.x.weight",
        "model.norm.weight",
    )
    assert [middle.needs(name) for name in names] == [False, True, False, False]
    assert [last.needs(name) for name in names] == [True, False, False, True]


def test_what_is_no_header_is_refused() -> None:
    with pytest.raises(model_folder.ModelFolderError, match="no safetensors"):
        partial_model.tensor_ranges(b"\0" * 8 + b"nonsense", Cut(0, 1, 1, tied_embedding=False), 1 << 20)


def test_a_tensor_outside_of_its_file_is_refused() -> None:
    entries = b'{"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    header, cut = len(entries).to_bytes(8, "little") + entries, Cut(0, 1, 1, tied_embedding=False)
    whole = len(header) + 16
    assert partial_model.tensor_ranges(header, cut, whole) == [Range(0, whole)]
    with pytest.raises(model_folder.ModelFolderError, match="a tensor lies outside of it"):
        partial_model.tensor_ranges(header, cut, whole - 1)
