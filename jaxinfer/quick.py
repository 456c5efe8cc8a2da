"""`generate`: one call, with a model that is loaded once and kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.llm import LLM, raise_error
from jaxinfer.prompts import Prompt
from jaxinfer.request import SamplingParams

_kept: dict[str | None, LLM] = {}


def generate(prompts: Prompt | Sequence[Prompt], model: str | None = None, **fields: Any) -> str | list[str]:
    """Complete one prompt or several with a model that is loaded once and kept; `fields` are `SamplingParams`'.

    Where neither `fields` nor the model's `generation_config.json` set a temperature it is 0: the likeliest tokens, the
    same on every call.

    Returns:
        The text for one prompt, a list of texts for several.

    Raises:
        ValueError: a bad prompt or field, or a field whose result is more than a text (`n`, `logprobs` …).
        RequestError: a request failed, as where no token was allowed.
    """
    for name in ("n", "best_of", "logprobs", "prompt_logprobs", "return_hidden_states", "return_logits"):
        if name in fields:
            raise ValueError(f"{name}={fields[name]!r}: generate() returns one text a prompt; use LLM.generate")
    if model not in _kept:
        for other in _kept.values():
            other.close()  # before the next one takes its memory
        _kept.clear()
        _kept[model] = LLM(model)
    llm = _kept[model]
    params = SamplingParams(**{"temperature": 0.0, **llm.default_sampling_fields, **fields})
    outputs = llm.generate(prompts, params)
    for output in outputs:
        raise_error(output)
    texts = [output.outputs[0].text for output in outputs]
    return texts[0] if isinstance(prompts, str | Mapping) else texts
