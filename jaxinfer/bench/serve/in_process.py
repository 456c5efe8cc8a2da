"""The other side of a comparison: the same requests in a process that has the engine within it, without a server."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jaxinfer.bench.resting import RestingProcess
from jaxinfer.bench.serve.prompts import Lengths, Turn, random_sessions


class InProcess(RestingProcess):
    """A process with an `LLM`.

    Args:
        model, settings: `LLM`'s.
    """

    def __init__(self, model: str | None, settings: Mapping[str, Any], lengths: Lengths):
        arguments = [model, dict(settings), asdict(lengths)]
        super().__init__("jaxinfer.bench.serve.in_process", arguments, "the process without a server")

    def measure(self, kind: str, num: int, seed: int) -> dict[str, Any]:
        """What `_Worker`'s method of that name measured with the first `num` prompts of a seed."""
        return self.ask([kind, num, seed])


class _Worker:
    """In the other process: an engine with every program compiled, and the measurements."""

    def __init__(self, model: str | None, settings: Mapping[str, Any], lengths: Mapping[str, Any]):
        from jaxinfer.llm import LLM

        self._lengths = Lengths(**lengths)
        self._llm = LLM(model, verbose=False, **settings)
        self._llm.wait_until_compiled()

    def throughput(self, turns: list[Turn]) -> dict[str, Any]:
        """All at once by `LLM.generate`: `output_tokens_per_s` of the whole call, its processor time, the `texts`."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outputs = self._llm.generate([_prompt(t) for t in turns], [_params(t) for t in turns], use_tqdm=False)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        texts = [output.outputs[0].text for output in outputs]
        return {"output_tokens_per_s": num_tokens / elapsed_s, "cpu_s_per_token": cpu_s / num_tokens, "texts": texts}

    def single(self, turns: list[Turn]) -> dict[str, Any]:
        """One after another by `LLM.stream`: `ttft_s` and `tpot_s` of each, as a client would see them."""
        ttft_s, tpot_s = [], []
        for turn in turns:
            start_s = time.perf_counter()
            moments_s = [time.perf_counter() - start_s for _ in self._llm.stream(_prompt(turn), _params(turn))]
            ttft_s.append(moments_s[0])
            tpot_s.append((moments_s[-1] - moments_s[0]) / max(1, (turn.max_tokens or 0) - 1))
        return {"ttft_s": ttft_s, "tpot_s": tpot_s}

    def run(self, kind: str, num: int, seed: int) -> dict[str, Any]:
        turns = [turn for (turn,) in itertools.islice(random_sessions(self._lengths, seed), num)]
        return {"throughput": self.throughput, "single": self.single}[kind](turns)


def _prompt(turn: Turn) -> Any:
    return turn.content if isinstance(turn.content, str) else {"prompt_token_ids": turn.content}


def _params(turn: Turn) -> Any:
    from jaxinfer.request import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True)


def _serve() -> None:
    worker = _Worker(*json.loads(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
