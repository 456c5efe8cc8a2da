"""Results as JSON, one object a line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

from jaxinfer.batch.outputs.kinds import json_text, one_or_list
from jaxinfer.batch.records import Choice, Result


def write(file: BinaryIO, results: Iterable[Result], from_examples: bool) -> None:
    for result in results:
        file.write(json_text(_fields(result, from_examples)) + b"\n")


def _fields(result: Result, from_examples: bool) -> dict[str, Any]:
    features = result.features
    if from_examples:
        features = {name: one_or_list(values) for name, values in features.items()}
    return {
        "source_file": result.file,
        "source_index": result.index,
        "fingerprint": result.fingerprint,
        "prompt_tokens": result.num_prompt_tokens,
        "completion_tokens": result.num_output_tokens,
        "choices": [_choice(choice) for choice in result.choices],
        "prompt_logprobs": result.prompt_logprobs,
        "prompt_top_logprobs": result.prompt_top_logprobs,
        "error": result.error,
        **features,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "cumulative_logprob": choice.cumulative_logprob,
        "logprobs": choice.logprobs,
        "top_logprobs": choice.top_logprobs,
    }
