"""The other side of the comparison: a process that calls `LLM.generate`, and rests between two calls."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Generate:
    """A process with an `LLM` whose programs are all compiled, started when entered and ended when left.

    Args:
        model, settings: `LLM`'s.
        source: a JSONL file of `prompt`, `max_tokens` and `seed`.
        sampling: fields of `SamplingParams` that all prompts have.

    `environment` is the machine and the model, for a report.

    Raises:
        RuntimeError: it could not start, or ended; the message has its last line.
    """

    def __init__(self, model: str | None, settings: Mapping[str, Any], source: Path, sampling: Mapping[str, Any]):
        self._arguments = json.dumps([model, dict(settings), str(source), dict(sampling)])

    def __enter__(self) -> Generate:
        command = [sys.executable, "-m", "jaxinfer.bench.batch.generate", self._arguments]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.environment = self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()  # the end of its input is the end of its work
        self._process.wait()
        self._log.close()

    def run(self) -> dict[str, Any]:
        """`seconds` and `cpu_s` of a call with all prompts, from an empty prefix cache, and the `token_ids` of each."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().strip().rpartition("\n")[2]
        raise RuntimeError(f"the process of LLM.generate ended with {code}: {last}")


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
