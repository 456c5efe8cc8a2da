"""`python -m jaxinfer.serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a model; what keeps it from starting is one line, and an exit code other than 0."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401

        from jaxinfer.serve.cli import UsageError, parse
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jaxinfer"):
            raise
        print(f"error: {error.name} is not installed; pip install 'jaxinfer[serve]'", file=sys.stderr)
        return 2
    try:
        settings = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from jaxinfer.phases import show_logs

    show_logs(settings.log_level)
    from jaxinfer.serve.lifecycle import run

    try:
        return run(settings)
    except (ValueError, OSError, RuntimeError) as error:
        if settings.log_level == "debug":
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxinfer: interrupted while starting", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
