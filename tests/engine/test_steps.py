"""The default model through the paged step: golden outputs, the same bits in every shape, no copy of the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxinfer.cache.paged_kv import init_cache
from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.inputs import Row, build
from jaxinfer.engine.layerwise import LayerwiseProgram, compile_layerwise, split_weights
from jaxinfer.engine.load import load_model
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.steps import compile_forward

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_f32.json").read_text())
CHUNK, DECODE = Bucket(128, 32, 16), Bucket(8, 8, 1)
BUCKETS = [Bucket(512, 32, 16), CHUNK, Bucket(32, 32, 1), DECODE]


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_model(smollm2_path, "float32")


@pytest.fixture(scope="module", params=[16, pytest.param(32, marks=pytest.mark.full)])
def runner(request, smollm2):
    size = request.param
    runner = ModelRunner(
        smollm2, BUCKETS, num_pages=2048 // size + 1, page_size=size, table_width=1024 // size, kv_dtype="float32"
    )
    for bucket in BUCKETS:  # steps take the smallest that is compiled
        runner.program(bucket)
    return runner


def pages_of(runner: ModelRunner, num_tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first - (-num_tokens // runner.cache.page_size)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


@pytest.mark.parametrize("item", GOLDEN["items"], ids=[item["name"] for item in GOLDEN["items"]])
def test_greedy_continuation_equals_golden(runner, item):
    prompt = item["prompt_ids"]
    pages = pages_of(runner, len(prompt) + 64)
    done = 0
    while done < len(prompt):  # chunked, so that long prompts fit the bucket
        chunk = prompt[done : done + 500]
        done += len(chunk)
        _, logits = runner.run([Row(chunk, done, pages)])
    context, ids, logprobs = len(prompt), [], []
    for _ in range(24):
        row = log_softmax(np.asarray(logits)[0])
        ids.append(int(row.argmax()))
        logprobs.append(row.max())
        context += 1
        _, logits = runner.run([Row(ids[-1:], context, pages)])
    assert ids == item["ids"][:24]
    np.testing.assert_allclose(logprobs, item["logprobs"][:24], rtol=0, atol=1e-3)


@pytest.mark.slow
def test_same_row_same_bits(runner):
    """A token's logits do not depend on chunking, on the rows beside it, or on the pages it lies in."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 49152, 300).tolist()

    def last_logits(chunks: list[int], num_neighbours: int, first_page: int) -> np.ndarray:
        pages = pages_of(runner, 300, first_page)
        context = 0
        logits = None
        for size in chunks:
            context += size
            row = Row(ids[context - size : context], context, pages)
            others = [Row([7], 1, [40 + i]) for i in range(num_neighbours)]
            _, logits = runner.run([*others, row])
        return np.asarray(logits)[num_neighbours]

    whole = last_logits([300], 0, 1)
    for chunks, neighbours, first_page in [
        ([100, 100, 100], 0, 5),
        ([64, 64, 64, 64, 44], 3, 2),
        ([299, 1], 0, 3),
        ([299, 1], 6, 1),
        ([280] + [1] * 20, 20, 4),
    ]:
        np.testing.assert_array_equal(last_logits(chunks, neighbours, first_page), whole)


def check_no_copy(program, cache):
    """The donated cache is updated in place: nothing of its size is copied, and nothing near it is temporary."""
    size, page_shape = cache.k.size, list(cache.k.shape[-2:])
    for line in program.as_text().splitlines():
        match = re.search(r"= f32\[([\d,]+)\]\S* (copy|dynamic-slice|slice|transpose|concatenate)\(", line)
        shape = [int(n) for n in match[1].split(",")] if match else []
        if shape[-2:] == page_shape:
            assert np.prod(shape) < size / cache.k.shape[0], line.strip()[:200]
    assert program.memory_analysis().alias_size_in_bytes >= 2 * size * 4


@pytest.mark.parametrize("bucket", [*BUCKETS, Bucket(1, 1, 1)], ids=str)
def test_no_cache_sized_copy(runner, smollm2, bucket):
    leaves, tree = jax.tree.flatten(smollm2.params)
    arguments = runner.cache, build([], bucket, runner.table_width)
    weights = split_weights(smollm2.graphdef, smollm2.params)
    layerwise = compile_layerwise(smollm2.graphdef, tree, weights, *arguments, tile_queries=bucket.tile_queries)
    check_no_copy(layerwise["layer"], runner.cache)
    scan = compile_forward(smollm2.graphdef, tree, tuple(leaves), *arguments, tile_queries=bucket.tile_queries)
    check_no_copy(scan, runner.cache)


@pytest.mark.parametrize("bucket", [CHUNK, DECODE], ids=str)
def test_layers_called_one_by_one_have_the_bits_of_a_scan(runner, smollm2, bucket):
    rows = [Row([11, 12, 13] if bucket is CHUNK else [11], 3, [1]), Row([14], 1, [2])]
    leaves, tree = jax.tree.flatten(smollm2.params)
    inputs = build(rows, bucket, runner.table_width)
    cache = init_cache(30, 9, 3, runner.cache.page_size, 64, "float32")
    scan = compile_forward(smollm2.graphdef, tree, tuple(leaves), cache, inputs, tile_queries=bucket.tile_queries)
    hidden, logits, _ = scan(tuple(leaves), cache, inputs)
    weights = split_weights(smollm2.graphdef, smollm2.params)
    cache = init_cache(30, 9, 3, runner.cache.page_size, 64, "float32")
    parts = compile_layerwise(smollm2.graphdef, tree, weights, cache, inputs, tile_queries=bucket.tile_queries)
    other_hidden, other_logits, _ = LayerwiseProgram(**parts)(weights, cache, inputs)
    np.testing.assert_array_equal(other_hidden, hidden)
    np.testing.assert_array_equal(other_logits, logits)


def test_a_layers_arrays_share_the_stacks_memory(smollm2):
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(smollm2.params)}
    for leaves, index, _ in split_weights(smollm2.graphdef, smollm2.params).layers:
        assert all(leaf.unsafe_buffer_pointer() - leaf.nbytes * int(index) in pointers for leaf in leaves)


@pytest.mark.slow
def test_a_step_takes_the_smallest_bucket_that_is_compiled(smollm2):
    runner = ModelRunner(smollm2, BUCKETS, num_pages=9, page_size=16, table_width=8, kv_dtype="float32")
    logits, waste = [], []
    for bucket in BUCKETS:  # each smaller than the one before
        runner.program(bucket)
        before = runner.num_padded_tokens
        logits.append(np.asarray(runner.run([Row([4], 1, [1])])[1])[0])
        waste.append(runner.num_padded_tokens - before)
    assert waste == [bucket.num_tokens - 1 for bucket in BUCKETS] and runner.num_run_tokens == len(BUCKETS)
    assert all((each == logits[0]).all() for each in logits)
