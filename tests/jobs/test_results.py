"""Committed results: which there are, in how much memory, and read back whatever their order in the journal."""

from __future__ import annotations

import random
import tracemalloc
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.jobs import results
from jaxinfer.jobs.journal import Journal, JournalError
from jaxinfer.jobs.results import Committed


def write(path, content: list[list[int]]) -> list[int]:
    """Groups of records of these indices in a new journal; the groups' places."""
    path.unlink(missing_ok=True)
    journal = Journal(path)
    places = [journal.append([record(index) for index in group]) for group in content]
    journal.close()
    return places


def record(index: int, text: str = "") -> dict:
    return {"index": index, "text": text or f"result {index}"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("results") / "journal"


@given(
    st.permutations(range(12)).flatmap(
        lambda order: st.lists(st.integers(0, 11), max_size=4).map(lambda cuts: (order, sorted(cuts)))
    ),
    st.integers(0, 300),
    st.permutations(range(12)),
)
def test_every_record_is_read_in_any_order(path, content, cache_bytes, reading):
    order, cuts = content
    groups = [order[start:end] for start, end in zip([0, *cuts], [*cuts, 12], strict=True) if end > start]
    write(path, groups)
    committed = Committed(path, cache_bytes=cache_bytes)
    assert len(committed) == 12 and 12 not in committed and -1 not in committed
    for index in [*reading, *reading[:3]]:  # some once more
        assert index in committed and committed.read(index) == record(index)


def test_what_is_appended_is_read_too(path):
    (first,) = write(path, [[3, 1]])
    committed = Committed(path, 6)
    journal = Journal(path)
    second = journal.append([record(5), record(0)])
    assert committed.add(5, second) and committed.add(0, second)
    journal.close()
    assert list(committed.places) == [second, first, -1, first, -1, second] and len(committed) == 4
    assert [committed.read(index)["index"] for index in (0, 1, 3, 5)] == [0, 1, 3, 5]
    with pytest.raises(KeyError):
        committed.read(2)


def test_of_a_record_that_is_there_twice_the_first_counts(path):
    path.unlink(missing_ok=True)
    journal = Journal(path)
    journal.append([record(0, "first"), record(0, "second"), record(1, "first")])
    journal.append([record(2, "first"), record(1, "second")])
    journal.close()
    seen = []
    committed = Committed(path, on_record=seen.append)
    assert not committed.add(1, 0) and len(committed) == 3
    assert [committed.read(index)["text"] for index in (2, 1, 0, 1)] == ["first"] * 4
    assert [(each["index"], each["text"]) for each in seen] == [(0, "first"), (1, "first"), (2, "first")]


def test_no_journal_has_no_results(tmp_path):
    committed = Committed(tmp_path / "none", 3)
    assert len(committed) == 0 and 0 not in committed and 2 not in committed
    with pytest.raises(KeyError):
        committed.read(0)


@pytest.mark.parametrize("alien", [7, [], {"text": "x"}, {"index": -1}, {"index": 4}, {"index": True}, {"index": "0"}])
def test_a_journal_of_something_else_is_refused(tmp_path, alien):
    journal = Journal(tmp_path / "journal")
    place = journal.append([record(0)]) + journal.num_bytes
    journal.append([alien])
    journal.close()
    with pytest.raises(JournalError, match=f"byte {place}.*none of this input"):
        Committed(tmp_path / "journal", 4)


def test_a_journal_that_has_changed_is_refused(path):
    write(path, [[0, 1]])
    committed = Committed(path)
    write(path, [[0, 2]])
    assert committed.read(0) == record(0)
    with pytest.raises(JournalError, match="no record 1"):
        committed.read(1)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(JournalError, match="damaged"):
        committed.read(1)


def test_near_order_decodes_each_group_once(path):
    order = [start + index for start in range(0, 2000, 100) for index in random.Random(start).sample(range(100), 100)]
    groups = [order[start : start + 7] for start in range(0, 2000, 7)]
    write(path, groups)
    committed = Committed(path, 2000)
    with mock.patch.object(results, "read_group", wraps=results.read_group) as read:
        assert [committed.read(index)["index"] for index in range(2000)] == list(range(2000))
    assert read.call_count == len(groups)


def test_memory_is_bounded_however_far_the_order_is(path):
    """A journal of 8 MB in reverse of the order in which it is read, with a cache of 100 KB."""
    path.unlink(missing_ok=True)
    journal = Journal(path)
    with mock.patch("os.fsync"):
        for start in range(1995, -1, -5):
            journal.append([record(start + index, "x" * 4096) for index in range(5)])
    journal.close()
    assert journal.num_bytes > 8_000_000
    tracemalloc.start()
    try:
        committed = Committed(path, cache_bytes=100_000)
        for index in range(0, 2000, 5):  # leaves the rest of each group behind
            committed.read(index)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_record_takes_a_few_bytes_of_memory(tmp_path):
    tracemalloc.start()
    try:
        committed = Committed(tmp_path / "none")
        for index in range(20_000):
            committed.add(index, index * 1000)
        assert len(committed) == 20_000 and tracemalloc.get_traced_memory()[1] < 20_000 * 20
    finally:
        tracemalloc.stop()
