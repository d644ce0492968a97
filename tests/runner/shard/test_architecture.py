"""A model cut anywhere gives what it gives whole: this is what admits a type of model.

Each type is written to a folder with random weights, loaded whole and cut at every layer, and both are
given a prompt in two chunks and then four tokens, each the likeliest.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services import model_folder
from services.runner.shard import architecture, shard_model
from services.runner.shard.architecture import Cut, UnsupportedModelError
from services.runner.shard.sequences import Sequences
from services.runner.shard.shard_model import ModelLoadError, ShardModel, WeightForm
from tests.runner.shard import tiny_configs, tiny_weights
from ullage.v1 import runner_service_pb2

CHUNKS = ((5, 17, 200, 31, 8), (90, 12, 33))


def loaded(folder: Path, *bounds: int, form: WeightForm = "float32") -> list[ShardModel]:
    """The model in `folder`, cut at `bounds`."""
    layers = tiny_configs.LAYERS
    cuts = [Cut(first, end, layers) for first, end in pairwise((0, *bounds, layers))]
    return [shard_model.load(folder, cut, form, on_cpu=True, progress=lambda done, total: None) for cut in cuts]


def run(shards: list[ShardModel]) -> tuple[list[int], list[mx.array]]:
    """The tokens chosen and all the scores they were chosen by."""
    caches = [shard.new_cache() for shard in shards]
    tokens: list[int] = []
    all_scores: list[mx.array] = []

    def step(inputs: mx.array) -> None:
        for shard, cache in zip(shards, caches, strict=True):
            inputs = shard.forward(inputs, cache)
        scores = shards[-1].scores(inputs)
        all_scores.append(scores)
        tokens.append(int(str(mx.argmax(scores).item())))

    for chunk in CHUNKS:
        step(mx.array(chunk))
    for _ in range(4):
        step(mx.array(tokens[-1:]))
    return tokens, all_scores


@pytest.fixture(scope="module")
def of_type(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of each type, written once."""
    root = tmp_path_factory.mktemp("types")

    def folder(model_type: str) -> Path:
        found = root / model_type
        return found if found.exists() else tiny_weights.write(found, model_type)

    return folder


def kept(entry: Any) -> tuple[int, int]:
    """Numbers that a layer's cache keeps of one token, and of a sequence of whatever length."""
    if hasattr(entry, "caches"):
        of_tokens, of_sequence = zip(*(kept(each) for each in entry.caches), strict=True)
        return sum(of_tokens), sum(of_sequence)
    if hasattr(entry, "cache"):
        return 0, sum(array.size for array in entry.cache if array is not None)
    arrays = [array for array in (entry.keys, entry.values) if array is not None]
    return sum(array.shape[1] * array.shape[3] for array in arrays), 0


@pytest.mark.parametrize("model_type", sorted(model_folder.ADMITTED))
def test_a_model_cut_at_any_layer_gives_what_it_gives_whole_in_the_cache_it_was_promised(
    model_type: str, of_type: Callable[[str], Path]
) -> None:
    folder = of_type(model_type)
    tokens, scores = run(loaded(folder))
    assert all(bool(mx.isfinite(each).all()) for each in scores)
    for bound in range(1, tiny_configs.LAYERS):
        cut_tokens, cut_scores = run(loaded(folder, bound))
        assert cut_tokens == tokens
        assert all(bool(mx.array_equal(cut, whole)) for cut, whole in zip(cut_scores, scores, strict=True))


@pytest.mark.parametrize("model_type", sorted(model_folder.ADMITTED))
def test_a_model_takes_the_weights_and_the_cache_it_was_weighed_with(
    model_type: str, of_type: Callable[[str], Path]
) -> None:
    folder = of_type(model_type)
    model = tiny_weights.prepared(folder)
    told: list[int] = []
    cuts = [Cut(0, 2, 5), Cut(2, 5, 5)]
    shards = [
        shard_model.load(folder, cut, "float32", on_cpu=True, progress=lambda done, total: told.append(total))
        for cut in cuts
    ]
    held = [told[0], told[-1]]
    parameters = [layer.weight.parameters for layer in model.layers]
    copy = model.embedding.parameters if model.tied_embedding else 0
    first = model.embedding.parameters + sum(parameters[:2])
    assert held == [4 * first, 4 * (sum(parameters[2:]) + model.head.parameters + copy)]

    inputs = mx.array(CHUNKS[0])
    for shard, layers in zip(shards, (model.layers[:2], model.layers[2:]), strict=True):
        cache = shard.new_cache()
        inputs = shard.forward(inputs, cache)
        mx.eval(inputs)
        weighed = [(layer.kv_elements_per_token, layer.state_elements) for layer in layers]
        assert [kept(entry) for entry in cache] == weighed
        windows = [getattr(entry, "max_size", None) for entry in cache]
        assert windows == [layer.kv_window_tokens if layer.HasField("kv_window_tokens") else None for layer in layers]


@pytest.mark.parametrize("model_type", sorted(model_folder.ADMITTED))
def test_sequences_side_by_side_go_on_as_they_would_alone(model_type: str, of_type: Callable[[str], Path]) -> None:
    if not model_folder.ADMITTED[model_type].side_by_side:
        pytest.skip("its sequences are computed one after the other")
    (model,) = loaded(of_type(model_type))
    sequences = Sequences(model.new_cache)
    sampling = runner_service_pb2.SamplingParameters()
    prompts = {"a": CHUNKS[0], "b": CHUNKS[1], "c": CHUNKS[0] + CHUNKS[1]}
    alone: dict[str, list[mx.array]] = {}
    for name, prompt in prompts.items():
        # Twice: once to the end alone, and once as far as the prompt reaches.
        for key in (name, name.upper()):
            scores = model.scores(model.forward(mx.array(prompt), sequences.begun(key, sampling).caches))
        alone[name] = [scores]
        for token in (3, 5, 7, 11):
            hidden = model.forward(mx.array([token]), sequences.alone(name).caches)
            alone[name].append(model.scores(hidden))
    # C joins late, A leaves early, and both are right all the while.
    for place, (token, members) in enumerate([(3, "AB"), (3, "C"), (5, "ABC"), (7, "CB"), (7, "A"), (11, "BAC")]):
        batch = sequences.together(list(members))
        scores = model.scores_batch(model.forward_batch(mx.array([token] * len(members)), batch.caches))
        for row, name in enumerate(members):
            expected = alone[name.lower()][{3: 1, 5: 2, 7: 3, 11: 4}[token]]
            assert float(str(mx.abs(scores[row] - expected).max().item())) < 1e-3, (place, name)


@pytest.mark.parametrize("form", ["float32", "stored"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_model_cut_in_three_gives_what_it_gives_whole(form: WeightForm, tied: bool, tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", bits=4, dtype=mx.float16, tie_word_embeddings=tied)
    tokens, scores = run(loaded(folder, form=form))
    cut_tokens, cut_scores = run(loaded(folder, 1, 4, form=form))
    assert cut_tokens == tokens
    assert all(bool(mx.array_equal(cut, whole)) for cut, whole in zip(cut_scores, scores, strict=True))


def test_dequantising_at_load_changes_no_token(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", bits=8, dtype=mx.float16)
    assert run(loaded(folder, form="stored"))[0] == run(loaded(folder, form="float32"))[0]


def test_every_type_of_the_runtime_is_admitted_or_refused_with_a_reason() -> None:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    files = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    types = {file.stem for file in files if re.search(r"^class ModelArgs", file.read_text(), re.MULTILINE)}
    utils = Path(spec.submodule_search_locations[0], "utils.py").read_text()
    # And those that it computes by the module of another type.
    [others] = re.findall(r"^MODEL_REMAPPING = (\{.*?^\})", utils, re.MULTILINE | re.DOTALL)
    types |= set(ast.literal_eval(others))
    assert types - set(model_folder.ADMITTED) - set(model_folder.REFUSED) == set()
    assert set(model_folder.ADMITTED) & set(model_folder.REFUSED) == set()


def test_a_type_no_test_covers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv7' cannot be split over nodes yet: its layers"):
        architecture.admit({"model_type": "rwkv7"})


def test_kinds_of_layers_that_no_test_covers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="full_attention, sliding_attention"):
        architecture.admit({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]})


def test_a_foreign_quantisation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="quantised as 'gptq'"):
        architecture.admit({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})


def test_weights_of_another_shape_than_the_config_says_are_refused(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(ModelLoadError, match="the weights in tiny are not those its config"):
        loaded(folder)


def reconfigured(folder: Path, without: Collection[str] = (), **changes: Any) -> Path:
    """The model in `folder` with another config.json."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**kept, **changes}))
    return folder


def test_a_number_that_json_has_no_word_for_is_read_as_newer_files_write_it(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", "mamba2", time_step_limit=[0.0, float("inf")])
    plain, _ = run(loaded(folder))
    reconfigured(folder, time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert run(loaded(folder))[0] == plain


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("model_type", "older", "newer"),
    [
        ("llama", {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_type": "default"}),
        ("qwen3", {"rope_theta": 500.0}, {"rope_theta": 500.0, "rope_type": "default"}),
        # Without it by its older name the runtime made no model of this type.
        (
            "glm4_moe",
            {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
            {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        ("mistral", {"rope_theta": 500.0, "rope_scaling": LINEAR}, {"rope_theta": 500.0, **LINEAR}),
        (
            "phi",
            {"rope_theta": 500.0, "partial_rotary_factor": 0.25},
            {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        (
            "gemma3_text",
            {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": LINEAR},
            {
                "full_attention": {"rope_theta": 500.0, **LINEAR},
                "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
            },
        ),
    ],
)
def test_rotary_positions_are_read_from_newer_files_as_from_older_ones(
    model_type: str, older: dict[str, Any], newer: dict[str, Any], tmp_path: Path
) -> None:
    usual = tiny_weights.write(tmp_path / "usual", model_type)
    _, as_usual = run(loaded(usual))
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor")
    before = reconfigured(tiny_weights.write(tmp_path / "before", model_type), **older)
    since = reconfigured(tiny_weights.write(tmp_path / "since", model_type), without=names, rope_parameters=newer)
    _, expected = run(loaded(before))
    _, scores = run(loaded(since, 2))
    assert all(bool(mx.array_equal(*both)) for both in zip(expected, scores, strict=True))
    assert not any(bool(mx.array_equal(*both)) for both in zip(expected, as_usual, strict=True))


def test_a_config_that_the_runtime_makes_no_model_of_is_refused_with_what_it_said(tmp_path: Path) -> None:
    folder = reconfigured(tiny_weights.write(tmp_path / "tiny"), rope_scaling={"rope_type": "llama3"})
    with pytest.raises(
        UnsupportedModelError, match=r"config.json of this llama .*\(KeyError: 'factor'\): copy it again"
    ):
        loaded(folder)


def with_more(folder: Path, **more: mx.array) -> Path:
    """The model in `folder` with tensors added to its file."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **more})
    return folder


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        # Those that the runtime throws away by itself, and some of the many that it would not know.
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("qwen3", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("stablelm", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("internlm2", "model.layers.0.attention.rotary_emb.inv_freq"),
        ("gpt_bigcode", "transformer.h.0.attn.bias"),
    ],
)
def test_what_the_runtime_computes_by_itself_may_be_in_the_files_as_it_is_not_weighed(
    model_type: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", model_type)
    plain, scores = run(loaded(folder))
    weighed = tiny_weights.prepared(folder).layers[0].weight
    with_more(folder, **{name: mx.ones((8,))})
    assert tiny_weights.prepared(folder).layers[0].weight == weighed
    tokens, same = run(loaded(folder, 2))
    assert tokens == plain
    assert all(bool(mx.array_equal(*both)) for both in zip(scores, same, strict=True))


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("model_type", ["llama", "exaone4", "phi3", "starcoder2", "gemma2"])
def test_a_copy_of_the_head_in_the_files_of_a_tied_model_is_left_where_it_is(
    model_type: str, bits: int | None, tmp_path: Path
) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", model_type, bits=bits, tie_word_embeddings=True)
    plain, _ = run(loaded(folder))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    copy = {
        f"lm_head.{name.rpartition('.')[2]}": array
        for name, array in weights.items()
        if model_folder.part_of(name) == "embedding"
    }
    with_more(folder, **copy)
    model = tiny_weights.prepared(folder)
    assert model.tied_embedding
    assert model.head.parameters <= 128
    assert run(loaded(folder, 2))[0] == plain


def test_loading_tells_how_many_bytes_are_in_memory(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny")
    told: list[tuple[int, int]] = []
    shard_model.load(folder, Cut(0, 2, 5), "float32", on_cpu=True, progress=lambda *bytes_: told.append(bytes_))
    layer_bytes = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64)
    embedding_bytes = 4 * tiny_configs.VOCABULARY * 64
    total_bytes = embedding_bytes + 2 * layer_bytes
    assert told == [
        (0, total_bytes),
        (embedding_bytes, total_bytes),
        (embedding_bytes + layer_bytes, total_bytes),
        (total_bytes, total_bytes),
    ]


@pytest.mark.parametrize("cut", [Cut(0, 2, 5), Cut(2, 5, 5)])
def test_weights_that_give_no_numbers_are_found_by_trying(cut: Cut, tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model = shard_model.load(folder, cut, "float32", on_cpu=True, progress=lambda done, total: None)
    shard_model.try_out(model, cut, hidden_size=64, tokens=128)

    damaged = f"model.layers.{cut.first_layer}.mlp.up_proj.weight"
    weights[damaged] = weights[damaged] * mx.nan
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    model = shard_model.load(folder, cut, "float32", on_cpu=True, progress=lambda done, total: None)
    with pytest.raises(ModelLoadError, match=rf"layers {cut.first_layer} to {cut.end_layer - 1} give no numbers"):
        shard_model.try_out(model, cut, hidden_size=64, tokens=128)
