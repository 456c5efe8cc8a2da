"""A job from its settings to its summary: the plan, the model, the work, and waiting for other workers."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from jaxinfer.batch.committer import Committer
from jaxinfer.batch.config import JobConfig, local_folder, policies_of, settings_of
from jaxinfer.batch.destination import Destination
from jaxinfer.batch.errors import JobError, TerminatedError
from jaxinfer.batch.feed import Feed
from jaxinfer.batch.fingerprint import Fingerprint, check_unchanged
from jaxinfer.batch.inputs import expand
from jaxinfer.batch.model import Model
from jaxinfer.batch.outputs import check_format
from jaxinfer.batch.plan import FILE_NAME as PLAN_NAME
from jaxinfer.batch.plan import Plan, check_sources, make_plan
from jaxinfer.batch.progress import Progress
from jaxinfer.batch.shard import Leases, Naming, OpenShard, drop_journal, read_done, shard_folder
from jaxinfer.batch.summary import FILE_NAME as SUMMARY_NAME
from jaxinfer.batch.summary import write_summary
from jaxinfer.batch.worker import Worker
from jaxinfer.engine.interrupts import DeferredInterrupts
from jaxinfer.jobs.durable import FolderInUseError, FolderLock, write_durably

STATE_NAME = ".jaxinfer-job"
_SETTINGS_NAME = "settings.json"
_FINGERPRINT_NAME = "fingerprint.json"
_ARGUMENTS_NAME = "arguments.json"
_OWNER_NAME = ".jaxinfer-owner"
_POLL_S = 0.5


class Job:
    """What one worker does of a job. Several may do it at once, in processes of one machine.

    `open_model` is called when the plan is made and the settings are known to fit what was done before.
    """

    def __init__(self, config: JobConfig, open_model: Callable[[JobConfig], contextlib.AbstractContextManager[Model]]):
        self._config = config
        self._open_model = open_model
        self._state = config.state or local_folder(config.output) / STATE_NAME

    def run(self) -> dict[str, Any]:
        """Until all of the job is done. Returns its summary.

        Raises:
            JobError, InputError: why the job cannot go on, and what to do.
            OSError: files cannot be read or written.
            KeyboardInterrupt, TerminatedError: a signal ended it.
        """
        check_format(self._config.format)
        destination = Destination(self._config.output, self._state)
        paths = [path for path in expand(self._config.inputs) if not destination.is_own(path)]
        if not paths:
            raise JobError(f"all inputs are results of this job, in {self._config.output}: give its prompts")
        self._state.mkdir(parents=True, exist_ok=True)
        with self._alone():
            plan = self._plan(paths, destination)
            if (summary := self._finished(plan, destination)) is not None:
                return summary
        with self._open_model(self._config) as model:
            with self._alone():
                fingerprint = self._fingerprint(model)
            naming = Naming(destination, self._config.format, len(plan.shards), self._config.on_error == "record")
            work = _Work(self._config, self._state, plan, naming, model, fingerprint)
            work.run()
            check_sources(plan, paths)  # they may have changed meanwhile
            if names := model.requests.unseen_names:
                print(f"jaxinfer: no record had {', '.join(names)}, which --pass-through names", file=sys.stderr)
            with self._alone():
                return work.summarize()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """What only one worker does at a time."""
        while True:
            try:
                lock = FolderLock(self._state)
                break
            except FolderInUseError:
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            lock.close()

    def _plan(self, paths: list[str], destination: Destination) -> Plan:
        """The job's plan, made now where it begins."""
        config = self._config
        plan = Plan.load(self._state)
        if plan is not None:
            try:
                check_sources(plan, paths)
                self._check_settings()
            except ValueError as error:
                if any(path.stat().st_size for path in self._state.glob("shards/*/*")):
                    raise
                raise JobError(f"{error}\nNothing of it is done: without {self._state} it begins anew") from None
            self._check_owner(destination)
            return plan
        if (self._state / "shards").exists():
            raise JobError(
                f"{self._state} has results, and no {PLAN_NAME} that says what of: restore it, or give another --state"
            )
        if there := [name for name in destination.names() if name == SUMMARY_NAME or name.startswith("results-")]:
            raise JobError(
                f"{config.output} holds results of another job ({there[0]}): give another --output, or that job's "
                "--state to go on with it"
            )
        plan = make_plan(paths, config.input_format, config.records_per_shard, config.limit, not config.quiet)
        _write_json(self._state / _SETTINGS_NAME, self._settings)
        _write_json(self._state / _OWNER_NAME, uuid.uuid4().hex)
        self._check_owner(destination, begins=True)
        plan.save(self._state)
        return plan

    def _check_owner(self, destination: Destination, begins: bool = False) -> None:
        """See that no other job, with a state of its own, writes to the same output."""
        own = _read_json(self._state / _OWNER_NAME)
        try:
            owner = json.loads(destination.read_bytes(_OWNER_NAME))
        except (FileNotFoundError, ValueError):
            owner = None
        if owner is None or begins:
            destination.put_bytes(_OWNER_NAME, json.dumps(own).encode())
        elif owner != own:
            raise JobError(
                f"another job has written to {self._config.output} since this one began: begin again with another "
                "--output and --state"
            )

    @property
    def _settings(self) -> dict[str, Any]:
        return {**settings_of(self._config), **policies_of(self._config)}

    def _check_settings(self) -> None:
        """See that they are those that the job began with, but for policies that nothing has followed from yet."""
        path = self._state / _SETTINGS_NAME
        then, now = _read_json(path), Fingerprint(self._settings, {}, {})
        if not isinstance(then, dict):
            raise JobError(f"{path} is damaged (it holds no settings); restore it, or give another --state")
        has_errors = then.get("on_long_prompt") == "skip"  # which the finished shards have left out
        for name in policies_of(self._config):
            if then.get(name) == "fail" and not (has_errors and now.settings[name] == "record"):
                then[name] = now.settings[name]
        check_unchanged(Fingerprint(then, {}, {}), now)
        if _read_json(path) != then:
            _write_json(path, then)

    def _finished(self, plan: Plan, destination: Destination) -> dict[str, Any] | None:
        """The summary of a job of which nothing is left to do, for which no model is needed."""
        if self._begun_under() is None or Leases(self._state, plan.shards, destination).num_unfinished:
            return None
        path = self._state / _ARGUMENTS_NAME
        if not path.exists() or _read_json(path) != self._arguments:
            return None  # it may be another model
        try:
            summary = json.loads(destination.read_bytes(SUMMARY_NAME))
            summary["run"] = dict.fromkeys(summary["run"], 0)
            told(summary, self._config.output)
        except (FileNotFoundError, ValueError, TypeError, KeyError):  # it is damaged, and written anew
            return None
        return summary

    def _fingerprint(self, model: Model) -> Fingerprint:
        """Of what runs the job now, seen to be what ran it before."""
        then, now = self._begun_under(), model.fingerprint
        if then is not None:
            check_unchanged(then, now, self._config.accept_changes)
        _write_json(self._state / _FINGERPRINT_NAME, now.as_json())
        _write_json(self._state / _ARGUMENTS_NAME, self._arguments)
        return now

    @property
    def _arguments(self) -> dict[str, Any]:
        """What the model was opened with, as JSON has it."""
        given = {"model": self._config.model, **self._config.engine, "opener": self._open_model.__module__}
        return json.loads(json.dumps(given, default=str))

    def _begun_under(self) -> Fingerprint | None:
        """The fingerprint that the last run of the job had."""
        path = self._state / _FINGERPRINT_NAME
        if not path.exists():
            return None
        try:
            return Fingerprint.from_json(_read_json(path))
        except ValueError as error:
            if isinstance(error, JobError):
                raise
            raise JobError(f"{path}: {error}; restore it, or give another --state") from None


class _Work:
    """The shards of a plan, with a model in this process."""

    def __init__(
        self, config: JobConfig, state: Path, plan: Plan, naming: Naming, model: Model, fingerprint: Fingerprint
    ):
        self._config = config
        self._state = state
        self._plan = plan
        self._naming = naming
        self._model = model
        self._fingerprint = fingerprint
        self._leases = Leases(state, plan.shards, naming.destination)
        num_before = sum(done.num_records for shard in plan.shards if (done := read_done(state, shard)) is not None)
        self._progress = Progress(plan.num_records, num_before, model.engine.stats, config.quiet)

    def run(self) -> None:
        """Work until no shard is left, waiting for those that other workers have."""
        with contextlib.closing(self._progress), _Termination() as termination, DeferredInterrupts() as interrupts:

            def check() -> None:
                interrupts.check()
                termination.check()
                self._progress.tick()

            self._round(check)
            if (num_left := self._leases.num_unfinished) and not self._config.quiet:
                print(f"jaxinfer: waiting for {num_left} shards that other workers have", file=sys.stderr)
            while self._leases.num_unfinished:
                time.sleep(_POLL_S)
                check()
                self._round(check)

    def _round(self, check: Callable[[], None]) -> None:
        """Work on all shards that can be had now."""
        config = self._config
        opened: list[OpenShard] = []
        committer = Committer(self._naming, self._progress.committed, lambda done: self._progress.finished())

        def take() -> OpenShard | None:
            shard = self._leases.take()
            if shard is not None:
                opened[:] = [each for each in opened if not each.is_closed] + [shard]  # the others' memory goes
                self._progress.opened(shard.num_committed)
                committer.opened(shard)
            return shard

        feed = Feed(take, self._model.requests, config.window, self._model.max_rows)
        worker = Worker(
            self._model.engine,
            self._model.max_rows,
            self._fingerprint.digest,
            config.on_error == "fail",
            config.on_long_prompt == "fail",
        )
        try:
            try:
                worker.run(feed, committer, check)
            finally:
                feed.stop()
                committer.close()
        finally:
            for shard in opened:
                shard.close()

    def summarize(self) -> dict[str, Any]:
        """Write the job's summary."""
        progress = self._progress
        for shard in self._plan.shards:
            drop_journal(shard_folder(self._state, shard.number))
        done = [found for shard in self._plan.shards if (found := read_done(self._state, shard)) is not None]
        run = {
            "records": progress.num_results,
            "seconds": round(progress.worked_s, 3),
            "completion_tokens_per_s": round(progress.output_tokens_per_s, 1),
            "cache_hit_rate": round(progress.cache_hit_rate, 4),
        }
        return write_summary(self._naming.destination, done, self._fingerprint.as_json(), run)


class _Termination:
    """SIGTERM while the body runs, to be acted on where that is safe. Only the main thread hears of signals."""

    def __init__(self) -> None:
        self._arrived = False
        self._before: Any = None

    def __enter__(self) -> _Termination:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived = True

    def check(self) -> None:
        """Raise `TerminatedError` where it has arrived."""
        if self._arrived:
            raise TerminatedError


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read ({error}); restore it, or give another --state") from None


def _write_json(path: Path, content: Any) -> None:
    write_durably(path, json.dumps(content, indent=1).encode())


def told(summary: dict[str, Any], output: str) -> str:
    """A summary in a line."""
    run = summary["run"]
    errors = f", {summary['errors']:,} of them errors" if summary["errors"] else ""
    return (
        f"jaxinfer: {summary['records']:,} records{errors}, {summary['completion_tokens']:,} tokens in {output}; "
        f"this run: {run['records']:,} records in {run['seconds']:.1f} s, "
        f"{run['completion_tokens_per_s']:,.0f} tokens/s, cache hits {run['cache_hit_rate']:.0%}"
    )
