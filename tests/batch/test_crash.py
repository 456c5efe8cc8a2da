"""Jobs that are killed at any moment and run again: nothing is lost, nothing is there twice, little is done twice."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer.batch.__main__ import main
from jaxinfer.batch.inputs import read
from tests.batch.conftest import write_prompts

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny-llama"

NUM_ROWS = 2
MAX_ROWS = 2 * NUM_ROWS
NUM_RECORDS = 13
SPREAD = (1, 3, 4, 7, 10, 2, 14, 9, 5, 16, 11, 20)
"""Durable calls at which one run after the other is ended."""


def check_whole(jobs, uninterrupted, num_ended):
    """All is there as if nothing had happened, and what was done again is what was in flight."""
    assert jobs.results() == uninterrupted
    ran = jobs.ran()
    assert len(ran) == NUM_RECORDS and ran.total() - NUM_RECORDS <= num_ended * MAX_ROWS
    assert not list(jobs.state.glob("shards/*/journal")) and not list(jobs.folder.rglob("*.part"))


@pytest.fixture
def uninterrupted(jobs):
    """The results of the job `jobs`, which is to be done anew."""
    assert jobs.run(num_rows=NUM_ROWS) == 0, jobs.said()
    found = jobs.results()
    assert len(found) == 5 and jobs.ran().total() == NUM_RECORDS
    places = [
        (each.fields["source_file"][0].rsplit(b"/", 1)[-1], each.fields["source_index"][0])
        for name in sorted(found)
        for each in read(str(jobs.out / name), "tfrecord")
    ]
    assert places == [(b"a.tfrecord", i) for i in range(8)] + [(b"b.tfrecord", i) for i in range(5)]
    jobs.begin_anew()
    return found


@pytest.mark.parametrize("after", [False, True])
def test_ended_at_one_durable_call_after_another(jobs, uninterrupted, after):
    num_ended = 0
    for number in SPREAD:
        code = jobs.run(num_rows=NUM_ROWS, crash=number, after=after)
        assert code in (0, 9), jobs.said()
        num_ended += code == 9
    assert num_ended > 2  # how many calls there are depends on how many results share one
    assert jobs.run(num_rows=NUM_ROWS) == 0
    check_whole(jobs, uninterrupted, num_ended)


@pytest.mark.full
@pytest.mark.parametrize("after", [False, True])
def test_ended_at_any_durable_call(jobs, uninterrupted, after):
    assert jobs.run(num_rows=NUM_ROWS) == 0
    num_calls = int((jobs.folder / "calls").read_text())
    assert num_calls > 60
    for number in range(1, num_calls + 3):  # groups may be smaller, and so more, than they were before
        jobs.begin_anew()
        code = jobs.run(num_rows=NUM_ROWS, crash=number, after=after)
        assert code in (0, 9)
        assert jobs.run(num_rows=NUM_ROWS) == 0, jobs.said()
        check_whole(jobs, uninterrupted, code == 9)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_killed_at_random_times(jobs, uninterrupted, seed):
    rng = random.Random(seed)
    num_killed = 0
    while True:
        job = jobs.start(num_rows=NUM_ROWS, step_s=0.04)
        job.join(rng.uniform(0, 0.2 + 0.02 * num_killed))  # longer at last, on a machine that is busy
        if job.exitcode is not None:
            break
        job.kill()
        num_killed += jobs.end_of(job) == -9
    assert job.exitcode == 0 and num_killed > 2
    check_whole(jobs, uninterrupted, num_killed)


@pytest.mark.slow
def test_the_command_killed_and_run_with_other_rows(jobs):
    whole, found = whole_and_resumed(jobs, ["--model", str(TINY), "--max-model-len", "64"], 20)
    assert len(whole) == 4 and found == whole


@pytest.mark.full
def test_the_command_with_the_real_model_killed_and_run_with_other_rows(jobs):
    whole, found = whole_and_resumed(jobs, ["--max-model-len", "128"], 8)
    assert len(whole) == 4 and found == whole


def whole_and_resumed(jobs, flags, num_tokens):
    """The results of one run, and of one that is killed twice and goes on with other numbers of rows.

    Sampled with the seeds that records get, so that another batch would show in other tokens.
    """
    write_prompts(jobs.folder / "a.tfrecord", 30, max_tokens=[num_tokens])
    write_prompts(jobs.folder / "b.tfrecord", 7, max_tokens=[num_tokens], logprobs=[1])
    given = jobs.argv("--temperature", "1", "--records-per-shard", "10", "--max-num-seqs", "4", *flags)
    assert main([*given, "--output", str(jobs.folder / "whole"), "--state", str(jobs.folder / "other")]) == 0
    rng = random.Random(1)
    for num_rows in (2, 3):
        command = [sys.executable, "-m", "jaxinfer.batch", *given, "--max-num-seqs", str(num_rows)]
        with subprocess.Popen(command, cwd=ROOT) as job:
            aim = num_bytes_done(jobs) + rng.randrange(1, 4000)
            while num_bytes_done(jobs) < aim:
                assert job.poll() is None
                time.sleep(0.002)
            job.kill()
    assert not (jobs.out / "summary.json").exists()
    assert main(given) == 0
    return {path.name: path.read_bytes() for path in sorted((jobs.folder / "whole").glob("results-*"))}, jobs.results()


def num_bytes_done(jobs):
    """Of all that is committed or finished."""
    files = [*jobs.state.glob("shards/*/journal"), *jobs.out.glob("results-*")]
    try:
        return sum(path.stat().st_size for path in files)
    except FileNotFoundError:  # moved meanwhile
        return 0
