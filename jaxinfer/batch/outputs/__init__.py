"""Files of results: TFRecord, JSONL or Parquet, one result for each record, in the records' order.

The fields of a result have the same names in each format:

    source_file, source_index            the record that it is the result of
    fingerprint                          of the model, the settings and the program
    prompt_tokens, completion_tokens     the request's usage
    text, token_ids, finish_reason       of each choice
    stop_reason                          of each choice: the string or the token id that ended it
    cumulative_logprob                   of each choice
    logprobs, top_logprobs               of each choice and token; `top_logprobs` pairs of id and log-probability
    prompt_logprobs, prompt_top_logprobs the same of each token of the prompt; none for the first
    error                                why there are no choices

Features that are passed through stand beside them under their own names. What is none is absent from TFRecords, and
null elsewhere.

TFRecord: a `tf.train.Example`. A feature of the choices has an entry a choice; `token_ids` and `logprobs` have those of
    all choices one after the other, `num_tokens` of them in each. `top_logprobs`,
    `prompt_top_logprobs` and `stop_reason` are JSON, and of `prompt_logprobs` none is NaN. Floats are of 32 bits, as
    everywhere in Examples.
JSONL: fields of the choices are those of the objects in the list `choices`. Bytes are their text, or `{"base64": …}`
    where they are no UTF-8; floats that JSON lacks are "NaN", "Infinity" and "-Infinity".
Parquet: columns of the choices are lists. A passed-through column has the type that fits all its values in the file:
    bool, int64, double, string or binary, or lists of them, and else JSON in a string.

The bytes are a function of the results (and, Parquet's, of the version of pyarrow).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxinfer.batch.outputs import jsonl, tfrecord
from jaxinfer.batch.records import Result

SUFFIXES = {"tfrecord": ".tfrecord", "jsonl": ".jsonl", "parquet": ".parquet"}
RESERVED = frozenset(
    (
        "source_file", "source_index", "fingerprint", "prompt_tokens", "completion_tokens", "choices", "text",
        "token_ids", "num_tokens", "finish_reason", "stop_reason", "cumulative_logprob", "logprobs", "top_logprobs",
        "prompt_logprobs", "prompt_top_logprobs", "error",
    )
)  # fmt: skip
_BUFFER_BYTES = 1 << 20


def check_format(format: str) -> None:
    """See that files of a format can be written, before there is something to write.

    Raises:
        ImportError: a package is missing; says how to install it.
    """
    if format == "parquet":
        _parquet()


def write_results(
    format: str, path: Path, results: Callable[[], Iterator[Result]], *, from_examples: bool = False
) -> None:
    """Writes what `results()` gives to `path`, over what is there, and has it on the disk before it returns.

    results: may be called twice, and gives the same each time.
    from_examples: the features are of `tf.train.Example`s, whose values are always in lists: a list of one is written
        as its value in JSONL, and in Parquet where no record of the file has more.

    Raises:
        OSError: as it comes; a part of the file may be there.
        ImportError: Parquet without pyarrow; says how to install it.
    """
    if format not in SUFFIXES:
        raise ValueError(f"{format!r} is no format of outputs: give one of {', '.join(SUFFIXES)}")
    with open(path, "wb", buffering=_BUFFER_BYTES) as file:
        if format == "tfrecord":
            tfrecord.write(file, results())
        elif format == "jsonl":
            jsonl.write(file, results(), from_examples)
        else:
            _parquet().write(file, results, from_examples)
        file.flush()
        os.fsync(file.fileno())


def _parquet() -> Any:
    try:
        from jaxinfer.batch.outputs import parquet  # loads pyarrow: only where it is used
    except ImportError as error:
        raise ImportError(f"Parquet files need {error.name}: pip install 'jaxinfer[batch]'") from None
    return parquet
