"""Where a checkpoint's tensors go among a model's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType

import numpy as np


@dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint and its place.

    `leaf` is the path of the parameter; `layer` its index on the leading axis of a stacked leaf, None for one that is
    not stacked; `index` the part of that layer's array it fills (several tensors share a fused weight).
    `unpermute_head_dim` is H where the file stores a head's rotary pairs side by side, (0, 1), (2, 3) …, and the rows
    are to be put back as first halves, then second halves; 0 where they lie so already.
    """

    name: str
    leaf: tuple[str, ...]
    shape: tuple[int, ...]
    layer: int | None = None
    index: tuple[int | slice, ...] | EllipsisType = ...
    unpermute_head_dim: int = 0

    def put(self, target: np.ndarray, values: np.ndarray) -> None:
        """Write the tensor into its part of the leaf's array, in the array's own dtype."""
        if self.unpermute_head_dim:
            pairs = values.reshape(-1, self.unpermute_head_dim // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2)
        view = self.view(target)
        view[...] = values.reshape(view.shape)

    def view(self, target: np.ndarray) -> np.ndarray:
        """The part of the leaf's array that this tensor fills."""
        return (target if self.layer is None else target[self.layer])[self.index]
