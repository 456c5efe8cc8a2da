"""The native format: a round trip, sharded restoring, and refusals before anything is restored."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint import orbax
from jaxinfer.checkpoint.orbax import is_native_checkpoint, read_manifest, restore_params, save_checkpoint
from jaxinfer.checkpoint.reader import CheckpointError

Struct = jax.ShapeDtypeStruct


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": jnp.asarray(rng.normal(size=(11, 6)), jnp.float32),
        "layers/attn.q": jnp.asarray(rng.normal(size=(2, 6, 6)), jnp.bfloat16),
        "scale": jnp.asarray(3, jnp.int8),
    }


def structs(params: dict[str, jax.Array]) -> dict[str, Struct]:
    return {name: Struct(array.shape, array.dtype) for name, array in params.items()}


def test_round_trip_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, path = make_params(), tmp_path / "store" / "tiny"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    save_checkpoint(path, params, {"num_layers": 2}, {"tokenizer.json": tokenizer})
    assert [item.name for item in path.parent.iterdir()] == ["tiny"]
    assert is_native_checkpoint(path) and (path / "tokenizer.json").read_text() == "{}"
    manifest = read_manifest(path)
    assert manifest.config == {"num_layers": 2} and manifest.dtype == "mixed"
    assert manifest.tensors["layers/attn.q"].shape == (2, 6, 6)

    monkeypatch.setattr(orbax, "_GROUP_BYTES", 100)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = structs(params)
    target["embed.weight"] = Struct((11, 6), jnp.float32, sharding=sharding)
    restored = restore_params(path, target)
    assert list(restored) == list(target) and restored["embed.weight"].sharding == sharding
    for name, array in params.items():
        assert restored[name].dtype == array.dtype
        np.testing.assert_array_equal(restored[name], array)

    with pytest.raises(CheckpointError, match="tiny: exists already"):
        save_checkpoint(path, params, {})
    bad_shape = structs(params) | {"embed.weight": Struct((6, 11), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"tiny: .*embed\.weight is \(11, 6\) and should be \(6, 11\)"):
        restore_params(path, bad_shape)
    bad_dtype = structs(params) | {"layers/attn.q": Struct((2, 6, 6), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"'layers/attn\.q' is stored as bfloat16 and float32 is asked"):
        restore_params(path, bad_dtype)
    with pytest.raises(CheckpointError, match="missing: more"):
        restore_params(path, structs(params) | {"more": Struct((1,), jnp.float32)})
    for file in sorted((path / "params").rglob("*"), reverse=True):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(CheckpointError, match="params: cannot be restored"):
        restore_params(path, structs(params))


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, params: object) -> None:
        path.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(orbax, "_save_params", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "tiny", make_params(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "a/b", "jaxinfer.json", "params"])
def test_refuses_extra_file_names(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.touch()
    with pytest.raises(CheckpointError, match="cannot name an extra file"):
        save_checkpoint(tmp_path / "tiny", make_params(), {}, {name: source})


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"format_version": 9}, "format version 9 is not 1"),
        ({"format_version": 1, "config": {}}, "lacks config, dtype or tensors"),
        ({"format_version": 1, "config": {}, "dtype": "float32", "tensors": {"w": {"shape": [1]}}}, "tensor 'w' lacks"),
        ({"format_version": 1, "config": {}, "dtype": "float32", "tensors": {"w": None}}, "tensor 'w' lacks"),
    ],
)
def test_refuses_bad_manifests(tmp_path: Path, manifest: dict[str, object], message: str) -> None:
    (tmp_path / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"jaxinfer\.json: {message}"):
        read_manifest(tmp_path)
