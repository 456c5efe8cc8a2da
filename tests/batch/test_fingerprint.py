"""The fingerprint: what changes it, what does not, and what a job that was begun under another is told."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import LLM, LogitsProcessor
from jaxinfer.batch import fingerprint as module
from jaxinfer.batch.fingerprint import (
    ChangedError,
    Fingerprint,
    changes,
    check_unchanged,
    fingerprint_of,
    job_environment,
    model_identity,
    parameters_digest,
)
from jaxinfer.engine import assemble
from jaxinfer.tokenizer import load_tokenizer
from pallas_kernels.paged_attention import api, xla

SETTINGS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 9, "verbose": False}
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4)


@pytest.fixture(scope="module")
def llm(tiny_model_path):
    with LLM(str(tiny_model_path), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def identity(llm):
    return model_identity(llm)


@pytest.fixture
def copied(tiny_model_path, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model_path, tmp_path / "elsewhere"))


def changed(llm: LLM, identity: dict[str, str]) -> set[str]:
    now = model_identity(llm)
    return {name for name in {**identity, **now} if identity.get(name) != now.get(name)}


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_checkpoint_may_be_moved_and_run_otherwise_where_no_bit_changes(identity, copied):
    others = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 33, "seed": 3}
    others |= {"enable_prefix_caching": False, "overlap": False}
    with LLM(str(copied), **{**SETTINGS, **others}) as llm:
        assert model_identity(llm) == identity


def test_settings_that_change_bits_are_seen(identity, tiny_model_path):
    with LLM(str(tiny_model_path), **{**SETTINGS, "dtype": "bfloat16", "max_model_len": 48}) as llm:
        assert changed(llm, identity) == {"parameters", "dtype", "kv_cache_dtype", "max_model_len"}
    with LLM(str(tiny_model_path), **SETTINGS, kv_cache_dtype="bfloat16", batch_invariant=False) as llm:
        assert changed(llm, identity) == {"kv_cache_dtype", "batch_invariant"}


def test_other_weights_of_the_same_shapes_are_seen(llm, identity):
    before = llm.params
    leaves, treedef = jax.tree.flatten(before)
    try:
        seen = {identity["parameters"]}
        for place in (0, -1):  # the least change of the first number and of the last
            flat = np.array(leaves[place]).reshape(-1)
            flat[place] = np.nextafter(flat[place], np.inf)
            others = [*leaves]
            others[place] = jnp.asarray(flat.reshape(leaves[place].shape))
            llm.update_params(jax.tree.unflatten(treedef, others))
            assert changed(llm, identity) == {"parameters"}
            seen.add(model_identity(llm)["parameters"])
        assert len(seen) == 3
    finally:
        llm.update_params(before)
    assert model_identity(llm) == identity


def test_another_tokenizer_or_template_is_seen(llm, identity, copied, monkeypatch):
    rewrite(copied / "tokenizer.json", lambda content: content["model"]["merges"].pop())
    monkeypatch.setattr(llm, "tokenizer", load_tokenizer(copied))
    assert changed(llm, identity) == {"tokenizer"}
    monkeypatch.undo()
    rewrite(copied / "tokenizer_config.json", lambda content: content.update(chat_template="{{ messages }}"))
    shutil.copy(Path(llm.source.removeprefix("model: ")) / "tokenizer.json", copied)
    monkeypatch.setattr(llm, "tokenizer", load_tokenizer(copied))
    assert changed(llm, identity) == {"chat template"}
    rewrite(copied / "tokenizer_config.json", lambda content: content.update(eos_token="<pad>"))
    monkeypatch.setattr(llm, "tokenizer", load_tokenizer(copied))
    assert changed(llm, identity) == {"chat template", "tokenizer"}


def test_other_defaults_are_seen(llm, identity, monkeypatch):
    monkeypatch.setattr(llm, "default_sampling_fields", {"temperature": 0.5})
    assert changed(llm, identity) == {"generation defaults"}


def test_another_kernel_is_seen(llm, identity, monkeypatch):
    assert identity["attention"] == "xla"

    def unsupported(*_, **__):
        raise NotImplementedError("not here")

    both = api.IMPLEMENTATIONS
    monkeypatch.setattr(api, "IMPLEMENTATIONS", dict(reversed(both.items())))
    assert changed(llm, identity) == {"attention"} and model_identity(llm)["attention"] == "reference"
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {**both, "xla": unsupported})
    assert model_identity(llm)["attention"] == "reference"
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"fast": unsupported, "xla": xla.paged_attention})
    assert model_identity(llm) == identity
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"fast": unsupported})
    with pytest.raises(NotImplementedError):
        model_identity(llm)


def test_shapes_of_steps_count_where_they_change_bits(llm, identity, monkeypatch):
    monkeypatch.setattr(assemble, "rows_keep_their_bits", lambda: False)
    assert changed(llm, identity) == {"shapes of steps", "page_size"}


def test_a_logits_processor_is_known_by_its_file_and_parameters(llm, identity, tmp_path, monkeypatch):
    path = tmp_path / "fingerprinted_processor.py"
    monkeypatch.syspath_prepend(tmp_path)

    def seen(source: str, **params: float | int) -> str:
        path.write_text(source)
        monkeypatch.delitem(sys.modules, "fingerprinted_processor", raising=False)
        import fingerprinted_processor as written  # type: ignore[import-not-found]

        processor = LogitsProcessor("mine", written.halve, params)
        monkeypatch.setattr(llm.engine.sampler, "processors", {"mine": processor})
        assert changed(llm, identity) == {"logits processors"}
        return model_identity(llm)["logits processors"]

    source = "def halve(logits, params):\n    return logits / 2\n"
    first = seen(source)
    assert len({first, seen(source, by=1), seen(source, by=2), seen(source.replace("2", "3"))}) == 4
    assert seen(source) == first
    halve = types.FunctionType(compile("lambda x, y: x", "nowhere", "eval").co_consts[0], {"__name__": "nowhere"})
    monkeypatch.setattr(llm.engine.sampler, "processors", {"mine": LogitsProcessor("mine", halve)})
    with pytest.raises(ValueError, match="'mine'.*source.*put it in a module"):
        model_identity(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("piece_bytes", [4, 24, 100, 1 << 20])
def test_the_digest_is_of_the_values_however_they_are_fetched(dtype, piece_bytes, monkeypatch):
    values = np.random.default_rng(0).integers(-9, 9, (5, 3, 4))
    params = {"a": jnp.asarray(values, dtype), "b": {"c": jnp.ones((), dtype), "d": jnp.ones((0, 3), dtype)}}
    expected = b""
    for name, leaf in (("a", params["a"]), ("b/c", params["b"]["c"]), ("b/d", params["b"]["d"])):
        head = f"{name}\0{dtype}\0{leaf.shape}\0".encode()
        expected += hashlib.sha256(head + np.asarray(leaf).tobytes()).digest()
    assert parameters_digest(params) == hashlib.sha256(expected).hexdigest()
    monkeypatch.setattr(module, "_on_host", lambda leaf: False)
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    pieces = [piece.nbytes for piece in module._pieces(params["a"])]
    assert sum(pieces) == params["a"].nbytes and max(pieces) <= max(piece_bytes, params["a"].dtype.itemsize)
    assert parameters_digest(params) == hashlib.sha256(expected).hexdigest()


def test_names_dtypes_and_shapes_count(monkeypatch):
    x, y = jnp.zeros((2, 2)), jnp.ones((2, 2))
    given = [{"x": x, "y": y}, {"x": y, "y": x}, {"x": x, "z": y}, {"x": x.reshape(4), "y": y}, {"x": x}]
    given.append({"x": x.astype(jnp.int32), "y": y})
    assert len({parameters_digest(each) for each in given}) == len(given)


def test_weights_are_not_copied():
    params = {"a": jax.block_until_ready(jnp.zeros((4, 1 << 22))), "b": jnp.zeros(1 << 22, jnp.bfloat16)}
    tracemalloc.start()
    try:
        parameters_digest(params)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


PARTS = ("settings", "model", "environment")
BASE = {
    "settings": {"sampling": {"temperature": 0.5, "max_tokens": 16}, "inputs": ["a"]},
    "model": {"parameters": "0123456789abcdef" * 4, "dtype": "float32"},
    "environment": {"jax": "0.10.2", "processor features": " ".join(f"feature{i}" for i in range(30)) + " avx512f"},
}


def with_change(part: str, **fields) -> Fingerprint:
    return Fingerprint(**{**BASE, part: {**BASE[part], **fields}})


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_it_comes_back_from_a_file(settings):
    made = Fingerprint(settings, BASE["model"], BASE["environment"])
    again = Fingerprint.from_json(json.loads(json.dumps(made.as_json())))
    assert again == made and again.digest == made.digest and changes(made, again) == []
    assert len(made.digest) == 16 and set(made.digest) <= set("0123456789abcdef")


def test_how_it_is_written_does_not_count():
    settings = {"inputs": ("a",), "sampling": {"max_tokens": 16, "temperature": 0.5}}
    assert Fingerprint(**{**BASE, "settings": settings}).digest == Fingerprint(**BASE).digest
    with pytest.raises(TypeError):
        Fingerprint({"path": Path("x")}, {}, {})


@pytest.mark.parametrize("found", [None, [], {}, {"settings": {}}, dict.fromkeys(PARTS, 1), {**BASE, "more": {}}])
def test_what_is_no_fingerprint_is_refused(found):
    with pytest.raises(ValueError, match="no fingerprint"):
        Fingerprint.from_json(found)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (with_change("environment", jax="0.12.0"), "jax: 0.10.2 then, 0.12.0 now"),
        (with_change("environment", XLA_FLAGS="--xla_x"), "XLA_FLAGS: none then, --xla_x now"),
        (
            with_change("environment", **{"processor features": BASE["environment"]["processor features"][:-8]}),
            "processor features: avx512f then, none now",
        ),
        (with_change("model", parameters="f" * 64), "parameters: 0123456789ab then, ffffffffffff now"),
        (with_change("model", dtype="bfloat16"), "dtype: float32 then, bfloat16 now"),
        (
            with_change("settings", sampling={"temperature": 0.7, "max_tokens": 16}),
            "sampling.temperature: 0.5 then, 0.7 now",
        ),
        (with_change("settings", inputs=["a", "b"]), 'inputs: ["a"] then, ["a","b"] now'),
        (with_change("settings", flag=True), "flag: none then, true now"),
    ],
)
def test_a_change_is_told_in_words(new, words):
    old = Fingerprint(**BASE)
    assert changes(old, new) == [words] and new.digest != old.digest
    with pytest.raises(ChangedError, match="--output and --state") as error:
        check_unchanged(old, new)
    assert words in str(error.value) and error.value.changes == [words]


def test_long_values_are_told_shortly():
    words = "x" * 500
    assert all(len(each) < 160 for each in changes(with_change("settings", a=words), with_change("settings", a="y")))
    old, new = with_change("settings", a="one two " * 20), with_change("settings", a="two one " * 20)
    (told,) = changes(old, new)  # the same words in another order
    assert told.startswith("a: one two") and "then, two one" in told


def test_only_a_change_of_the_environment_can_be_accepted():
    old, new = Fingerprint(**BASE), with_change("environment", jax="0.12.0")
    assert check_unchanged(old, old) == [] and check_unchanged(old, old, accept_changes=True) == []
    assert check_unchanged(old, new, accept_changes=True) == ["jax: 0.10.2 then, 0.12.0 now"]
    with pytest.raises(ChangedError, match="accept that with --accept-changes"):
        check_unchanged(old, new)
    for part in ("settings", "model"):
        both = Fingerprint(**{**new.as_json(), part: {**BASE[part], "dtype": "float16"}})
        with pytest.raises(ChangedError, match="--accept-changes is for changes of the machine") as error:
            check_unchanged(old, both, accept_changes=True)
        assert len(error.value.changes) == 2


def test_the_environment_is_of_this_process_and_jax_settings(llm):
    found = job_environment()
    assert found["jax"] == jax.__version__ and found["tokenizers"] and found["processor features"]
    with jax.default_matmul_precision("highest"):
        (told,) = changes(Fingerprint({}, {}, found), Fingerprint({}, {}, job_environment()))
    assert told == "jax_default_matmul_precision: None then, highest now"
    made = fingerprint_of(llm, {"seed": 1})
    assert made == Fingerprint({"seed": 1}, model_identity(llm), found)


def test_the_module_loads_no_jax():
    code = "import sys, jaxinfer.batch.fingerprint; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
