"""Every variant of the Llama family against transformers in float32: tests/models/golden, made by make_golden.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.inputs import Row
from jaxinfer.engine.load import load_model
from jaxinfer.engine.runner import ModelRunner

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = sorted(path.name for path in GOLDEN.iterdir())
BUCKETS = [Bucket(96, 8, 16), Bucket(8, 8, 1)]


def make_runner(variant: str) -> ModelRunner:
    model = load_model(GOLDEN / variant, "float32")
    return ModelRunner(model, BUCKETS, num_pages=9, page_size=16, table_width=4, kv_dtype="float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_continuation(variant):
    expected = np.load(GOLDEN / variant / "expected.npz")
    runner = make_runner(variant)
    tokens = expected["tokens"]
    pages = [[5, 2, 7], [1, 8, 3]]
    hidden, last = runner.run([Row(tokens[i].tolist(), 40, pages[i]) for i in range(2)])
    logits = runner.logits_of(hidden)[:80].reshape(2, 40, -1)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)

    for step in range(8):
        np.testing.assert_allclose(np.asarray(last)[:2], expected["greedy_logits"][:, step], rtol=0, atol=1e-4)
        chosen = np.asarray(last)[:2].argmax(-1)
        np.testing.assert_array_equal(chosen, expected["greedy"][:, step])
        context = 41 + step
        _, last = runner.run([Row([int(chosen[i])], context, pages[i]) for i in range(2)])


def test_variants_cover_the_family():
    assert {"llama31-rope", "mistral-window", "qwen2", "qwen3", "smollm2"} <= set(VARIANTS)
