"""Loading's peak memory: the measurement itself, and the limit on every kind of source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.bench.load_memory import measure_load_memory
from jaxinfer.checkpoint.config_json import model_config_to_json
from jaxinfer.checkpoint.orbax import save_checkpoint
from jaxinfer.checkpoint.safetensors_folder import SafetensorsCheckpoint
from jaxinfer.engine.load import load_model, named_leaves
from jaxinfer.models import llama

from ..checkpoint.make_tiny_llama import FIXTURE


def test_counts_what_was_loaded() -> None:
    found = measure_load_memory(str(FIXTURE), "auto")
    assert (found["kind"], found["dtype"], found["params_bytes"]) == ("orbax", "float32", 111_232)
    assert found["limit_bytes"] == round(1.3 * 111_232) + 500_000_000
    assert found["within_limit"] and 0 < found["peak_rss_bytes"] < 200_000_000
    assert found["baseline_rss_bytes"] > 50_000_000 and found["load_s"] > 0


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ValueError, match="bad.gguf: starts with b'GGML'"):
        measure_load_memory(str(tmp_path / "bad.gguf"), "float32")


@pytest.fixture(scope="module")
def sources(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The default model as a GGUF file, in the native format, and as safetensors (of random values)."""
    folder = tmp_path_factory.mktemp("sources")
    model = load_model(smollm2_path, "float32")
    save_checkpoint(folder / "orbax", named_leaves(model.params), model_config_to_json(model.config))
    config, hf = model.config, folder / "hf"
    del model
    write_safetensors(hf, {piece.name: piece.shape for piece in llama.pieces(config, "safetensors")}, config.vocab_size)
    return {"gguf": smollm2_path, "orbax": folder / "orbax", "hf": hf}


def write_safetensors(folder: Path, shapes: dict[str, tuple[int, ...]], vocab_size: int) -> None:
    import json

    from safetensors.numpy import save_file

    folder.mkdir()
    random = np.random.default_rng(0)
    save_file({name: random.random(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    SafetensorsCheckpoint(folder).close()


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gguf", "orbax", "hf"])
def test_the_default_model_stays_within_the_limit(sources: dict[str, Path], kind: str, dtype: str) -> None:
    found = measure_load_memory(str(sources[kind]), dtype)
    assert found["kind"] == kind and found["params_bytes"] > 260_000_000
    assert found["within_limit"], found
    # Far stricter than the limit, whose 500 MB would hide a second copy of a model of this size.
    assert found["peak_rss_bytes"] < 1.05 * found["params_bytes"] + 60_000_000, found
