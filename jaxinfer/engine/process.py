"""In which process an engine may run: JAX's threads do not come along into a fork, where a step would wait for ever."""

from __future__ import annotations

import os
from functools import cache

from jaxinfer.engine.errors import EngineDeadError


@cache
def _home() -> int:
    """The process of the first engine; a fork inherits the answer."""
    return os.getpid()


def check_process() -> None:
    """Raise `EngineDeadError` in a fork of the process that made the first engine."""
    if os.getpid() != _home():
        raise EngineDeadError(
            "this process was forked from one that uses JAX, whose threads a fork does not have: start processes with "
            'the multiprocessing method "spawn" and make an LLM in each'
        )
