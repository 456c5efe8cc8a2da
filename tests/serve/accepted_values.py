"""The fields that are taken and do nothing, for the walk of `test_fields.py`."""

from __future__ import annotations

from typing import Any

from tests.serve import effects

# (a value that is taken, one that is refused; None where each is taken)
ACCEPTED: dict[str, tuple[Any, Any]] = {
    "store": (False, True),
    "metadata": ({"run": "7"}, "text"),
    "service_tier": ("auto", "flex"),
    "prompt_cache_key": ("mine", 7),
    "prompt_cache_retention": ("in_memory", "24h"),
    "use_beam_search": (False, True),
    "length_penalty": (1, 2),
    "early_stopping": (False, True),
    "spaces_between_special_tokens": (True, False),
    "verbosity": ("medium", "low"),
    "modalities": (["text"], ["audio"]),
    **effects.ACCEPTED,
}
