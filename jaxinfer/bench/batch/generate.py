"""The other side of the comparison: a process that calls `LLM.generate`, and rests between two calls."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.bench.resting import RestingProcess


class Generate(RestingProcess):
    """A process with an `LLM` whose programs are all compiled; `first` is the machine and the model, for a report.

    Args:
        model, settings: `LLM`'s.
        source: a JSONL file of `prompt`, `max_tokens` and `seed`.
        sampling: fields of `SamplingParams` that all prompts have.
    """

    def __init__(self, model: str | None, settings: Mapping[str, Any], source: Path, sampling: Mapping[str, Any]):
        arguments = [model, dict(settings), str(source), dict(sampling)]
        super().__init__("jaxinfer.bench.batch.generate", arguments, "the process of LLM.generate")

    def run(self) -> dict[str, Any]:
        """`seconds` and `cpu_s` of a call with all prompts, from an empty prefix cache, and the `token_ids` of each."""
        return self.ask(None)


def _serve(model: str | None, settings: dict[str, Any], source: str, sampling: dict[str, Any]) -> None:
    from jaxinfer.bench.environment import environment
    from jaxinfer.llm import LLM
    from jaxinfer.request import SamplingParams

    llm = LLM(model, verbose=False, **settings)
    llm.wait_until_compiled()
    records = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    prompts = [record.pop("prompt") for record in records]
    params = [SamplingParams(**sampling, **record) for record in records]
    print(json.dumps(environment(llm.engine.config.dtype, llm.source)), flush=True)
    for _ in sys.stdin:
        llm.engine.scheduler.pages.forget()
        pages = llm.engine.scheduler.pages
        hits, looked_up = pages.num_cached_tokens, pages.num_looked_up_tokens
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        rate = (pages.num_cached_tokens - hits) / max(1, pages.num_looked_up_tokens - looked_up)
        token_ids = [output.outputs[0].token_ids for output in outputs]
        found = {"seconds": seconds, "cpu_s": cpu_s, "cache_hit_rate": rate, "token_ids": token_ids}
        print(json.dumps(found), flush=True)
    llm.close()


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
