"""One request under many circumstances: are its tokens and log-probabilities the same, bit for bit?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.request import RequestOptions, SamplingParams

_NUM_NEIGHBOURS = 6


@dataclass(frozen=True)
class Circumstance:
    """What a request ran under, and what shows that it did; `same` where its output has the bits of the request alone.

    `evidence` counts what the circumstance is about: cached tokens, preemptions, neighbours.
    """

    name: str
    same: bool
    evidence: int


def check_invariance(
    make: Callable[..., Any], *, num_prompt_tokens: int = 40, num_output_tokens: int = 12
) -> list[Circumstance]:
    """Run the same requests, one greedy and one sampled, under each circumstance.

    `make(**settings)` makes an `LLM` with room for `_NUM_NEIGHBOURS` and two more sequences.
    """
    with make() as llm:
        case = _Case(llm.engine.config.model.vocab_size, num_prompt_tokens, num_output_tokens)
        alone = [case.run(llm, index)[0] for index in range(2)]
        found = [Circumstance(*each) for each in _on_one_engine(llm, case, alone)]
    engines: list[tuple[str, dict[str, Any]]] = [
        ("chunks of 16", {"max_num_batched_tokens": 16}),
        ("chunks of 64", {"max_num_batched_tokens": 64}),
        ("pages of 32", {"page_size": 32}),
        ("no overlap", {"overlap": False}),
        ("no prefix cache", {"enable_prefix_caching": False}),
    ]
    for name, settings in engines:
        with make(**settings) as llm:
            outputs, num_steps = case.run_beside(llm, first=True)
            found.append(Circumstance(name, outputs == alone, num_steps))
    with make(max_num_seqs=_NUM_NEIGHBOURS) as llm:
        outputs, num_preemptions = case.run_preempted(llm)
        found.append(Circumstance("preempted", outputs == alone, num_preemptions))
    return found


def _on_one_engine(llm: Any, case: _Case, alone: list[Any]) -> Iterator[tuple[str, bool, int]]:
    again = [case.run(llm, index) for index in range(2)]
    yield "again, from the prefix cache", [each for each, _ in again] == alone, sum(count for _, count in again)
    for name, first in (("first of many", True), ("last of many", False)):
        outputs, _ = case.run_beside(llm, first=first)
        yield name, outputs == alone, _NUM_NEIGHBOURS
    forked = llm.generate([case.prompt], [replace(case.params[1], n=2)], use_tqdm=False)[0]
    yield "one of two choices", _bits(forked.outputs[0]) == alone[1], 2


class _Case:
    """The requests that are compared, and the ones that run beside them."""

    def __init__(self, vocab_size: int, num_prompt_tokens: int, num_output_tokens: int):
        rng = random.Random(0)
        self.prompt = {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(num_prompt_tokens)]}
        common = {"max_tokens": num_output_tokens, "logprobs": 3, "ignore_eos": True}
        self.params = [
            SamplingParams(temperature=0.0, **common),
            SamplingParams(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.1, **common),
        ]
        lengths = [rng.randrange(1, num_prompt_tokens + 1) for _ in range(_NUM_NEIGHBOURS)]
        self.neighbours = [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(n)]} for n in lengths]
        self.theirs = [
            SamplingParams(
                temperature=0.3 * index,
                top_k=5 * index,
                seed=index,
                presence_penalty=0.1 * index,
                max_tokens=rng.randrange(1, num_output_tokens + 1),
                ignore_eos=True,
            )
            for index in range(_NUM_NEIGHBOURS)
        ]

    def run(self, llm: Any, index: int) -> tuple[Any, int]:
        """One of the requests alone: the bits of its output, and how many tokens of its prompt were cached."""
        (output,) = llm.generate([self.prompt], [self.params[index]], use_tqdm=False)
        return _bits(output.outputs[0]), output.num_cached_tokens

    def run_beside(self, llm: Any, *, first: bool) -> tuple[list[Any], int]:
        """Both requests with the others, before or after them: the bits of their outputs, and tokens computed."""
        prompts, params = [self.prompt] * 2 + self.neighbours, self.params + self.theirs
        if not first:
            prompts, params = self.neighbours + [self.prompt] * 2, self.theirs + self.params
        outputs = llm.generate(prompts, params, use_tqdm=False)
        chosen = outputs[:2] if first else outputs[-2:]
        return [_bits(output.outputs[0]) for output in chosen], int(llm.stats()["num_computed_tokens"])

    def run_preempted(self, llm: Any) -> tuple[list[Any], int]:
        """Both requests at a low priority, the others in the middle of them: the bits, and how often one gave way."""
        engine, outputs = llm.engine, {}
        for index, params in enumerate(self.params):
            engine.add(f"low-{index}", self.prompt["prompt_token_ids"], params, options=RequestOptions(priority=1))
        for _ in range(5):
            engine.step()
        for index, (prompt, params) in enumerate(zip(self.neighbours, self.theirs, strict=True)):
            engine.add(f"high-{index}", prompt["prompt_token_ids"], params)
        while engine.has_work:
            outputs.update((output.request_id, output) for output, _ in engine.step())
        chosen = [_bits(outputs[f"low-{index}"].outputs[0]) for index in range(2)]
        return chosen, int(engine.stats()["num_preemptions"])


def _bits(choice: Any) -> Any:
    """Everything that a choice says in numbers, exactly."""
    logprobs = [
        [(token, each.logprob.hex(), each.rank) for token, each in place.items()] for place in choice.logprobs or []
    ]
    return choice.token_ids, logprobs, choice.cumulative_logprob.hex(), choice.text
