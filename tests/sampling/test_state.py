from __future__ import annotations

import jax
import numpy as np

from jaxinfer.sampling.state import init_state, record_tokens, set_lane


def test_set_lane_replaces_one_lane() -> None:
    state = set_lane(init_state(3, 5), 1, np.array([0, 2, 0, 0, 1]), np.array([1, 0, 0, 0, 0], bool), 4)
    np.testing.assert_array_equal(state.output_counts, [[0] * 5, [0, 2, 0, 0, 1], [0] * 5, [0] * 5])
    np.testing.assert_array_equal(state.prompt_seen[1], [1, 0, 0, 0, 0])
    assert not state.prompt_seen[0].any()
    np.testing.assert_array_equal(state.last_token, [0, 4, 0, 0])


def test_set_lane_compiles_once_and_consumes_the_state() -> None:
    zeros = np.zeros(11, np.int32)
    before = set_lane._cache_size()
    first = init_state(2, 11)
    second = set_lane(first, 0, zeros, zeros.astype(bool), 1)
    set_lane(second, 1, zeros, zeros.astype(bool), 9)
    assert set_lane._cache_size() == before + 1
    assert first.output_counts.is_deleted()


def test_only_valid_rows_are_recorded() -> None:
    state = init_state(2, 5)
    lanes = np.array([1, 0, 2, 0], np.int32)
    state = jax.jit(record_tokens)(state, lanes, np.array([3, 2, 4, 1], np.int32), np.array([1, 1, 0, 0], bool))
    np.testing.assert_array_equal(state.output_counts[:2], [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0]])
    np.testing.assert_array_equal(state.last_token[:2], [2, 3])
    assert int(state.output_counts.sum()) == 2
