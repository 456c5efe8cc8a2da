"""How a job says that it cannot go on."""

from __future__ import annotations


class JobError(ValueError):
    """What stops a job, in words for who runs it: where, why, and what to do. What is committed stays."""


class TerminatedError(Exception):
    """The system asked this worker to end."""
