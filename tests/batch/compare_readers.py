"""Readers of TFRecord files beside ours: what each makes of damaged files, and how long it takes.

    python tests/batch/compare_readers.py NAME    # ours, tfrecord, grain, apache-beam or ray, which must be installed

The table in docs/batch.md is from this. An environment of its own for each shows what each brings along.
"""

from __future__ import annotations

import gzip
import resource
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

NUM_RECORDS = 200_000
WRITTEN_BY_TENSORFLOW = Path(__file__).parent / "data" / "prompts-00000-of-00001.tfrecord"
Reader = Callable[[str], Iterator[object]]


def ours() -> Reader:
    from jaxinfer.batch import inputs
    from jaxinfer.batch.inputs import tfrecord  # noqa: F401  its import counts

    def read(path: str) -> Iterator[object]:
        for record in inputs.read(path, "tfrecord"):
            yield record.fields if record.error is None else ValueError(record.error)

    return read


def tfrecord() -> Reader:
    import tfrecord  # pyright: ignore[reportMissingImports]

    return lambda path: map(bytes, tfrecord.tfrecord_iterator(path))


def tfrecord_loader() -> Reader:
    import tfrecord  # pyright: ignore[reportMissingImports]

    return lambda path: tfrecord.tfrecord_loader(path, None)


def grain() -> Reader:
    from grain.experimental import TFRecordIterDataset  # pyright: ignore[reportMissingImports]

    return lambda path: iter(TFRecordIterDataset(path))


def apache_beam() -> Reader:
    from apache_beam.io.tfrecordio import _TFRecordUtil  # pyright: ignore[reportMissingImports]

    def read(path: str) -> Iterator[object]:
        with open(path, "rb") as file:
            while (record := _TFRecordUtil.read_record(file)) is not None:
                yield record

    return read


def ray() -> Reader:
    import pyarrow as pa
    import ray.data  # noqa: F401  # pyright: ignore[reportMissingImports]
    from ray.data._internal.datasource import tfrecords_datasource  # pyright: ignore[reportMissingImports]

    return lambda path: map(bytes, tfrecords_datasource._read_records(pa.OSFile(path), path))


READERS = {
    "ours": ours,
    "tfrecord": tfrecord,
    "tfrecord-with-examples": tfrecord_loader,
    "grain": grain,
    "apache-beam": apache_beam,
    "ray": ray,
}


def damaged() -> dict[str, bytes]:
    """The four records that TensorFlow wrote, and what can happen to them."""
    whole = WRITTEN_BY_TENSORFLOW.read_bytes()
    second = 16 + int.from_bytes(whole[:8], "little")

    def changed(at: int, byte: int) -> bytes:
        return whole[:at] + bytes([byte]) + whole[at + 1 :]

    return {
        "whole": whole,
        "GZIP": gzip.compress(whole),
        "ZLIB": zlib.compress(whole),
        "second record's data changed": changed(second + 20, whole[second + 20] ^ 1),
        "checksum of its length changed": changed(second + 8, whole[second + 8] ^ 1),
        "its length changed to 2^62": changed(second + 7, 0x40),
        "cut within the third record": whole[: -16 - 100],
    }


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a length of 2^62 bytes is asked for by some
    started = time.perf_counter()
    read = READERS[sys.argv[1]]()
    print(f"import: {time.perf_counter() - started:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/file.tfrecord"
        for name, content in damaged().items():
            Path(path).write_bytes(content)
            print(f"{name}: {outcome(read, path)}")
        record = WRITTEN_BY_TENSORFLOW.read_bytes()[: 16 + WRITTEN_BY_TENSORFLOW.read_bytes()[0]]
        Path(path).write_bytes(record * NUM_RECORDS)
        for _ in range(3):
            started = time.process_time()
            num_records = sum(1 for _ in read(path))
            print(f"{(time.process_time() - started) / num_records * 1e6:.1f} µs a record of three features")


def outcome(read: Reader, path: str) -> str:
    num_good, errors = 0, []
    try:
        for record in read(path):
            if isinstance(record, ValueError):
                errors.append(str(record))
            else:
                num_good += 1
    except Exception as error:
        errors.append(f"ended by {type(error).__name__}: {error}"[:100])
    return f"{num_good} records" + "".join(f"; {error}" for error in errors)


if __name__ == "__main__":
    main()
