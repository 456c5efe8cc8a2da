"""Examples in protobuf's bytes: against TensorFlow's own where it is installed, and there and back everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.batch.example import decode, encode

INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    st.lists(st.binary(max_size=20), max_size=4),
    st.lists(INT64, max_size=4),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4),
)
FEATURES = st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8), VALUES)


@given(FEATURES)
def test_features_come_back(features):
    data = encode(features)
    found = decode(data)
    assert found == features
    assert [type(value) for values in found.values() for value in values] == [
        type(value) for name in found for value in features[name]
    ]
    assert encode(dict(reversed(found.items()))) == data


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_none(data):
    try:
        assert isinstance(decode(data), dict)
    except ValueError as error:
        assert "the record is" in str(error) or "the feature's name" in str(error)


@given(FEATURES, st.data())
def test_mutated_bytes_are_an_example_or_none(features, data):
    whole = bytearray(encode(features))
    for _ in range(data.draw(st.integers(1, 3))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    test_any_bytes_are_an_example_or_none.hypothesis.inner_test(bytes(whole))


def test_of_a_name_that_comes_twice_the_last_counts():
    assert decode(encode({"a": [1]}) + encode({"a": [2], "b": [3]})) == {"a": [2], "b": [3]}


@pytest.mark.parametrize("values", [[1, b"x"], [b"x", 1], [2**63], [None], ["text"], [1, 2.5]])
def test_what_no_feature_can_hold_is_refused(values):
    with pytest.raises((TypeError, ValueError)):
        encode({"a": values})


def test_nesting_without_end_is_no_example():
    with pytest.raises(ValueError, match="is no tf.train.Example"):
        decode(b"\x0b" * 100_000)


@given(FEATURES)
def test_tensorflow_reads_the_same(features):
    tf = pytest.importorskip("tensorflow")
    parsed = tf.train.Example.FromString(encode(features))
    found = {}
    for name, feature in parsed.features.feature.items():
        kind = feature.WhichOneof("kind")
        found[name] = list(getattr(feature, kind).value) if kind else []
    assert found == features
    assert decode(parsed.SerializeToString(deterministic=True)) == features
