"""`ullage models`, on folders small enough to make in a test, against a master that keeps models in a dict."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest

from services import model_folder
from services.cli import model_progress, model_store, model_wheel
from services.cli.__main__ import run
from services.cli.failure import CommandError, ExitCode
from services.cli.model_source import FolderSource, GgufSource, WheelSource, parse_source
from services.cli.model_wheel import Wheel
from tests import tiny_models
from tests.cli.conftest import Serve
from tests.runner import tiny_gguf
from ullage.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc

SILENT = model_progress.Silent()


class KnownModels(model_service_pb2_grpc.ModelServiceServicer):
    """A master's models, without the rest of it."""

    def __init__(self) -> None:
        self.models: dict[str, model_pb2.Model] = {}
        self.refusal = ""

    def RegisterModel(
        self, request: model_service_pb2.RegisterModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.RegisterModelResponse:
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self.models[request.model.model_id] = request.model
        return model_service_pb2.RegisterModelResponse(model=request.model)

    def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.GetModelResponse:
        if request.model_id not in self.models:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model is called {request.model_id!r}")
        return model_service_pb2.GetModelResponse(model=self.models[request.model_id])

    def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.ListModelsResponse:
        """One to a page, so that pages are followed."""
        names = sorted(self.models)
        start = int(request.page_token or 0)
        token = str(start + 1) if start + 1 < len(names) else ""
        return model_service_pb2.ListModelsResponse(
            models=[self.models[name] for name in names[start : start + 1]], next_page_token=token
        )

    def RemoveModel(
        self, request: model_service_pb2.RemoveModelRequest, context: grpc.ServicerContext
    ) -> model_service_pb2.RemoveModelResponse:
        if self.models.pop(request.model_id, None) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model is called {request.model_id!r}")
        return model_service_pb2.RemoveModelResponse()


@pytest.fixture
def known() -> KnownModels:
    return KnownModels()


@pytest.fixture(autouse=True)
def environment(serve: Serve, known: KnownModels, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    address = serve(lambda server: model_service_pb2_grpc.add_ModelServiceServicer_to_server(known, server))
    monkeypatch.setenv("ULLAGE_MASTER", address)
    monkeypatch.setenv("ULLAGE_MODELS_DIR", str(models))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_models.write(tmp_path / "Tiny Model")


def test_a_folder_is_prepared_and_registered(
    source: Path, models: Path, known: KnownModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "add", str(source)]) == 0
    out = capsys.readouterr().out
    assert "tiny-model is ready: 2 layers, 157 KiB, bfloat16, in " in out
    assert "registered with the master at 127.0.0.1:" in out
    model = model_folder.read_manifest(models / "tiny-model")
    assert known.models == {"tiny-model": model}
    assert model.source == "folder:Tiny Model"
    model_folder.verify(models / "tiny-model", model, deep=True)
    assert [path.name for path in models.iterdir()] == ["tiny-model"]


def test_weights_are_linked_where_the_disk_allows(source: Path, models: Path) -> None:
    assert run(["models", "add", str(source)]) == 0
    assert (models / "tiny-model" / "model.safetensors").samefile(source / "model.safetensors")
    assert not (models / "tiny-model" / "config.json").samefile(source / "config.json")


def test_the_same_again_says_so_and_changes_nothing(
    source: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["models", "add", str(source)])
    before = (models / "tiny-model" / "ullage.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run(["models", "add", str(source)]) == 0
    assert "tiny-model was there already, the same: 2 layers" in capsys.readouterr().out
    assert (models / "tiny-model" / "ullage.json").stat().st_mtime_ns == before


def test_another_model_does_not_take_an_id_over(
    source: Path, tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["models", "add", str(source), "--name", "tiny"])
    other = tiny_models.write(tmp_path / "other", max_position_embeddings=1024)
    assert run(["models", "add", str(other), "--name", "tiny"]) == 1
    assert "another model is called 'tiny' on this machine (from folder:Tiny Model)" in capsys.readouterr().err
    assert model_folder.read_manifest(models / "tiny").context_tokens_max == 512


def test_a_damaged_model_is_made_again(source: Path, models: Path) -> None:
    run(["models", "add", str(source)])
    folder = models / "tiny-model"
    (folder / "tokenizer.json").unlink()
    assert run(["models", "add", str(source)]) == 0
    model_folder.verify(folder, model_folder.read_manifest(folder), deep=True)
    assert [path.name for path in models.iterdir()] == ["tiny-model"]


def test_a_folder_of_the_users_own_is_never_replaced(
    source: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "tiny-model").mkdir(parents=True)
    assert run(["models", "add", str(source)]) == 1
    assert "tiny-model is there and was not made by `ullage models add`" in capsys.readouterr().err


def test_a_model_that_cannot_run_leaves_nothing_behind(
    tmp_path: Path, models: Path, known: KnownModels, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tiny_models.write(tmp_path / "bad", model_type="rwkv7")
    assert run(["models", "add", str(bad)]) == 1
    assert "error (MODEL_INVALID): architecture 'rwkv7' cannot be split over nodes yet" in capsys.readouterr().err
    assert (list(models.iterdir()), known.models) == ([], {})


HOLDS_A_WORKPLACE = """
import sys
from pathlib import Path
from services.cli.model_workplace import workplace
with workplace(Path(sys.argv[1]), "tiny") as folder:
    (folder / "half of a model").write_text("as it was")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no folder can be locked there")
def test_what_a_killed_command_left_goes_with_the_next_and_what_another_works_on_stays(
    source: Path, models: Path
) -> None:
    models.mkdir(parents=True, exist_ok=True)

    def at_work() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS_A_WORKPLACE, str(models)]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with at_work() as working, at_work() as killed:
        folders = []
        for process in (working, killed):
            assert process.stdout is not None
            folders.append(Path(process.stdout.readline().strip()))
        killed.kill()
        killed.wait()
        model_store.prepare(FolderSource(source), models, "tiny", SILENT)
        assert [folder.exists() for folder in folders] == [True, False]
        # It ends as it would, and leaves nothing.
        working.communicate()
    assert sorted(path.name for path in models.iterdir()) == ["tiny"]


def test_a_gguf_file_is_converted_once(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = tiny_gguf.write(tmp_path / "Tiny.Q4_1.gguf")
    assert run(["models", "add", str(gguf), "--offline"]) == 0
    model = model_folder.read_manifest(models / "tiny.q4_1")
    assert model.source.startswith("gguf:Tiny.Q4_1.gguf@")
    assert model.quantization == "4-bit, groups of 32"
    capsys.readouterr()
    assert run(["models", "add", str(gguf), "--offline"]) == 0
    assert "tiny.q4_1 was there already, the same" in capsys.readouterr().out


def test_a_gguf_file_cut_short_is_refused_in_the_converters_words(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = tiny_gguf.write(tmp_path / "tiny.gguf")
    gguf.write_bytes(gguf.read_bytes()[:-1])
    assert run(["models", "add", str(gguf)]) == 1
    assert "error (CONVERSION_FAILED): tiny.gguf has 50,111 of 50,112 bytes" in capsys.readouterr().err
    assert list(models.iterdir()) == []


def test_without_a_master_the_model_is_ready_and_the_exit_code_says_the_rest(
    source: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "add", str(source), "--master", "127.0.0.1:1"]) == ExitCode.UNAVAILABLE
    err = capsys.readouterr().err
    assert "tiny-model is ready in " in err
    assert "but not registered: no master answers at 127.0.0.1:1" in err
    assert "then run this command again" in err
    assert (models / "tiny-model" / "ullage.json").is_file()


def test_add_prints_json_for_programs(source: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "add", str(source), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"]["model_id"] == "tiny-model"
    assert (printed["folder"], printed["fresh"], printed["registered"]) == (str(models / "tiny-model"), True, True)


def test_list_shows_every_page(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "three"):
        run(["models", "add", str(source), "--name", name])
    capsys.readouterr()
    assert run(["models", "list"]) == 0
    rows = [line.split()[:6] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["MODEL", "one", "three", "two"]
    assert rows[1] == ["one", "llama", "2", "157", "KiB", "512"]
    assert run(["models", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["models"]) == 3


def test_list_of_nothing_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "list"]) == 0
    assert capsys.readouterr().out == "no models yet: add one, e.g. `ullage models add smollm2-135m`\n"


def test_show_says_what_each_part_weighs(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["models", "add", str(source)])
    capsys.readouterr()
    assert run(["models", "show", "tiny-model", "--context", "300"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny-model: llama, 157 KiB, bfloat16, folder:Tiny Model"
    assert lines[2].split() == ["layers", "0-1", "2", "73,984", "147,968", "73,984", "289", "KiB"]
    assert lines[3].split() == ["embedding", "1", "12,800", "12,800", "6,400", "25", "KiB"]
    # 300 tokens take 512, as the cache grows by 256: 512 x 2 layers x 64 numbers x 4 bytes.
    assert lines[5] == (
        "KV of a token: 128 numbers; 512 B as float32 (256 KiB for 300 tokens), "
        "256 B as float16 (128 KiB for 300 tokens)"
    )


def test_show_of_an_unknown_model_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "show", "nothing"]) == ExitCode.NOT_FOUND
    assert "no model is called 'nothing'" in capsys.readouterr().err


def test_remove_forgets_a_model_and_keeps_its_files(source: Path, models: Path, known: KnownModels) -> None:
    run(["models", "add", str(source)])
    assert run(["models", "remove", "tiny-model"]) == 0
    assert known.models == {}
    assert (models / "tiny-model" / "ullage.json").is_file()
    assert run(["models", "remove", "tiny-model"]) == ExitCode.NOT_FOUND


def test_remove_with_files_removes_them_and_not_their_source(
    source: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["models", "add", str(source), "--offline"])
    capsys.readouterr()
    assert run(["models", "remove", "tiny-model", "--files", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model_id": "tiny-model", "forgotten": False, "files_removed": True}
    assert list(models.iterdir()) == []
    model_folder.check(source)
    assert run(["models", "remove", "tiny-model", "--files"]) == ExitCode.NOT_FOUND


@pytest.mark.parametrize("model_id", ["../outside", ".", ".."])
def test_remove_leads_nowhere_else(model_id: str, source: Path, models: Path) -> None:
    models.mkdir()
    model_folder.write_manifest(source, model_folder.describe(source, model_id="x", source=""))
    source.rename(models.parent / "outside")
    assert not model_store.remove(models, model_id)
    assert (models.parent / "outside" / "ullage.json").is_file()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/nowhere/at/all", "/nowhere/at/all is not there: give the folder of a Hugging Face or MLX model"),
        ("hf:no-owner", "hf:no-owner: write hf:OWNER/NAME"),
        ("hf:a/b/c", "hf:a/b/c: write hf:OWNER/NAME"),
    ],
)
def test_what_is_no_source_is_wrong_usage(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "add", typed]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_a_file_of_another_kind_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CommandError, match=r"model.bin is no GGUF file \(\*.gguf\) and no folder"):
        parse_source(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("name", "model_id"), [("Mistral 7B (v0.3)", "mistral-7b-v0.3-"), ("...", "model"), (".Hidden", "hidden")]
)
def test_an_id_is_made_of_the_sources_name(name: str, model_id: str) -> None:
    assert model_store.model_id_of(FolderSource(Path("/models") / name), None) == model_id


def test_a_chosen_id_is_lower_cased_and_never_a_path() -> None:
    source = GgufSource(Path("/models/a.gguf"))
    assert model_store.model_id_of(source, "My-Model.v1") == "my-model.v1"
    for name in ("../up", ".hidden", "a/b", "", "a b", "x" * 101):
        with pytest.raises(CommandError, match="cannot be a model's id"):
            model_store.model_id_of(source, name)


def test_a_hub_that_cannot_be_reached_says_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: Path
) -> None:
    # Asked of a hub that takes no connections: in a process of its own, since its client reads this once.
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "hf")}
    arguments = (sys.executable, "-m", "services.cli", "models", "add", "hf:owner/name", "--offline")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "hf:owner/name: the hub cannot be reached" in done.stderr
    assert list(models.iterdir()) == []


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel with a tiny GGUF file, on the only index pip is told of: a folder."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "tiny_model-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf.write(tmp_path / "tiny.gguf"), "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1\n")
        archive.writestr(
            "tiny_model-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Wheel("tiny-model==1", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "tiny_model/tiny.gguf")


def test_a_wheel_is_fetched_once(tmp_path: Path, models: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = model_store.prepare(WheelSource("tiny", wheel, cache), models, "tiny", SILENT)
    assert (first.fresh, first.model.source, len(first.model.layers)) == (True, "pypi:tiny-model==1", 2)
    assert [path.name for path in cache.iterdir()] == [wheel.file_name]
    monkeypatch.delenv("PIP_FIND_LINKS")
    again = model_store.prepare(WheelSource("tiny", wheel, cache), models, "another", SILENT)
    assert (again.fresh, again.model.digest) == (True, first.model.digest)


def test_a_wheel_of_another_checksum_is_not_used(tmp_path: Path, models: Path, wheel: Wheel) -> None:
    expected = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(CommandError, match=r"is not tiny_model-1-py3-none-any.whl with sha256 000000000000…") as caught:
        model_store.prepare(WheelSource("tiny", expected, tmp_path / "cache"), models, "tiny", SILENT)
    assert caught.value.reason == "CHECKSUM_MISMATCH"
    assert [*models.iterdir(), *(tmp_path / "cache").iterdir()] == []


def test_a_wheel_that_cannot_be_had_says_where_to_put_it(tmp_path: Path, models: Path, wheel: Wheel) -> None:
    absent = dataclasses.replace(wheel, requirement="tiny-model==2")
    with pytest.raises(CommandError, match=r"tiny-model==2 could not be fetched .* or put tiny_model-1") as caught:
        model_store.prepare(WheelSource("tiny", absent, tmp_path / "cache"), models, "tiny", SILENT)
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.model
def test_smollm2_is_there_already_the_second_time(smollm2_folder: Path) -> None:
    # With no cache to take the wheel from: what is prepared needs none.
    source = WheelSource("smollm2-135m", model_wheel.SMOLLM2_135M, Path("/nowhere"))
    again = model_store.prepare(source, smollm2_folder.parent, "smollm2-135m", SILENT)
    assert (again.fresh, again.folder, len(again.model.layers)) == (False, smollm2_folder, 30)


def test_the_master_says_no_and_the_folder_is_ready(
    source: Path, models: Path, known: KnownModels, capsys: pytest.CaptureFixture[str]
) -> None:
    known.refusal = "another digest is placed right now: release it first"
    assert run(["models", "add", str(source)]) == 1
    assert "but not registered: another digest is placed right now: release it first" in capsys.readouterr().err


def test_what_a_model_will_weigh_is_computed_from_its_config_and_told_to_the_master(
    tmp_path: Path, known: KnownModels, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.write(tmp_path / "big")
    (folder / "model.safetensors").unlink()

    assert run(["models", "estimate", str(folder)]) == ExitCode.OK

    model = known.models["big"]
    assert model.computed_from_config
    assert model.layers == model_folder.describe(tiny_models.write(folder), model_id="big", source="").layers
    said = capsys.readouterr().out
    assert said.startswith("big will take about 157 KiB: 2 layers, bfloat16; computed\n")
    assert said.endswith("see where it would go: ullage place big --dry-run\n")


def test_a_source_without_a_config_is_not_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "estimate", str(tiny_gguf.write(tmp_path / "a.gguf"))]) == ExitCode.USAGE
    assert "has no config.json: `ullage models add` reads what it weighs" in capsys.readouterr().err
