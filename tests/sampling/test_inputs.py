from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling.inputs import NO_TOKEN, SamplingInputs, pack_mask, unpack_mask


@given(st.data(), st.integers(1, 300))
def test_pack_mask_sets_one_bit_for_each_allowed_token(data: st.DataObject, vocab_size: int) -> None:
    ids = st.lists(st.integers(0, vocab_size - 1))
    allowed, banned = data.draw(st.none() | ids), data.draw(ids)
    mask = pack_mask(vocab_size, allowed_ids=allowed, banned_ids=banned)
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab_size // 32),)
    expected = set(range(vocab_size) if allowed is None else allowed) - set(banned)
    bits = {32 * word + bit for word, value in enumerate(mask) for bit in range(32) if int(value) >> bit & 1}
    assert bits == expected
    np.testing.assert_array_equal(np.flatnonzero(unpack_mask(mask, vocab_size)), sorted(expected))


@pytest.mark.parametrize("token", [-1, 50, 2**40])
@pytest.mark.parametrize("name", ["allowed_ids", "banned_ids"])
def test_pack_mask_refuses_ids_outside_the_vocabulary(name: str, token: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}: token id {token} is outside the vocabulary of 50"):
        pack_mask(50, **{name: [3, token]})


def test_default_rows_are_padding_on_the_last_lane() -> None:
    inputs = SamplingInputs.greedy(8, 100, num_lanes=4)
    assert not inputs.valid.any()
    assert (inputs.lane == 4).all()
    assert (inputs.bias_ids == NO_TOKEN).all()
    assert inputs.token_mask.shape == (8, 4)
