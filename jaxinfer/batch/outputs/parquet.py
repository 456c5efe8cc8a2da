"""Results as Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from jaxinfer.batch.outputs.kinds import Kind, as_text, common_kind, encoded, json_text, kind_of, one_or_list
from jaxinfer.batch.records import Result, size_of

# A row group is held as it is written: a row counts as many as the numbers it has.
_MAX_GROUP_ROWS = 8192
_MAX_GROUP_NUMBERS = 1 << 20
_TOP = pa.struct([("id", pa.int32()), ("logprob", pa.float64())])
_COLUMNS = {
    "source_file": pa.string(),
    "source_index": pa.int64(),
    "fingerprint": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "text": pa.list_(pa.string()),
    "token_ids": pa.list_(pa.list_(pa.int32())),
    "finish_reason": pa.list_(pa.string()),
    "stop_reason": pa.list_(pa.string()),
    "cumulative_logprob": pa.list_(pa.float64()),
    "logprobs": pa.list_(pa.list_(pa.float64())),
    "top_logprobs": pa.list_(pa.list_(pa.list_(_TOP))),
    "prompt_logprobs": pa.list_(pa.float64()),
    "prompt_top_logprobs": pa.list_(pa.list_(_TOP)),
    "error": pa.string(),
}
_TYPES = {
    "bool": pa.bool_(),
    "int": pa.int64(),
    "wide": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "json": pa.string(),
    None: pa.string(),
}


def write(file: BinaryIO, results: Callable[[], Iterator[Result]], from_examples: bool) -> None:
    kinds = _kinds(results(), from_examples)
    types = {name: pa.list_(_TYPES[kind.item]) if kind.is_list else _TYPES[kind.item] for name, kind in kinds.items()}
    schema = pa.schema({**_COLUMNS, **types})
    # Checksums as TFRecords have them; the schema is Parquet's own, without a second one of Arrow's.
    with pq.ParquetWriter(file, schema, write_page_checksum=True, store_schema=False) as writer:
        for group in _groups(results()):
            rows = [_row(result, kinds) for result in group]
            writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=_MAX_GROUP_ROWS)


def _kinds(results: Iterable[Result], from_examples: bool) -> dict[str, Kind]:
    """Of each passed-through column, the kind of all its values; in the order in which they come."""
    found: dict[str, dict[Kind, None]] = {}
    for result in results:
        for name, value in result.features.items():
            kind = kind_of(one_or_list(value) if from_examples else value)
            found.setdefault(name, {})[kind] = None
    return {name: common_kind(kinds, from_examples) for name, kinds in found.items()}


def _groups(results: Iterable[Result]) -> Iterator[list[Result]]:
    group: list[Result] = []
    num_numbers = 0
    for result in results:
        group.append(result)
        num_numbers += size_of(result.features) // 8
        num_numbers += len(result.prompt_logprobs or ()) + sum(
            len(place or ()) for place in result.prompt_top_logprobs or ()
        )
        num_numbers += sum(
            len(choice.token_ids) + sum(map(len, choice.top_logprobs or ())) for choice in result.choices
        )
        if len(group) == _MAX_GROUP_ROWS or num_numbers >= _MAX_GROUP_NUMBERS:
            yield group
            group, num_numbers = [], 0
    if group:
        yield group


def _row(result: Result, kinds: dict[str, Kind]) -> dict[str, Any]:
    choices = result.choices
    reasons = (choice.stop_reason for choice in choices)
    return {
        "source_file": _text(result.file),
        "source_index": result.index,
        "fingerprint": _text(result.fingerprint),
        "prompt_tokens": result.num_prompt_tokens,
        "completion_tokens": result.num_output_tokens,
        "text": [_text(choice.text) for choice in choices],
        "token_ids": [choice.token_ids for choice in choices],
        "finish_reason": [_text(choice.finish_reason) for choice in choices],
        "stop_reason": [None if reason is None else json_text(reason).decode() for reason in reasons],
        "cumulative_logprob": [choice.cumulative_logprob for choice in choices],
        "logprobs": [choice.logprobs for choice in choices],
        "top_logprobs": [None if choice.top_logprobs is None else _top(choice.top_logprobs) for choice in choices],
        "prompt_logprobs": result.prompt_logprobs,
        "prompt_top_logprobs": None if result.prompt_top_logprobs is None else _top(result.prompt_top_logprobs),
        "error": None if result.error is None else _text(result.error),
        **{name: _cell(result.features.get(name), kind) for name, kind in kinds.items()},
    }


def _top(places: Sequence[list[tuple[int, float]] | None]) -> list[Any]:
    return [
        None if place is None else [{"id": token, "logprob": logprob} for token, logprob in place] for place in places
    ]


def _cell(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind.item == "json":
        return json_text(value).decode()
    if kind.is_list:
        return [_scalar(each, kind) for each in (value if isinstance(value, list) else [value])]
    return _scalar(one_or_list(value), kind)


def _scalar(value: Any, kind: Kind) -> Any:
    match kind.item:
        case "text":
            return as_text(value) if isinstance(value, bytes) else _text(value)
        case "bytes":
            return encoded(value) if isinstance(value, str) else value
        case "float":
            return float(value)
    return value


def _text(text: str) -> str:
    return encoded(text).decode()
