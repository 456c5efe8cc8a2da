"""Marks of prefixes that are worth keeping: every prefix is kept, so their form is all there is to check."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from jaxinfer.serve.anthropic.schemas import CacheControl
from jaxinfer.serve.checks import wrong


def check_cache_control(path: str, value: Any) -> None:
    """Raise `ApiError` for a mark of another form."""
    if value is None:
        return
    try:
        CacheControl.model_validate(value)
    except ValidationError:
        raise wrong(path, f'{value!r:.60} must be {{"type": "ephemeral"}}, and a ttl "5m" or "1h" if any') from None
