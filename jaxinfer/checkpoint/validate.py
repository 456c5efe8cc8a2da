"""Checks between what a checkpoint holds and what a model expects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from os import PathLike

from jaxinfer.checkpoint.reader import CheckpointError, TensorInfo

_MAX_LISTED = 5


def check_tensors(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    ignorable: Iterable[str] = (),
    file: str | PathLike[str] = "checkpoint",
) -> None:
    """Require exactly the expected tensors in their shapes.

    Args:
        found: the checkpoint's tensors by name.
        expected: the row-major shape of every tensor that the model needs.
        ignorable: regular expressions; an extra tensor whose whole name matches one is accepted.
        file: the checkpoint, for messages.

    Raises:
        CheckpointError: tensors are missing, misshapen or extra; up to five are named.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{file}: {len(missing)} tensors are missing: {_some(missing)}; "
            "check that the download is complete and that the architecture is the right one"
        )
    misshapen = [
        f"{name} is {found[name].shape} and should be {tuple(shape)}"
        for name, shape in expected.items()
        if found[name].shape != tuple(shape)
    ]
    if misshapen:
        raise CheckpointError(
            f"{file}: {len(misshapen)} tensors have the wrong shape: {_some(misshapen)}; "
            "check that the configuration belongs to these weights"
        )
    patterns = [re.compile(pattern) for pattern in ignorable]
    extra = [name for name in found if name not in expected and not any(p.fullmatch(name) for p in patterns)]
    if extra:
        raise CheckpointError(
            f"{file}: {len(extra)} tensors are not used by this architecture: {_some(extra)}; "
            "running without them would give wrong results, so use a checkpoint of a supported variant"
        )


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
