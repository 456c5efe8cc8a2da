"""The whole step against the float64 reference: exact tokens, distributions, each option by its effect."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.sampling.draw import uniforms
from jaxinfer.sampling.sample import sample

from . import reference
from .harness import inputs_for, run, state_for
from .reference import Options

VOCAB = 337
ALONE = {
    "greedy": Options(),
    "temperature": Options(temperature=0.8),
    "hot": Options(temperature=5.0),
    "top_k": Options(temperature=1.0, top_k=4),
    "top_p": Options(temperature=1.0, top_p=0.83),
    "min_p": Options(temperature=1.0, min_p=0.07),
    "typical_p": Options(temperature=1.0, typical_p=0.6),
    "repetition": Options(temperature=1.0, repetition_penalty=1.7, prompt=[1, 2, 2, 60], output=[5, 6]),
    "presence": Options(temperature=1.0, presence_penalty=1.5, prompt=[1, 2], output=[5, 6, 6]),
    "frequency": Options(temperature=1.0, frequency_penalty=-0.9, prompt=[3], output=[5, 6, 6, 6]),
    "bias": Options(temperature=1.0, bias={0: 3.0, 336: -2.5, 50: 1.0}),
    "mask": Options(temperature=1.0, allowed=[0, 31, 32, 63, 64, 336]),
    "greedy mask": Options(allowed=[7, 80], top_k=3, top_p=0.1),
}
MIXED = Options(
    temperature=1.4,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    bias={4: 2.0, 5: -1.0},
    allowed=list(range(0, VOCAB, 2)) + [5],
    prompt=[4, 8, 8],
    output=[10, 10, 12],
)
ALL = {**ALONE, "mixed": MIXED}


def gaussian(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)


def check_tokens(logits: np.ndarray, rows: list[Options], num_steps: int) -> int:
    """Compares exact tokens at `num_steps` positions; returns how many were decided by more than rounding."""
    inputs, state = inputs_for(rows, logits.shape[-1]), state_for(rows, logits.shape[-1])
    distributions = [reference.distribution(x, options) for x, options in zip(logits, rows, strict=True)]
    num_checked = 0
    for position in range(num_steps):
        inputs.position[:] = position
        _, out = run(logits, inputs, state)
        u = np.asarray(jax.jit(uniforms)(inputs.seed, inputs.choice, inputs.position))
        for p, value, token in zip(distributions, u, out.tokens, strict=True):
            if reference.boundary_distance(p, value) > 3e-6:
                assert token == reference.token_at(p, value)
                num_checked += 1
    return num_checked


@pytest.mark.parametrize("name", ALL)
def test_each_option_alone_gives_the_reference_token(name: str) -> None:
    assert check_tokens(gaussian(16, seed=len(name)), [ALL[name]] * 16, 12) > 150


def test_all_options_mixed_in_one_batch_give_the_reference_tokens() -> None:
    rows = list(ALL.values()) + [MIXED] * (16 - len(ALL))
    assert check_tokens(gaussian(16, seed=5), rows, 40) > 550


@pytest.mark.full
def test_a_real_vocabulary_gives_the_reference_tokens() -> None:
    rows = [
        Options(temperature=1.0),
        Options(temperature=1.0, top_p=0.9),
        Options(temperature=1.0, top_k=50),
        Options(temperature=1.0, top_k=3000, top_p=0.95),
        Options(temperature=0.7, min_p=0.1),
        Options(temperature=2.0, top_p=0.5),
        Options(temperature=1.0, typical_p=0.8),
        Options(),
    ]
    assert check_tokens(gaussian(8, 49152), rows, 4) > 20


@pytest.mark.parametrize("name", [name for name in ALL if "greedy" not in name])
def test_draws_follow_the_reference_distribution(name: str) -> None:
    num_draws = 4096
    row = gaussian(1, seed=11)
    rows = [ALL[name]] * num_draws
    _, out = run(np.repeat(row, num_draws, axis=0), inputs_for(rows, VOCAB), state_for(rows, VOCAB))
    p = reference.distribution(row[0], ALL[name])
    counts = np.bincount(out.tokens, minlength=VOCAB)
    assert not counts[p == 0].any()
    # Tokens expected fewer than 5 times share one bin, where chi-square would not hold for each.
    rare = num_draws * p < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(num_draws * p[~rare], num_draws * p[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 10


def test_tokens_depend_on_seed_choice_and_position_alone() -> None:
    rows = [Options(temperature=3.0)] * 16
    logits = np.repeat(gaussian(1), 16, axis=0)
    inputs, state = inputs_for(rows, VOCAB), state_for(rows, VOCAB)
    first = run(logits, inputs, state)[1].tokens
    order = np.random.default_rng(0).permutation(16)
    moved = dataclasses.replace(inputs, seed=inputs.seed[order], lane=inputs.lane[::-1])
    np.testing.assert_array_equal(run(logits, moved, state)[1].tokens, first[order])
    for field in ("seed", "choice", "position"):
        other = dataclasses.replace(inputs, **{field: getattr(inputs, field) + getattr(inputs, field).dtype.type(1)})
        assert (run(logits, other, state)[1].tokens != first).mean() > 0.5
    inputs.seed[:] = (1, 2)
    assert len(set(run(logits, inputs, state)[1].tokens)) == 1


def test_logprobs_rank_and_top_tokens_are_of_the_raw_logits() -> None:
    logits = gaussian(16)
    rows = [Options(temperature=1.5, top_k=100, bias={3: 9.0}, prompt=[1], repetition_penalty=2.0)] * 16
    inputs = inputs_for(rows, VOCAB)
    inputs.want_logprobs[::2] = True
    _, out = run(logits, inputs, state_for(rows, VOCAB))
    expected = reference.log_softmax(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    picked = expected[np.arange(16), out.tokens]
    np.testing.assert_allclose(out.logprob, picked, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(out.rank[::2], 1 + (expected > picked[:, None]).sum(-1)[::2])
    np.testing.assert_array_equal(out.top_ids[::2], order[::2])
    top = np.take_along_axis(expected, order, axis=-1)
    np.testing.assert_allclose(out.top_logprobs[::2], top[::2], atol=1e-5, rtol=0)
    assert not out.rank[1::2].any() and not out.top_ids[1::2].any()


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy_in_effect(temperature: float) -> None:
    logits = gaussian(16, scale=1e4)
    rows = [
        Options(temperature=temperature, top_p=p, top_k=k) for p in (1.0, 0.5) for k in (0, 1, 2, 5, 50, 90, 300, 336)
    ]
    _, out = run(logits, inputs_for(rows, VOCAB), state_for(rows, VOCAB))
    np.testing.assert_array_equal(out.tokens, logits.argmax(-1))
    assert np.isfinite(out.logprob).all()


def test_bad_rows_are_reported_and_leave_the_others_alone() -> None:
    logits = gaussian(16)
    rows = [Options(temperature=1.0, top_p=0.9, top_k=50, typical_p=0.9)] * 16
    inputs, state = inputs_for(rows, VOCAB), state_for(rows, VOCAB)
    inputs.want_logprobs[:] = True
    good = run(logits, inputs, state)[1]
    broken = logits.copy()
    broken[1, 5] = np.nan
    broken[2, :] = np.nan
    broken[3, 0] = np.inf
    broken[4, :50] = -np.inf
    inputs.use_mask[6], inputs.token_mask[6] = True, 0
    out = run(broken, inputs, state)[1]
    np.testing.assert_array_equal(out.bad_logits, [False] + [True] * 3 + [False] * 12)
    np.testing.assert_array_equal(out.mask_empty, [False] * 6 + [True] + [False] * 9)
    assert out.tokens[4] >= 50
    for field in dataclasses.fields(out):
        np.testing.assert_array_equal(
            getattr(out, field.name)[[0, 5, *range(7, 16)]], getattr(good, field.name)[[0, 5, *range(7, 16)]]
        )


def test_a_processed_row_of_nan_is_reported() -> None:
    rows = [Options(bias={0: float("nan")})] + [Options()] * 15
    _, out = run(gaussian(16), inputs_for(rows, VOCAB), state_for(rows, VOCAB))
    assert list(out.bad_logits) == [True] + [False] * 15


def test_bias_adds_up_and_ignores_ids_outside_the_vocabulary() -> None:
    rows = [Options()] * 16
    inputs = inputs_for(rows, VOCAB)
    inputs.bias_ids[0, :3], inputs.bias_values[0, :3] = 9, 4.0
    inputs.bias_ids[1, :2], inputs.bias_values[1, :2] = [-1, VOCAB], 100.0
    _, out = run(np.eye(16, VOCAB, dtype=np.float32) * 10, inputs, state_for(rows, VOCAB))
    np.testing.assert_array_equal(out.tokens, [9, *range(1, 16)])


def test_state_follows_the_tokens_and_penalties_take_effect() -> None:
    rows = [Options(frequency_penalty=1.0, prompt=[0])] * 16
    inputs, state = inputs_for(rows, VOCAB), state_for(rows, VOCAB)
    inputs.valid[7:], inputs.lane[7:] = False, 16
    logits = np.tile(np.linspace(3, 0, VOCAB, dtype=np.float32), (16, 1))
    sampled = []
    for _ in range(4):
        state, out = run(logits, inputs, state)
        sampled.append(out.tokens)
    # Each use costs the token 1, the next token is 1/32 below: no token is taken twice in four steps.
    np.testing.assert_array_equal(np.stack(sampled)[:, :7], [[t] * 7 for t in range(4)])
    np.testing.assert_array_equal(state.last_token[:7], [3] * 7)
    np.testing.assert_array_equal(state.output_counts[:7, :4], 1)
    assert not state.output_counts[7:].any()


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = gaussian(16).astype(jax.numpy.bfloat16)
    rows = [Options(temperature=1.0, top_k=10)] * 16
    inputs, state = inputs_for(rows, VOCAB), state_for(rows, VOCAB)
    narrow, wide = (run(x, inputs, state)[1] for x in (logits, logits.astype(np.float32)))
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_the_step_copies_no_state() -> None:
    rows = [Options(temperature=1.0)] * 8
    step = jax.jit(lambda x, s, i: sample(x, s, i, num_logprobs=5), donate_argnums=1)
    lowered = step.lower(gaussian(8, 1000), state_for(rows, 1000), inputs_for(rows, 1000))
    text = lowered.compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and "[9,1000]" in line.split(" copy(")[0]]
    assert not copies
