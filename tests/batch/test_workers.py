"""Several processes on one job: each shard is one's at a time, whoever ends, stops or dies meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal

import pytest

NUM_ROWS = 2
MAX_ROWS = 2 * NUM_ROWS
NUM_RECORDS = 13


@pytest.fixture
def whole(jobs):
    """The results of one worker; the job is to be done anew."""
    assert jobs.run(num_rows=NUM_ROWS) == 0, jobs.said()
    found = jobs.results()
    jobs.begin_anew()
    jobs.said()
    return found


def start(jobs, step_s=0.01, *more, **how):
    """A worker that takes a shard when it needs one."""
    return jobs.start("--window", "1", "--records-per-shard", "3", *more, num_rows=NUM_ROWS, step_s=step_s, **how)


def check_all_say_the_same(jobs, num_workers):
    totals = re.findall(r"jaxinfer: (\d+) records, (\d+) tokens in", jobs.said())
    assert len(totals) == num_workers and set(totals) == {("13", totals[0][1])}
    summary = json.loads((jobs.out / "summary.json").read_text())
    assert [summary["records"], summary["completion_tokens"]] == [int(number) for number in totals[0]]
    assert len(summary["shards"]) == 5 and not list(jobs.state.glob("shards/*/journal"))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_that_start_together_share_a_job(jobs, whole, num_workers):
    workers = [start(jobs, plan_s=0.1) for _ in range(num_workers)]
    assert [jobs.end_of(each) for each in workers] == [0] * num_workers, jobs.said()
    assert jobs.results() == whole
    assert len(jobs.ran()) == jobs.ran().total() == NUM_RECORDS
    check_all_say_the_same(jobs, num_workers)


def test_a_worker_takes_up_what_one_that_was_killed_had(jobs, whole):
    first = start(jobs, 30)  # has its first shards, and will not get far
    jobs.wait_for_requests(1)
    second = start(jobs)
    jobs.wait_for_requests(8)
    assert second.exitcode is None
    held = {place.split("/")[0] for place in jobs.ran()}
    first.kill()
    assert jobs.end_of(first) == -9 and jobs.end_of(second) == 0
    assert jobs.results() == whole and len(held) > 1
    assert len(jobs.ran()) == NUM_RECORDS and jobs.ran().total() <= NUM_RECORDS + MAX_ROWS
    check_all_say_the_same(jobs, 1)


def test_a_worker_leaves_shards_that_it_does_not_need_yet(jobs, whole):
    """However many records its window holds."""
    first = start(jobs, 30, "--window", "1000")
    jobs.wait_for_requests(MAX_ROWS)
    second = start(jobs, 0.01, "--window", "1000")
    jobs.wait_for_requests(MAX_ROWS + 4)
    assert {place.split("/")[0] for place in jobs.ran()} >= {"3", "4"}
    first.kill()
    assert jobs.end_of(first) == -9 and jobs.end_of(second) == 0
    assert jobs.results() == whole and jobs.ran().total() <= NUM_RECORDS + MAX_ROWS


def test_a_worker_that_stands_still_keeps_its_shards(jobs, whole):
    first = start(jobs, 0.05)
    jobs.wait_for_requests(2)
    os.kill(first.pid, signal.SIGSTOP)
    second = start(jobs)
    second.join(1.5)
    assert second.exitcode is None and len(jobs.results()) < 5
    os.kill(first.pid, signal.SIGCONT)
    assert jobs.end_of(first) == jobs.end_of(second) == 0
    assert jobs.results() == whole
    assert len(jobs.ran()) == jobs.ran().total() == NUM_RECORDS
    check_all_say_the_same(jobs, 2)


def test_a_worker_that_waits_for_others_can_be_ended(jobs, whole):
    first = start(jobs, 0.05)
    jobs.wait_for_requests(2)
    os.kill(first.pid, signal.SIGSTOP)
    second = start(jobs)
    second.join(1.0)
    os.kill(second.pid, signal.SIGTERM)
    assert jobs.end_of(second) == 143
    os.kill(first.pid, signal.SIGCONT)
    assert jobs.end_of(first) == 0
    assert jobs.results() == whole and jobs.ran().total() <= NUM_RECORDS + MAX_ROWS


def test_a_worker_with_other_settings_disturbs_nobody(jobs, whole):
    first = start(jobs, 0.05)
    jobs.wait_for_requests(2)
    assert jobs.run("--seed", "3", num_rows=NUM_ROWS) == 1
    assert "seed: 0 then, 3 now" in jobs.said()
    assert jobs.end_of(first) == 0
    assert jobs.results() == whole and jobs.ran().total() == NUM_RECORDS


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_workers_that_are_killed_at_random_and_started_again(jobs, whole, seed):
    rng = random.Random(seed)
    workers = [start(jobs) for _ in range(3)]
    num_killed = 0
    for _ in range(8):
        workers[0].join(rng.uniform(0, 0.1))
        victim = rng.randrange(3)
        workers[victim].kill()
        num_killed += jobs.end_of(workers[victim]) == -9
        workers[victim] = start(jobs)
    assert [jobs.end_of(each) for each in workers] == [0, 0, 0], jobs.said()
    assert jobs.results() == whole
    assert len(jobs.ran()) == NUM_RECORDS and jobs.ran().total() <= NUM_RECORDS + num_killed * MAX_ROWS
