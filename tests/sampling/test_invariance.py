"""A row's bits do not depend on the rows beside it, on their number, or on their options."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.sampling.processors import LogitsProcessor

from .harness import inputs_for, run, state_for, take
from .reference import Options

SCALE = LogitsProcessor("scale", lambda logits, params: logits * params["by"][:, None], {"by": 1.1})


def rows_of(vocab_size: int) -> list[Options]:
    """64 rows: every option, alone and combined, next to plain and greedy ones."""
    kinds = [
        Options(),
        Options(temperature=1.0),
        Options(temperature=0.7, top_p=0.9),
        Options(temperature=1.0, top_k=40),
        Options(temperature=1.0, top_k=vocab_size // 2, top_p=0.95),
        Options(temperature=1.5, min_p=0.05),
        Options(temperature=1.0, typical_p=0.9),
        Options(temperature=1.0, repetition_penalty=1.3, prompt=[1, 2], output=[3, 3]),
        Options(presence_penalty=0.7, frequency_penalty=0.3, output=[4, 5, 5]),
        Options(temperature=1.0, bias={7: 1.5, 9: -1.0}),
        Options(temperature=1.0, allowed=list(range(0, vocab_size, 3))),
        Options(temperature=2.0, top_p=0.99, bias={3: 1.0}, repetition_penalty=1.1, prompt=[8]),
        Options(temperature=1.0),
    ]
    return [kinds[b % len(kinds)] for b in range(64)]


def check_subsets(
    vocab_size: int, scale: float, subsets: list[np.ndarray], processors: tuple[LogitsProcessor, ...] = ()
) -> None:
    rows = rows_of(vocab_size)
    logits = (np.random.default_rng(vocab_size).normal(size=(64, vocab_size)) * scale).astype(np.float32)
    inputs, state = inputs_for(rows, vocab_size, processors=processors), state_for(rows, vocab_size)
    inputs.want_logprobs[::3] = True
    for processor in processors:
        inputs.processor_params[processor.name]["enabled"][::11] = True
    inputs.position[:] = np.arange(64) * 17

    def step(chosen: np.ndarray):
        return run(logits[chosen], take(inputs, chosen), state, processors=processors)[1]

    whole = step(np.arange(64))
    for chosen in subsets:
        part = step(chosen)
        for field in dataclasses.fields(part):
            np.testing.assert_array_equal(
                getattr(part, field.name).view(np.uint8),
                np.ascontiguousarray(getattr(whole, field.name)[chosen]).view(np.uint8),
                err_msg=f"{field.name}, {len(chosen)} rows",
            )


def subsets_of(kind_period: int = 13) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    random = [rng.permutation(64)[:n] for n in (8, 8, 16, 32, 64)]
    # Eight rows of one kind each: the branches that the whole batch takes are skipped.
    alike = [np.resize(np.arange(kind, 64, kind_period), 8) for kind in range(kind_period)]
    return random + alike


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_bits_do_not_depend_on_neighbours(scale: float) -> None:
    check_subsets(997, scale, subsets_of(), (SCALE,))


@pytest.mark.full
def test_bits_do_not_depend_on_neighbours_with_a_real_vocabulary() -> None:
    check_subsets(49152, 3.0, subsets_of()[:7])


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [4096, 49152, 128256, 151936])
def test_bits_do_not_depend_on_neighbours_with_more_vocabularies(vocab_size: int) -> None:
    check_subsets(vocab_size, 3.0, subsets_of())


def test_rows_differ_from_each_other() -> None:
    """The comparison above would say nothing if the rows did not differ from each other."""
    rows = rows_of(997)
    logits = np.repeat(np.random.default_rng(0).normal(size=(1, 997)).astype(np.float32), 64, axis=0)
    _, out = run(logits, inputs_for(rows, 997, processors=(SCALE,)), state_for(rows, 997), processors=(SCALE,))
    assert len(set(out.tokens.tolist())) > 30
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.shape[0] == 64, out))
