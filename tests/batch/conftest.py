"""Jobs in processes of their own, and the files they read."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.batch.example import encode
from jaxinfer.batch.framing import frame
from tests.batch import fake_job

WAIT_S = 60.0


class Jobs:
    """Of one test: a job's folders, and processes that work on it. `OUT/…` are its results."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.out = folder / "out"
        self.state = folder / "state"
        self._processes: list[Any] = []
        # Forked from a process that has all modules and no threads: quicker than a new one by far.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.batch.fake_job"])

    def argv(self, *more: str) -> list[str]:
        """The command; `more` goes before what it has anyway."""
        given = {"--input": f"{self.folder}/*.tfrecord", "--output": str(self.out), "--state": str(self.state)}
        return command({**given, "--records-per-shard": "3"}, more)

    def start(self, *more: str, **how: Any) -> Any:
        """A process that does the job or what is left of it; `how` are arguments of `fake_job.run`."""
        process = self._context.Process(target=fake_job.run, args=(self.argv(*more), self.folder), kwargs=how)
        process.start()
        self._processes.append(process)
        return process

    def run(self, *more: str, **how: Any) -> int:
        """Its exit code."""
        return self.end_of(self.start(*more, **how))

    def end_of(self, process: Any) -> int:
        process.join(WAIT_S)
        assert process.exitcode is not None, "the job hangs"
        return process.exitcode

    def results(self) -> dict[str, bytes]:
        """The finished files of results and errors."""
        found = sorted(path for path in self.out.iterdir() if path.name.startswith(("results-", "errors-")))
        return {path.name: path.read_bytes() for path in found}

    def ran(self) -> Counter[str]:
        """How often each request was given to an engine."""
        path = self.folder / "ran"
        return Counter(path.read_text().split() if path.exists() else ())

    def said(self) -> str:
        """What the processes have said since it was asked last."""
        path = self.folder / "said"
        text = path.read_text() if path.exists() else ""
        path.write_text("")
        return text

    def wait_for_requests(self, number: int) -> None:
        """Until so many were given to engines."""
        deadline_s = time.monotonic() + WAIT_S
        while self.ran().total() < number:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)

    def begin_anew(self) -> None:
        """Leave nothing but the inputs."""
        shutil.rmtree(self.out)
        shutil.rmtree(self.state)
        (self.folder / "ran").unlink()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def command(given: Mapping[str, str], more: Sequence[str]) -> list[str]:
    """Arguments; `more` replaces what is given, where it says the same."""
    own = [word for name, value in given.items() if name not in more for word in (name, value)]
    return [*own, "--quiet", *more]


@pytest.fixture
def new_jobs(tmp_path: Path) -> Iterator[Callable[[str], Jobs]]:
    made: list[Jobs] = []

    def make(name: str) -> Jobs:
        (tmp_path / name).mkdir()
        made.append(Jobs(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def jobs(new_jobs: Callable[[str], Jobs]) -> Jobs:
    """A job of two files."""
    jobs = new_jobs("job")
    write_prompts(jobs.folder / "a.tfrecord", 8)
    write_prompts(jobs.folder / "b.tfrecord", 5)
    return jobs


def write_prompts(path: Path, num_records: int, **more: Any) -> None:
    """Prompts of several lengths, outputs too."""
    path.write_bytes(b"".join(frame(encode(prompt(path.stem, index, **more))) for index in range(num_records)))


def prompt(name: str, index: int, **more: Any) -> dict[str, Any]:
    text = f"{name} {index} " * (1 + index % 3)
    return {"prompt": [text.encode()], "max_tokens": [1 + index * 7 % 12], "id": [index], **more}
