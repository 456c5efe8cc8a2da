"""`python -m jaxinfer.convert`: what is served from a converted folder equals what its source gives, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint.orbax import is_native_checkpoint, read_manifest
from jaxinfer.convert import main
from jaxinfer.engine.load import load_model, named_leaves
from jaxinfer.tokenizer import load_tokenizer

from .checkpoint.make_tiny_llama import FIXTURE, write_gguf, write_hf

GOLDEN = Path(__file__).parent / "models" / "golden"
MESSAGES = [{"role": "user", "content": "the ring of 日本 🙂"}]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_hf(tmp_path_factory.mktemp("source") / "tiny-hf")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.6}))
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")


def assert_same_parameters(left: Path, right: Path, dtype: str) -> None:
    one, two = load_model(left, dtype), load_model(right, dtype)
    assert one.config == two.config
    first, second = named_leaves(one.params), named_leaves(two.params)
    assert list(first) == list(second)
    for name, array in first.items():
        assert array.dtype == second[name].dtype == dtype
        np.testing.assert_array_equal(np.asarray(array).view(np.uint8), np.asarray(second[name]).view(np.uint8), name)


def assert_same_tokenizer(left: Path, right: Path) -> None:
    one, two = load_tokenizer(left), load_tokenizer(right)
    for text in ("the ring of 日本 🙂", "<|im_start|>and 123\n\n", ""):
        ids = one.encode(text)
        assert two.encode(text) == ids and two.decode(ids) == one.decode(ids) == text
    assert two.apply_chat_template(MESSAGES) == one.apply_chat_template(MESSAGES)
    for name in ("bos_token_id", "eos_token_ids", "special_ids", "vocab_size", "family", "chat_template"):
        assert getattr(one, name) == getattr(two, name)


def answers(model: Path) -> list[object]:
    """What every number of two greedy and two sampled answers is."""
    with LLM(str(model), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, verbose=False) as llm:
        prompts = [llm.tokenizer.apply_chat_template(MESSAGES), llm.tokenizer.encode("and then")]
        found = []
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, logprobs=5, ignore_eos=True)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
            found += [(one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]
        return found


def test_the_committed_checkpoint_is_its_source(hf: Path) -> None:
    assert_same_parameters(FIXTURE, hf, "float32")
    assert_same_tokenizer(FIXTURE, hf)
    assert sum(path.stat().st_size for path in FIXTURE.rglob("*") if path.is_file()) < 200_000
    found = answers(FIXTURE)
    assert found == answers(hf) and found[0] != found[1] and found[0] != found[2]


def test_gguf(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "store" / "tiny"
    assert main([str(gguf), str(made), "--dtype", "float32"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert not printed.err and [line.split(":")[0] for line in lines] == ["model", "tokenizer", "loaded", "saved"]
    assert "111,232 bytes of float32 parameters in" in lines[2] and f" bytes in {made} in " in lines[3]
    manifest = read_manifest(made)
    assert (manifest.source, manifest.dtype) == ("tiny.gguf", "float32")
    assert_same_tokenizer(made, gguf)
    for dtype in ("float32", "bfloat16", "float16"):
        assert_same_parameters(made, gguf, dtype)
    gguf_answers = answers(gguf)
    gguf.rename(tmp_path / "away")
    assert answers(made) == gguf_answers
    (tmp_path / "away").rename(gguf)


@pytest.mark.full
def test_the_default_model(smollm2_path: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        assert main([str(smollm2_path), str(tmp_path / dtype), "--dtype", dtype]) == 0
        assert_same_parameters(tmp_path / dtype, smollm2_path, dtype)
    assert_same_tokenizer(tmp_path / "float32", smollm2_path)
    assert answers(tmp_path / "float32") == answers(smollm2_path)


@pytest.mark.parametrize("variant", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_variant_of_the_family(variant: str, hf: Path, tmp_path: Path) -> None:
    """Their folders bring no tokenizer; whether the logits are right is for tests/models."""
    assert main([str(GOLDEN / variant), str(tmp_path / "made"), "--tokenizer", str(hf), "--dtype", "float32"]) == 0
    assert_same_parameters(tmp_path / "made", GOLDEN / variant, "float32")


def test_companions_travel_and_conversions_chain(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "hf")
    (source / "chat_template.jinja").write_text("from a file: {{ messages[0].content }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert main([str(source), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert main([str(tmp_path / "half"), str(tmp_path / "again"), "--dtype", "float32"]) == 0
    shutil.rmtree(source / "additional_chat_templates")
    tokenizer = load_tokenizer(tmp_path / "again")
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).startswith("from a file: the ring")
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"type": "function"}], tokenize=False) == "tools"
    assert_same_parameters(tmp_path / "half", hf, "bfloat16")
    assert_same_parameters(tmp_path / "again", tmp_path / "half", "bfloat16")


def test_a_hub_id(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def download(repo: str, **options: object) -> str:
        asked.append((repo, options["revision"]))
        return str(hf)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert main(["org/name", str(tmp_path / "made"), "--revision", "v1"]) == 0
    assert asked == [("org/name", "v1")] and read_manifest(tmp_path / "made").source == "org/name at v1"
    assert main(["org/name", str(tmp_path / "too"), "--tokenizer", "org/words"]) == 0
    assert asked[1:] == [("org/name", None), ("org/words", None)]


def test_another_tokenizer(hf: Path, gguf: Path, tmp_path: Path) -> None:
    for index, (source, other) in enumerate([(hf, gguf), (gguf, hf), (gguf, hf / "tokenizer.json")]):
        made = tmp_path / str(index)
        assert main([str(source), str(made), "--tokenizer", str(other)]) == 0
        assert_same_tokenizer(made, other)
        assert load_model(made, "float32").generation_config.get("temperature") == (0.6 if source == hf else None)


def test_a_destination_that_is_there(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "tiny"
    assert main([str(hf), str(made), "--dtype", "bfloat16"]) == 0
    assert main([str(hf), str(made)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {made}: exists already;")
    assert read_manifest(made).dtype == "bfloat16"
    assert main([str(made), str(made), "--overwrite", "--dtype", "float32"]) == 0
    assert read_manifest(made).dtype == "float32"
    assert_same_tokenizer(made, hf)
    assert main([str(hf), str(tmp_path), "--overwrite"]) == 1
    assert "is not a converted checkpoint and is not overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def without_tokenizer(hf: Path, folder: Path) -> Path:
    source = shutil.copytree(hf, folder / "hf")
    (source / "tokenizer.json").unlink()
    return source


def truncated(hf: Path, folder: Path) -> Path:
    source = shutil.copytree(hf, folder / "hf")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return source


def unknown_architecture(hf: Path, folder: Path) -> Path:
    return write_gguf(folder / "mamba.gguf", architecture="mamba")


def absent(hf: Path, folder: Path) -> Path:
    return folder / "gone.gguf"


@pytest.mark.parametrize(
    ("make_source", "message"),
    [
        (without_tokenizer, "tokenizer.json: no such file"),
        (truncated, "model.safetensors: tensor"),
        (unknown_architecture, "mamba.gguf: general.architecture 'mamba' is not supported; supported: llama"),
        (absent, "is neither an existing file or folder nor a hub id"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(make_source, message, hf, tmp_path, capsys) -> None:
    source = make_source(hf, tmp_path)
    assert main([str(source), str(tmp_path / "store" / "tiny")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "store").exists()


def test_a_disk_without_room_is_refused_first(hf: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert main([str(hf), str(tmp_path / "tiny"), "--dtype", "bfloat16"]) == 1
    assert "tiny: needs 55,616 bytes and the disk has 1,000 free; make room" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_leaves_nothing(hf: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxinfer.checkpoint.orbax._save_params", fail)
    assert main([str(hf), str(tmp_path / "tiny")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command(hf: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxinfer.convert"]
    done = subprocess.run([*command, hf, tmp_path / "tiny"], capture_output=True, text=True, check=True)
    assert "saved: " in done.stdout and is_native_checkpoint(tmp_path / "tiny")
    failed = subprocess.run([*command, hf, tmp_path / "tiny"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and failed.stderr.count("\n") == 1 and "exists already" in failed.stderr
    usage = subprocess.run([*command, hf, "x", "--dtype", "int3"], capture_output=True, text=True, check=False)
    assert usage.returncode == 2 and "int3" in usage.stderr


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format_version"], 2, r"jaxinfer\.json: format version 2 is not 1"),
        (["config", "architecture"], "mamba", r"jaxinfer\.json: architecture 'mamba' is not supported; supported: lla"),
        (["config", "num_layers"], "2", r"jaxinfer\.json: model config: num_layers is '2', not int"),
        (["config", "num_layers"], None, r"jaxinfer\.json: model config: num_layers is 'None', not int"),
        (["config", "num_layers"], 10**12, r"layers/.* is \(2, .*\) and should be \(1000000000000,"),
        (["config", "num_kv_heads"], 3, r"num_heads=4 is not a multiple of num_kv_heads=3"),
        (["config", "embed_dim"], 64, r"embed is \(288, 32\) and should be \(288, 64\)"),
        (["config", "tie_embeddings"], False, "1 tensors are missing: head"),
        (["config", "extra"], 1, "unknown field 'extra'"),
        (["tensors", "embed", "shape"], [288, 16], r"embed is \(288, 16\) and should be \(288, 32\)"),
        (["tensors", "more"], {"shape": [1], "dtype": "float32", "num_bytes": 4}, "not used .*: more"),
    ],
)  # fmt: skip
def test_a_changed_manifest_is_refused(path: list[str], value: object, message: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURE, tmp_path / "copy")
    manifest = json.loads((folder / "jaxinfer.json").read_text())
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"copy.*{message}"):
        load_model(folder, "float32")


def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURE, tmp_path / "copy")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"copy/tokenizer\.json: no such file"):
        LLM(str(folder), verbose=False)
