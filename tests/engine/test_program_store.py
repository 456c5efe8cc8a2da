"""Programs in files: a second process runs what the first compiled, and nothing that lies there can do harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxinfer import LLM, LogitsProcessor
from jaxinfer.engine import program_store
from jaxinfer.engine.environment import environment
from jaxinfer.engine.program_store import ProgramStore, open_store, user_cache_folder
from jaxinfer.engine.programs import Compiler, abstract

ROOT = Path(__file__).parents[2]
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def no_jax_cache():
    """What jax takes from its own cache cannot be serialized again, and the tests' settings turn that cache on."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax_cache.reset_cache()


@pytest.fixture
def store(tmp_path) -> ProgramStore:
    return ProgramStore(tmp_path / "programs")


def compile_exp(factor: float = 2.0):
    return {"exp": jax.jit(lambda x: jnp.exp(x) * factor).lower(abstract(X)).compile()}


def files(store: ProgramStore) -> list[Path]:
    return sorted(store.folder.iterdir())


def get(store: ProgramStore, description=(), factor: float = 2.0) -> tuple[np.ndarray, Compiler]:
    compiler = Compiler(store)
    parts = compiler.get("exp", description, lambda: compile_exp(factor))
    return np.asarray(parts["exp"](X)), compiler


def test_what_was_stored_is_loaded_and_gives_the_same_bits(store):
    first, compiler = get(store)
    assert (compiler.num_compiles, compiler.num_loaded) == (1, 0) and compiler.compile_time_s > 0
    second, compiler = get(store, factor=3.0)  # another function under the same description: it is not even traced
    assert (compiler.num_compiles, compiler.num_loaded) == (0, 1)
    np.testing.assert_array_equal(first, second)
    assert [path.stat().st_mode & 0o777 for path in [store.folder, *files(store)]] == [0o700, 0o600]


def test_keys_tell_apart_all_that_a_program_follows_from(store, monkeypatch):
    spec = abstract(X)
    others = [abstract(X.T), abstract(X.astype(np.float16)), {"x": spec}, (spec, 16), (spec, "16")]
    keys = [store.key_of("step", each) for each in [spec, *others]] + [store.key_of("head", spec)]
    with jax.default_matmul_precision("highest"):
        keys.append(store.key_of("step", spec))
    monkeypatch.setattr(program_store, "environment", lambda: {**environment(), "jax": "another"})
    keys.append(store.key_of("step", spec))
    monkeypatch.undo()
    assert None not in keys and len(set(keys)) == len(keys)
    assert store.key_of("step", spec) == keys[0]


def test_code_of_ones_own_is_not_stored(store):
    def halve(logits, params):
        return logits / 2

    class Mine:
        pass

    for own in (LogitsProcessor("halve", halve), Mine(), Mine, halve, partial(halve, 1), lambda: None):
        assert store.key_of("step", (X.shape, own)) is None
    _, compiler = get(store, Mine())
    assert compiler.num_compiles == 1 and files(store) == []
    assert store.key_of("step", LogitsProcessor) is not None


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "renamed", "pickle", "foreign"])
def test_a_damaged_file_is_made_anew_with_one_notice(store, caplog, damage):
    expected, _ = get(store)
    (path,) = files(store)
    content = path.read_bytes()
    if damage == "renamed":
        path.rename(store.folder / f"{store.key_of('exp', 1)}.program")
    else:
        broken = {
            "empty": b"", "cut": content[:-7], "flipped": content[:-7] + bytes([content[-7] ^ 1]) + content[-6:],
            "pickle": b"cos\nsystem\n(S'touch harmed'\ntR.", "foreign": bytes(len(content)),
        }  # fmt: skip
        path.write_bytes(broken[damage])
    for description in (1, 1) if damage == "renamed" else ((), ()):
        found, compiler = get(ProgramStore(store.folder), description)
        np.testing.assert_array_equal(found, expected)
        if not compiler.num_loaded:
            assert compiler.num_compiles == 1
    assert compiler.num_loaded == 1, "it was not replaced by a good one"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "is ignored and made anew" in warnings[0]


def test_what_xla_refuses_to_load_is_made_anew(store, monkeypatch, caplog):
    expected, _ = get(store)

    def refuse(*_):
        raise RuntimeError("another machine type")

    monkeypatch.setattr(program_store.serialize_executable, "deserialize_and_load", refuse)
    found, compiler = get(store)
    np.testing.assert_array_equal(found, expected)
    assert compiler.num_compiles == 1 and "another machine type" in caplog.text


def test_what_others_may_write_is_not_read(store, caplog):
    get(store)
    (path,) = files(store)
    path.chmod(0o666)
    _, compiler = get(store)
    assert compiler.num_compiles == 1 and "so that others could put code there" in caplog.text
    store.folder.chmod(0o777)
    with pytest.raises(PermissionError, match="chmod go-w"):
        ProgramStore(store.folder)
    with pytest.raises(ValueError, match=r"compilation_cache=.*chmod go-w"):
        open_store(str(store.folder))


def test_a_program_that_cannot_be_serialized_runs_all_the_same(store):
    sort = jax.jit(jnp.sort)

    def compile():
        return {"sort": sort.lower(abstract(X)).compile()}

    parts = Compiler(store).get("sort", (), compile)
    np.testing.assert_array_equal(parts["sort"](-X), np.sort(-X))


def test_a_full_disk_is_no_error(store, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_store.os, "replace", full)
    _, compiler = get(store)
    assert compiler.num_compiles == 1 and "No space left" in caplog.text
    assert files(store) == []


def test_the_oldest_go_when_the_folder_is_full(store):
    get(store, 0)
    (path,) = files(store)
    store.limit_bytes = 3 * path.stat().st_size + 100
    stale = store.folder / "left.tmp"
    stale.touch()
    os.utime(stale, (0, 0))
    (store.folder / "fresh.tmp").touch()
    os.utime(path, (1, 1))
    for each in (1, 2):
        get(store, each)
        os.utime(store._path(store.key_of("exp", each)), (1 + each, 1 + each))
    get(store, 0)  # used, and so the youngest
    get(store, 3)
    kept = {each for each in range(4) if store._path(store.key_of("exp", each)).exists()}
    assert kept == {0, 2, 3} and not stale.exists() and (store.folder / "fresh.tmp").exists()


def test_threads_share_a_folder(store):
    errors = []

    def use():
        try:
            for each in range(3):
                get(ProgramStore(store.folder), each)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(files(store)) == 3


def test_which_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "jaxinfer" / "programs"
    for none in (None, True):
        store = open_store(none)
        assert store and store.folder == user_cache_folder()
    assert open_store(False) is None
    own = open_store(tmp_path / "own")
    assert own and own.folder == tmp_path / "own"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "jaxinfer" / "programs"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="compilation_cache="):
        open_store(str(tmp_path / "file"))
    for name in ("", "a\0b"):
        with pytest.raises(ValueError, match="compilation_cache="):
            open_store(name)
    with pytest.raises(ValueError, match="compilation_cache=3"):
        open_store(3)  # type: ignore


def test_a_default_folder_that_cannot_be_made_is_a_notice(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(program_store, "user_cache_folder", lambda: tmp_path / "file" / "programs")
    (tmp_path / "file").touch()
    assert open_store(None) is None and "compilation cache: off" in caplog.text
    with pytest.raises(ValueError, match="compilation_cache=True"):
        open_store(True)


def test_jaxs_own_cache_goes_before(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert open_store(None) is None and open_store(False) is None
    for asked in (True, str(tmp_path)):
        with pytest.raises(ValueError, match="jax's own persistent compilation cache is on"):
            open_store(asked)


SETTINGS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, "verbose": False}
PROCESS = """
import json, sys
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], compilation_cache=sys.argv[2], **json.loads(sys.argv[3]))
llm.wait_until_compiled()
choice = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))[0].outputs[0]
logprobs = [entry[token].logprob.hex() for entry, token in zip(choice.logprobs, choice.token_ids)]
stats = llm.stats()
print(json.dumps([choice.token_ids, logprobs, stats["num_compiles"], stats["num_programs_loaded"]]))
"""


def start(folder: Path, model: Path) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", PROCESS, str(model), str(folder), json.dumps(SETTINGS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.full
def test_processes_one_after_another_and_at_once(tiny_model_path, tmp_path):
    def result(process):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return json.loads(out)

    at_once = [start(tmp_path / "programs", tiny_model_path) for _ in range(2)]
    first, other = map(result, at_once)
    later = result(start(tmp_path / "programs", tiny_model_path))
    assert first[:2] == other[:2] == later[:2]
    assert first[2] + first[3] == other[2] + other[3] == 5 and later[2:] == [0, 5]


@pytest.mark.slow
def test_sampling_with_a_processor_of_ones_own_is_compiled_each_time(tiny_model_path, tmp_path):
    processors = [LogitsProcessor("same", lambda logits, params: logits)]
    counts = []
    for given in ([], processors):
        settings = {**SETTINGS, "compilation_cache": tmp_path / "programs", "logits_processors": given}
        with LLM(str(tiny_model_path), **settings) as llm:
            llm.wait_until_compiled()
            counts.append((llm.stats()["num_compiles"], llm.stats()["num_programs_loaded"]))
    assert counts == [(5, 0), (1, 4)]
