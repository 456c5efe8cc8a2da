"""What goes wrong under a job: a full disk, damaged or changed files, another program, signals. It says so, and goes on
once that is mended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

from jaxinfer.batch.inputs import read
from tests.batch.conftest import write_prompts
from tests.batch.fake_job import ENVIRONMENT, MODEL

NUM_ROWS = 2
MAX_ROWS = 2 * NUM_ROWS
NUM_RECORDS = 13
LONG = {"note": [b"\xff" * 4000]}


def refused(jobs, *more, **how):
    """What a job says that cannot go on."""
    jobs.said()
    assert jobs.run(*more, num_rows=NUM_ROWS, **how) == 1
    said = jobs.said()
    assert said.startswith("error: ") and "Traceback" not in said and not list(jobs.folder.rglob("*.part"))
    return said


@pytest.fixture
def whole(jobs):
    """The results of the job, which has ended."""
    assert jobs.run(num_rows=NUM_ROWS) == 0, jobs.said()
    jobs.said()
    return jobs.results()


def interrupted(jobs, num_requests=8, *more):
    """Have the job end midway."""
    process = jobs.start(*more, num_rows=NUM_ROWS, step_s=0.02)
    jobs.wait_for_requests(num_requests)
    os.kill(process.pid, signal.SIGTERM)
    assert jobs.end_of(process) == 143
    assert "what is done is kept" in jobs.said()


def check_goes_on(jobs, whole, *more, num_ended=1, num_again=0, **how):
    """The rest is done, and little again."""
    assert jobs.run(*more, num_rows=NUM_ROWS, **how) == 0, jobs.said()
    assert jobs.results() == whole
    assert NUM_RECORDS <= jobs.ran().total() <= NUM_RECORDS + num_ended * MAX_ROWS + num_again


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """A file system of that size there; what is yielded makes it larger."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("this user may mount nothing")
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=10m", folder], check=True)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("place", "num_bytes", "num_requests"),
    [("state", 4096, 0), ("state", 5 * 4096, NUM_ROWS), ("out", 5 * 4096, 3)],
    ids=["plan", "journal", "results"],
)
def test_a_full_disk(new_jobs, place, num_bytes, num_requests):
    whole, jobs = new_jobs("whole"), new_jobs("jobs")
    write_prompts(jobs.folder / "a.tfrecord", 8, **LONG)
    write_prompts(jobs.folder / "b.tfrecord", 5, **LONG)
    given = f"{jobs.folder}/*.tfrecord"
    assert whole.run("--input", given) == 0
    with small_disk(getattr(jobs, place), num_bytes) as enlarge:
        said = refused(jobs)
        assert (
            f"No space left on device: '{getattr(jobs, place)}/" in said
            and "the same command goes on once that is mended" in said
        )
        assert num_requests <= jobs.ran().total() <= NUM_RECORDS
        refused(jobs)
        enlarge()
        check_goes_on(jobs, whole.results(), num_ended=2)


def test_a_limit_of_a_files_size(jobs):
    write_prompts(jobs.folder / "b.tfrecord", 5, **LONG)
    assert jobs.run(num_rows=NUM_ROWS) == 0
    whole = jobs.results()
    jobs.begin_anew()
    assert "File too large" in refused(jobs, most_bytes=8000)
    check_goes_on(jobs, whole)


def test_a_disk_that_is_full_from_any_durable_call_on(jobs, whole):
    num_calls = int((jobs.folder / "calls").read_text())
    for number in (*range(1, 12), *range(12, num_calls, 9)):
        jobs.begin_anew()
        jobs.said()
        if jobs.run(num_rows=NUM_ROWS, crash=number, full=True) == 0:
            assert number > num_calls - 8  # what is committed in larger groups takes fewer calls
            continue
        said = jobs.said()
        assert "No space left on device" in said and "Traceback" not in said
        check_goes_on(jobs, whole)


@pytest.mark.parametrize("damage", ["torn", "zeros", "half"])
def test_the_torn_end_of_a_journal_is_dropped(jobs, whole, damage):
    jobs.begin_anew()
    interrupted(jobs)
    journal = max(jobs.state.glob("shards/*/journal"))
    content = journal.read_bytes()
    journal.write_bytes(
        {"torn": content + b'0badf00d 99 [{"ind', "zeros": content + bytes(512), "half": content[:-20]}[damage]
    )
    check_goes_on(jobs, whole, num_again=2 if damage == "half" else 0)


def test_a_journal_damaged_before_its_end_stops_the_job(jobs):
    assert jobs.run("--records-per-shard", "8", num_rows=NUM_ROWS) == 0
    whole = jobs.results()
    jobs.begin_anew()
    interrupted(jobs, 7, "--records-per-shard", "8")
    journal = jobs.state / "shards" / "00000" / "journal"
    content = journal.read_bytes()
    assert content.count(b"\n") > 1
    journal.write_bytes(content.replace(b"index", b"indes", 1))
    said = refused(jobs, "--records-per-shard", "8")
    assert f"{journal}: the line at byte 0 is damaged" in said and "or remove it" in said
    journal.unlink()
    check_goes_on(jobs, whole, "--records-per-shard", "8", num_again=8)


DAMAGE = [b"", b"{", b"[]", b"null", b"7", b'"text"', b"[[1]]", b'{"version": 1}', b"\xff\xfe", b'{"source": []}']


@pytest.mark.parametrize("name", ["plan.json", "settings.json", "fingerprint.json", "shards/00001/done.json"])
def test_a_damaged_file_of_the_state_stops_the_job(jobs, whole, name):
    path = jobs.state / name
    content = path.read_bytes()
    for damage in DAMAGE:
        path.write_bytes(damage)
        said = refused(jobs)
        if damage[:1] != b"{" or name != "settings.json":  # another object is other settings
            assert str(path) in said and ("restore it" in said or "remove it" in said)
    path.write_bytes(content)
    check_goes_on(jobs, whole, num_ended=0)


def test_another_digit_in_the_plan_is_damage(jobs, whole):
    path = jobs.state / "plan.json"
    content = path.read_bytes()
    assert content.count(b'"first": 3') == 2
    path.write_bytes(content.replace(b'"first": 3', b'"first": 4', 1))
    assert "plan.json is damaged (its digest does not fit it)" in refused(jobs)
    path.write_bytes(content.replace(b'"version": 1', b'"version": 0'))
    assert "another version of jaxinfer" in refused(jobs)
    path.unlink()
    assert "no plan.json that says what of" in refused(jobs)


def test_a_damaged_summary_is_written_anew(jobs, whole):
    path = jobs.out / "summary.json"
    content = path.read_bytes()
    for damage in (*DAMAGE, b'{"run": {}}'):
        path.write_bytes(damage)
        check_goes_on(jobs, whole, num_ended=0)
        assert "jaxinfer: 13 records" in jobs.said() and len(path.read_bytes()) > len(content) - 40


@pytest.mark.parametrize("damage", ["removed", "shorter", "forgotten"])
def test_a_shard_without_its_results_runs_again(jobs, whole, damage):
    name = "results-00001-of-00005.tfrecord"
    if damage == "removed":
        (jobs.out / name).unlink()
    elif damage == "shorter":
        (jobs.out / name).write_bytes(whole[name][:-1])
    else:
        (jobs.state / "shards" / "00001" / "done.json").unlink()
    (jobs.folder / "ran").unlink()
    assert jobs.run(num_rows=NUM_ROWS) == 0
    assert jobs.results() == whole and dict(jobs.ran()) == {"1/3": 1, "1/4": 1, "1/5": 1}


def test_other_inputs_are_refused(jobs, whole):
    a, b = jobs.folder / "a.tfrecord", jobs.folder / "b.tfrecord"
    content = b.read_bytes()
    assert content.count(b"b 0") == 1
    b.write_bytes(content.replace(b"b 0", b"b 9"))
    said = refused(jobs)
    assert f"{b} had other content: give what it began with, or begin another" in said
    assert "other content" in refused(jobs, "--accept-changes")
    b.write_bytes(content)  # at another time
    check_goes_on(jobs, whole, num_ended=0)
    b.unlink()
    assert f"{b} was among the inputs" in refused(jobs)
    b.write_bytes(content)
    shutil.copy(a, jobs.folder / "c.tfrecord")
    assert f"{jobs.folder / 'c.tfrecord'} was not among the inputs" in refused(jobs)
    (jobs.folder / "c.tfrecord").unlink()
    assert "in another order" in refused(jobs, "--input", str(b), str(a))
    check_goes_on(jobs, whole, num_ended=0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "0.5"], "sampling.temperature: none then, 0.5 now"),
        (["--seed", "1"], "seed: 0 then, 1 now"),
        (["--records-per-shard", "4"], "records_per_shard: 3 then, 4 now"),
        (["--limit", "3"], "limit: none then, 3 now"),
        (["--format", "jsonl"], "format: tfrecord then, jsonl now"),
    ],
)
def test_another_setting_is_refused(jobs, whole, flags, words):
    for more in ([], ["--accept-changes"]):
        said = refused(jobs, *flags, *more)
        assert words in said and "another --output and --state" in said and "machine and its software alone" in said
    assert jobs.results() == whole and jobs.ran().total() == NUM_RECORDS


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"environment": {**ENVIRONMENT, "jax": "1.1"}}, "jax: 1.0 then, 1.1 now"),
        ({"environment": {**ENVIRONMENT, "processor": "slow"}}, "processor: fast then, slow now"),
        ({"of_model": {**MODEL, "attention": "native"}}, "attention: xla then, native now"),
        ({"of_model": {**MODEL, "parameters": "b" * 64}}, "parameters: aaaaaaaaaaaa then, bbbbbbbbbbbb now"),
    ],
)
def test_another_machine_program_or_model_is_refused(jobs, whole, changed, words):
    before = fingerprints(jobs)
    jobs.begin_anew()
    interrupted(jobs)
    done = jobs.ran().total()
    said = refused(jobs, **changed)
    assert words in said and "Go on with what it was" in said and "another --output and --state" in said
    assert ("accept that with --accept-changes" in said) == ("environment" in changed)
    if "environment" not in changed:
        assert words in refused(jobs, "--accept-changes", **changed)
        check_goes_on(jobs, whole)
        return
    assert jobs.run("--accept-changes", num_rows=NUM_ROWS, **changed) == 0
    assert jobs.run(num_rows=NUM_ROWS, **changed) == 0  # which is what it is now
    assert len(before) == 1 and len(fingerprints(jobs)) == 2 and fingerprints(jobs) > before
    assert jobs.ran().total() <= NUM_RECORDS + MAX_ROWS and done < NUM_RECORDS


def fingerprints(jobs):
    found = [each for name in jobs.results() for each in read(str(jobs.out / name), "tfrecord")]
    assert len(found) == NUM_RECORDS
    return {each.fields["fingerprint"][0] for each in found}


def test_results_of_another_job_are_not_mixed_with(jobs, whole):
    said = refused(jobs, "--state", str(jobs.folder / "new"))
    assert f"{jobs.out} holds results of another job" in said and "--state to go on with it" in said
    check_goes_on(jobs, whole, num_ended=0)


@pytest.mark.parametrize(
    ("number", "ignored", "code", "word"),
    [
        (signal.SIGINT, (), 130, "interrupted"),
        (signal.SIGTERM, (), 143, "terminated"),
        (signal.SIGTERM, (signal.SIGINT,), 143, "terminated"),  # as a shell's jobs in the background have it
    ],
)
def test_a_signal_ends_a_job_that_goes_on_later(jobs, whole, number, ignored, code, word):
    jobs.begin_anew()
    process = jobs.start(num_rows=NUM_ROWS, step_s=0.02, ignored=ignored)
    jobs.wait_for_requests(6)
    for each in (*ignored, number):
        os.kill(process.pid, each)
    assert jobs.end_of(process) == code
    assert jobs.said() == f"jaxinfer: {word}; what is done is kept: the same command goes on\n"
    # Whatever had ended has been committed: no more than what the engine had is to do again.
    check_goes_on(jobs, whole)


def test_a_signal_that_is_ignored_changes_nothing(jobs, whole):
    jobs.begin_anew()
    process = jobs.start(num_rows=NUM_ROWS, step_s=0.02, ignored=(signal.SIGINT,))
    jobs.wait_for_requests(6)
    os.kill(process.pid, signal.SIGINT)
    assert jobs.end_of(process) == 0 and jobs.results() == whole and jobs.ran().total() == NUM_RECORDS


def test_an_interrupt_while_planning(jobs, whole):
    jobs.begin_anew()
    process = jobs.start(num_rows=NUM_ROWS, plan_s=30)
    while not (jobs.folder / "planning").exists():
        assert process.exitcode is None
    os.kill(process.pid, signal.SIGINT)
    assert jobs.end_of(process) == 130
    assert "interrupted" in jobs.said() and not (jobs.state / "plan.json").exists()
    check_goes_on(jobs, whole, num_ended=0)


@pytest.mark.parametrize("change", ["shorter", "gone", "longer"])
def test_an_input_that_changes_while_the_job_runs(jobs, whole, change):
    path = jobs.folder / "b.tfrecord"
    content = path.read_bytes()
    jobs.begin_anew()
    process = jobs.start("--window", "1", num_rows=NUM_ROWS, step_s=0.02)
    jobs.wait_for_requests(1)
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 5 + 1] if change == "shorter" else content + content)
    assert jobs.end_of(process) == 1
    said = jobs.said()
    words = {"shorter": "b.tfrecord", "gone": "No such file", "longer": "b.tfrecord had other content"}
    assert words[change] in said and "Traceback" not in said and not (jobs.out / "summary.json").exists()
    path.write_bytes(content)
    check_goes_on(jobs, whole)
