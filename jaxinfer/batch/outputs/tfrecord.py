"""Results as TFRecord files of `tf.train.Example`s."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any, BinaryIO

from jaxinfer.batch.example import Features, encode
from jaxinfer.batch.framing import frame
from jaxinfer.batch.outputs.kinds import encoded, json_text, kind_of
from jaxinfer.batch.records import Choice, Result


def write(file: BinaryIO, results: Iterable[Result]) -> None:
    for result in results:
        file.write(frame(encode(_features(result))))


def _features(result: Result) -> Features:
    features: Features = {name: _values(value) for name, value in result.features.items() if value is not None}
    features["source_file"] = [encoded(result.file)]
    features["source_index"] = [result.index]
    features["fingerprint"] = [encoded(result.fingerprint)]
    features["prompt_tokens"] = [result.num_prompt_tokens]
    features["completion_tokens"] = [result.num_output_tokens]
    if result.choices:
        _add_choices(features, result.choices)
    if result.prompt_logprobs is not None:
        features["prompt_logprobs"] = [math.nan if each is None else each for each in result.prompt_logprobs]
    if result.prompt_top_logprobs is not None:
        features["prompt_top_logprobs"] = [json_text(result.prompt_top_logprobs)]
    if result.error is not None:
        features["error"] = [encoded(result.error)]
    return features


def _add_choices(features: Features, choices: tuple[Choice, ...]) -> None:
    features["text"] = [encoded(choice.text) for choice in choices]
    features["token_ids"] = list(chain.from_iterable(choice.token_ids for choice in choices))
    features["num_tokens"] = [len(choice.token_ids) for choice in choices]
    features["finish_reason"] = [encoded(choice.finish_reason) for choice in choices]
    features["cumulative_logprob"] = [float(choice.cumulative_logprob) for choice in choices]
    if any(choice.stop_reason is not None for choice in choices):
        features["stop_reason"] = [json_text(choice.stop_reason) for choice in choices]
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    if logprobs:
        features["logprobs"] = list(chain.from_iterable(logprobs))
    if any(choice.top_logprobs is not None for choice in choices):
        features["top_logprobs"] = [json_text(choice.top_logprobs) for choice in choices]


def _values(value: Any) -> list[Any]:
    kind = kind_of(value)
    values = value if kind.is_list else [value]
    match kind.item:
        case "json":
            return [json_text(value)]
        case "text" | "bytes":
            return [encoded(each) if isinstance(each, str) else each for each in values]
        case "float":
            return [float(each) for each in values]
        case "bool":
            return [int(each) for each in values]
    return values
