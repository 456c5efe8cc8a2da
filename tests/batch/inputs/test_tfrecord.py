"""TFRecord files: those that TensorFlow wrote, and damaged ones, of which nothing is lost that can be read."""

from __future__ import annotations

import gzip
import hashlib
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.batch import inputs
from jaxinfer.batch.example import encode
from jaxinfer.batch.framing import frame, masked_crc
from jaxinfer.batch.inputs.file_scan import MAX_RECORD_BYTES
from jaxinfer.batch.inputs.streams import PIECE_BYTES
from jaxinfer.batch.records import InputRecord

DATA = Path(__file__).parent.parent / "data"
# What data/make_tfrecords.py has TensorFlow write.
WRITTEN = [
    {"prompt": ["Grüße, 世界".encode()], "id": [0], "temperature": [0.5]},
    {"prompt": [b""], "id": [-(2**63), 2**63 - 1, -1], "weights": [1.5, -0.25, float("inf")], "nothing": []},
    {"prompt_token_ids": [1, 300, 70000], "tags": [b"a", b"\xff\x00"], "prompt": [b"x" * 300]},
    {},
]


def records(path: Path, start=(0, 0), count=None) -> list[InputRecord]:
    return list(inputs.read(str(path), "tfrecord", start, count))


def examples(num: int) -> list[bytes]:
    return [frame(encode({"prompt": [b"prompt %d" % i], "id": [i]})) for i in range(num)]


def seen(found: list[InputRecord]) -> list[int | str | None]:
    """The ids of good records, the errors of others."""
    return [record.error if record.error is not None else record.fields["id"][0] for record in found]


@pytest.mark.parametrize("name", ["prompts-00000-of-00001.tfrecord", "gzip.tfrecord", "zlib.tfrecord"])
def test_reads_what_tensorflow_wrote(name):
    found = records(DATA / name)
    assert [record.fields for record in found] == WRITTEN
    assert [type(value) for record in found for values in record.fields.values() for value in values] == [
        type(value) for record in found for name in record.fields for value in WRITTEN[record.index][name]
    ]
    assert [(record.index, record.error) for record in found] == [(i, None) for i in range(4)]
    plain = zlib.decompress((DATA / name).read_bytes(), 47) if "0" not in name else (DATA / name).read_bytes()
    starts = [0]
    for _ in range(3):
        starts.append(starts[-1] + 16 + struct.unpack_from("<Q", plain, starts[-1])[0])
    assert [record.offset for record in found] == starts
    stored = (DATA / name).read_bytes()
    expected = inputs.FileScan(len(stored), hashlib.sha256(stored).hexdigest(), 4, [(0, 0), (2, starts[2])])
    assert inputs.scan(str(DATA / name), "tfrecord", 2) == expected
    assert records(DATA / name, (2, starts[2])) == found[2:]
    assert records(DATA / name, (2, starts[2]), 1) == found[2:3]


def test_the_checksum_is_the_one_of_the_standard():
    """CRC-32C of 32 zero bytes is 8a9136aa (RFC 3720, B.4)."""
    assert masked_crc(bytes(32)) == ((0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8) % 2**32


def test_damaged_data_costs_one_record(tmp_path):
    path, parts = tmp_path / "a", examples(5)
    parts[2] = parts[2][:-6] + b"!" + parts[2][-5:]
    path.write_bytes(b"".join(parts))
    assert seen(records(path)) == [0, 1, "the checksum of the record's data does not fit it", 3, 4]
    assert inputs.scan(str(path), "tfrecord", 1).num_records == 5


def test_a_damaged_length_costs_the_rest(tmp_path):
    path, parts = tmp_path / "a", examples(5)
    parts[2] = b"\xff" + parts[2][1:]
    path.write_bytes(b"".join(parts))
    rest = len(b"".join(parts[2:]))
    error = f"the checksum of the record's length does not fit it: the rest of the file ({rest} bytes) cannot be read"
    assert seen(records(path)) == [0, 1, error]
    assert records(path)[2].offset == len(parts[0] + parts[1])
    found = inputs.scan(str(path), "tfrecord", 2)
    assert (found.num_records, found.starts) == (3, [(0, 0), (2, len(parts[0] + parts[1]))])
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zlib.compress])
@pytest.mark.parametrize("left", [1, 11, 12, 20])
def test_a_tail_cut_off_is_a_record(tmp_path, compress, left):
    path, parts = tmp_path / "a", examples(3)
    path.write_bytes(compress(b"".join(parts[:2]) + parts[2][:left]))
    found = seen(records(path))
    assert found[:2] == [0, 1] and len(found) == 3
    assert str(found[2]).startswith("the file ends within a record") and f"{left} bytes" in str(found[2])
    assert inputs.scan(str(path), "tfrecord", 1).num_records == 3


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_compressed_data_that_breaks_off_is_a_record(tmp_path, compress):
    """What comes before the damage is read all the same, to the byte."""
    path, whole = tmp_path / "a", compress(b"".join(examples(2000)))
    middle = len(whole) // 2
    for damaged, least, words in (
        (whole[:-20], 1900, "data ends early"),
        (whole[:-4] + b"\0\1\2\3", 2000, "data is damaged (Error -3 while decompressing data: incorrect"),
        (whole[:middle] + bytes(200) + whole[middle + 200 :], 900, ""),
    ):
        path.write_bytes(damaged)
        found = records(path)
        assert words in str(found[-1].error)
        assert seen(found[:least]) == list(range(least))
        scanned = inputs.scan(str(path), "tfrecord", 1)
        assert (scanned.num_records, scanned.sha256) == (len(found), hashlib.sha256(damaged).hexdigest())


def test_members_one_after_the_other_and_padding_are_read(tmp_path):
    path, parts = tmp_path / "a", examples(4)
    path.write_bytes(gzip.compress(parts[0] + parts[1]) + gzip.compress(parts[2]) + gzip.compress(parts[3]) + bytes(99))
    assert seen(records(path)) == [0, 1, 2, 3]


def test_an_absurd_length_allocates_no_more_than_the_file_has(tmp_path):
    path = tmp_path / "a"
    for length in (MAX_RECORD_BYTES, 2**31, 2**62, 2**64 - 1):
        head = struct.pack("<Q", length)
        content = examples(1)[0] + head + struct.pack("<I", masked_crc(head)) + b"x" * 100
        for stored in (content, gzip.compress(content)):
            path.write_bytes(stored)
            tracemalloc.start()
            found = records(path)
            scanned = inputs.scan(str(path), "tfrecord", 1)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert seen(found)[0] == 0 and scanned.num_records == 2
            assert str(found[1].error).endswith("the rest of the file (112 bytes) cannot be read")
            assert peak < 8 * PIECE_BYTES


def test_a_record_longer_than_one_may_be_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxinfer.batch.inputs.tfrecord.MAX_RECORD_BYTES", 50)
    path, parts = tmp_path / "a", examples(2)
    path.write_bytes(parts[0] + frame(b"x" * 51) + parts[1])
    assert seen(records(path)) == [0, "the record has 51 bytes, more than one may have (50)", 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"Once upon a time", "is no tf.train.Example"),
        (b"\x0a\x7fabc", "is no tf.train.Example"),
        (b"\x1a\x03abc", "is no tf.train.Example"),  # a field that no Example has
        (encode({"a\0b": [1]}), "'a\\x00b' has a NUL: rename the feature"),
        (b"\x0a\x07\x0a\x05\x0a\x01\xff\x12\x00", "is no tf.train.Example"),  # a name that is no UTF-8
    ],
)
def test_a_record_that_is_no_example_is_an_error(tmp_path, data, words):
    path, parts = tmp_path / "a", examples(2)
    path.write_bytes(parts[0] + frame(data) + parts[1])
    found = seen(records(path))
    assert (found[0], found[2]) == (0, 1) and words in str(found[1])


def test_a_sequence_example_of_tensorflow_is_named():
    assert "SequenceExample: write a tf.train.Example" in str(records(DATA / "sequence.tfrecord")[0].error)


def test_an_empty_file_has_no_records(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"")
    assert records(path) == []
    assert inputs.scan(str(path), "tfrecord", 1) == inputs.FileScan(0, hashlib.sha256(b"").hexdigest(), 0, [])


WHOLE = b"".join(examples(6))


@given(
    st.sampled_from([WHOLE, gzip.compress(WHOLE), zlib.compress(WHOLE)]),
    st.lists(st.tuples(st.integers(0, len(WHOLE)), st.binary(max_size=12), st.integers(0, 12)), max_size=3),
    st.integers(1, 4),
)
def test_damage_of_any_kind_ends_in_records(tmp_path_factory, stored, changes, every):
    """And reading from any start that was found gives what reading from the beginning gives."""
    for at, new, num_bytes in changes:
        stored = stored[:at] + new + stored[at + num_bytes :]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(stored)
    found, scanned = records(path), inputs.scan(str(path), "tfrecord", every)
    assert [record.index for record in found] == list(range(scanned.num_records))
    assert scanned.starts == [(record.index, record.offset) for record in found[::every]]
    assert (scanned.num_bytes, scanned.sha256) == (len(stored), hashlib.sha256(stored).hexdigest())
    for start in scanned.starts:
        assert records(path, start, every) == found[start[0] : start[0] + every]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_memory_does_not_grow_with_the_file(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(b"".join(frame(encode({"id": [i], "text": [bytes(20_000)]})) for i in range(500))))
    tracemalloc.start()
    assert sum(1 for _ in inputs.read(str(path), "tfrecord")) == inputs.scan(str(path), "tfrecord", 100).num_records
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * PIECE_BYTES < 500 * 20_000 / 4
