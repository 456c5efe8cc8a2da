"""Where this user's own files are kept, by the rules of the platform."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

_XDG = {"cache": ("XDG_CACHE_HOME", "~/.cache"), "data": ("XDG_DATA_HOME", "~/.local/share")}
_DARWIN = {"cache": "~/Library/Caches", "data": "~/Library/Application Support"}


def user_folder(kind: Literal["cache", "data"]) -> Path:
    """`jaxinfer` in the platform's folder for caches or for data; a leading `~` is not expanded yet."""
    variable, usual = _XDG[kind]
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = _DARWIN[kind]
    else:  # the XDG base directory specification, which has relative paths ignored
        base = os.environ.get(variable, "")
        base = base if os.path.isabs(base) else None
    return Path(base or usual) / "jaxinfer"
