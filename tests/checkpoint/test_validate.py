"""The comparison of a checkpoint's tensors with a model's."""

import pytest

from jaxinfer.checkpoint.reader import CheckpointError, TensorInfo
from jaxinfer.checkpoint.validate import check_tensors


def found(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, shape, "F32", 0) for name, shape in shapes.items()}


def test_accepts_exact_and_ignorable_tensors() -> None:
    tensors = found(a=(2, 3), b=(4,)) | {"layers.3.rotary_emb.inv_freq": TensorInfo("", (1,), "F32", 4)}
    check_tensors(tensors, {"a": (2, 3), "b": (4,)}, [r".*\.rotary_emb\.inv_freq"])


def test_names_up_to_five_missing_tensors() -> None:
    expected = {f"w{index}": (1,) for index in range(8)}
    with pytest.raises(CheckpointError, match=r"m\.gguf: 7 tensors are missing: w1, w2, w3, w4, w5 and 2 more;"):
        check_tensors(found(w0=(1,)), expected, file="m.gguf")


def test_names_misshapen_tensors() -> None:
    with pytest.raises(CheckpointError, match=r"a is \(3, 2\) and should be \(2, 3\)"):
        check_tensors(found(a=(3, 2)), {"a": (2, 3)})


def test_ignorable_patterns_match_whole_names() -> None:
    with pytest.raises(CheckpointError, match="1 tensors are not used by this architecture: bias.extra"):
        check_tensors(found(a=(1,)) | {"bias.extra": TensorInfo("", (1,), "F32", 4)}, {"a": (1,)}, ["bias"])
