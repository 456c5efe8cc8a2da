"""Results on their way to the disk, in a thread: those that wait together are committed with one sync."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable

from jaxinfer.batch.records import Result
from jaxinfer.batch.shard import Done, Naming, OpenShard

MAX_WAITING = 4096
MAX_GROUP = 512
_WAIT_S = 0.2


class Committer:
    """Commits results, and finishes each shard that has all of its.

    `told(results)` is called with what has been committed, `finished(done)` with what a shard came to; both in its
    thread.
    """

    def __init__(self, naming: Naming, told: Callable[[list[Result]], None], finished: Callable[[Done], None]):
        self._naming = naming
        self._told = told
        self._finished = finished
        self._queue: queue.Queue[tuple[OpenShard, Result | None] | None] = queue.Queue(MAX_WAITING)
        self._failure: BaseException | None = None
        self._num_put = 0  # by the worker's thread alone, as the next is by this one's
        self._num_committed = 0
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-batch-commit", daemon=True)
        self._thread.start()

    def put(self, shard: OpenShard, result: Result) -> None:
        """Have a result committed. Waits where the disk is behind; raises what committing raised."""
        self.check()
        self._num_put += 1
        self._queue.put((shard, result))

    @property
    def num_waiting(self) -> int:
        """Results that were put and are not on the disk yet."""
        return self._num_put - self._num_committed

    def wait(self) -> None:
        """Until some of those that wait are on the disk, or soon."""
        before = self.num_waiting
        with self._moved:
            self._moved.wait_for(lambda: self.num_waiting < before or not before or self._failure is not None, _WAIT_S)

    def opened(self, shard: OpenShard) -> None:
        """Have a shard finished, should nothing of it be left to do."""
        self._queue.put((shard, None))

    def check(self) -> None:
        """Raise what committing raised."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Commit what waits, and end. Raises what committing raised."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        ended = False
        while not ended:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP:
                try:
                    group.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            ended = None in group
            if self._failure is None:
                try:
                    self._commit([each for each in group if each is not None])
                except BaseException as error:  # the worker raises it; what follows is let go, so that nobody waits
                    self._failure = error

    def _commit(self, group: list[tuple[OpenShard, Result | None]]) -> None:
        results: dict[OpenShard, list[Result]] = defaultdict(list)
        for shard, result in group:
            results[shard] += [] if result is None else [result]
        for shard, found in results.items():
            if found:
                shard.commit(found)
                with self._moved:
                    self._num_committed += len(found)
                    self._moved.notify_all()
                self._told(found)
            if shard.is_complete:
                self._finished(shard.finish(self._naming))
                shard.close()
