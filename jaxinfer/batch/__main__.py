"""`python -m jaxinfer.batch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

DONE, FAILED, USAGE, DONE_WITH_ERRORS, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
"""Exit codes: every record has its result; the job stopped; it was called wrongly; records have errors in place of
results; a signal stopped it."""


def main(argv: Sequence[str] | None = None, open_model: Any = None) -> int:
    """Run a job, or the rest of it. What stops it is one message, and an exit code other than 0.

    `open_model` stands in for `jaxinfer.batch.model.open_llm`.
    """
    from jaxinfer.batch.cli import parse
    from jaxinfer.flags import UsageError
    from jaxinfer.phases import show_logs

    try:
        config = parse(argv)
    except UsageError as error:
        return _tell(str(error), USAGE)
    show_logs(config.log_level)
    try:
        from jaxinfer.batch.errors import TerminatedError
        from jaxinfer.batch.job import Job, told
        from jaxinfer.batch.model import open_llm
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jaxinfer"):
            raise
        return _tell(f"{error.name} is not installed; pip install 'jaxinfer[batch]'", USAGE)
    except KeyboardInterrupt:
        return _tell("interrupted", INTERRUPTED)
    again = "what is done is kept: the same command goes on"
    try:
        if config.dry_run:
            from jaxinfer.batch.estimate import estimate

            print(estimate(config, open_model or open_llm))
            return DONE
        summary = Job(config, open_model or open_llm).run()
    except TerminatedError:
        return _tell(f"terminated; {again}", TERMINATED)
    except KeyboardInterrupt:
        return _tell(f"interrupted; {again}", INTERRUPTED)
    except OSError as error:
        return _tell(f"{error}; {again} once that is mended", FAILED, config.log_level)
    except ImportError as error:
        return _tell(str(error), USAGE, config.log_level)
    except ValueError as error:
        return _tell(str(error), FAILED, config.log_level)
    except RuntimeError as error:  # the engine, or the device under it
        return _tell(f"{error}; {again}", FAILED, config.log_level)
    print(told(summary, config.output), file=sys.stderr)
    return DONE_WITH_ERRORS if summary["errors"] else DONE


def _tell(message: str, code: int, log_level: str = "error") -> int:
    """Say what happened; with the traceback, where everything is wanted."""
    if log_level == "debug":
        import traceback

        traceback.print_exc()
    print(f"error: {message}" if code in (FAILED, USAGE) else f"jaxinfer: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
