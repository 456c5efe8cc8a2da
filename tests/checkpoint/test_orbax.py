"""The native format: round trips, sharded restoring, casting, replacing, and refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def save(path: Path, params: dict[str, jax.Array]) -> Path:
    save_checkpoint(path, params, {"num_layers": 2}, source="tiny.gguf")
    return path


def test_round_trip_into_a_sharding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, path = make_params(), tmp_path / "store" / "tiny"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    save_checkpoint(path, params, {"num_layers": 2}, {"tokenizer.json": tokenizer, "more/a": b"x"}, source="tiny.gguf")
    assert [item.name for item in path.parent.iterdir()] == ["tiny"]
    assert is_native_checkpoint(path) and (path / "tokenizer.json").read_text() == "{}"
    assert (path / "more" / "a").read_bytes() == b"x"
    manifest = read_manifest(path)
    assert (manifest.config, manifest.source, manifest.dtype) == ({"num_layers": 2}, "tiny.gguf", "mixed")
    assert manifest.tensors["layers/attn.q"].shape == (2, 6, 6)

    monkeypatch.setattr(orbax, "_READ_BYTES", 50)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = structs(params)
    target["embed.weight"] = Struct((11, 6), jnp.float32, sharding=sharding)
    restored = restore_params(path, target)
    assert list(restored) == list(target) and restored["embed.weight"].sharding == sharding
    for name, array in params.items():
        assert restored[name].dtype == array.dtype
        np.testing.assert_array_equal(restored[name], array)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxinfer.checkpoint.orbax import restore_params
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for spec in (PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("y", "x"), PartitionSpec()):
    sharding = NamedSharding(mesh, spec)
    array = restore_params(sys.argv[1], {"w": jax.ShapeDtypeStruct((6, 4), np.float16, sharding=sharding)})["w"]
    assert array.sharding == sharding and len(array.addressable_shards) == 4
    np.testing.assert_array_equal(array, np.arange(24).reshape(6, 4))
"""


def test_restores_onto_several_devices(tmp_path: Path) -> None:
    path = save(tmp_path / "tiny", {"w": jnp.arange(24, dtype=jnp.float32).reshape(6, 4)})
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-c", SHARDED, path], env=environment, check=True, timeout=120)


def test_orbax_itself_reads_what_was_saved(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    params = make_params()
    path = save(tmp_path / "tiny", params)
    restore_args = {name: ocp.ArrayRestoreArgs(sharding=array.sharding) for name, array in params.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(path / "params", args=ocp.args.PyTreeRestore(restore_args=restore_args))
    assert restored.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(restored[name], array)


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("asked", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_casts_as_numpy_does(tmp_path: Path, stored: type, asked: type) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 14, np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 60000)]  # subnormals and halfway cases among them
    array = jnp.asarray(values.astype(stored))
    assert array.size > 5000
    path = save(tmp_path / "tiny", {"w": array})
    restored = restore_params(path, {"w": Struct(array.shape, asked)})["w"]
    expected = np.asarray(array).astype(asked)
    np.testing.assert_array_equal(np.asarray(restored).view(np.uint8), expected.view(np.uint8))


def test_what_a_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "tiny", {"w": jnp.asarray([1e5, 1.0]), "ids": jnp.asarray([1])})
    target = {"w": Struct((2,), jnp.float16), "ids": Struct((1,), jnp.int32)}
    with pytest.raises(CheckpointError, match=r"tiny/params: tensor 'w' .*beyond the range of float16: load it as fl"):
        restore_params(path, target)
    with pytest.raises(CheckpointError, match="tensor 'ids' is stored as int32 and cannot be cast to float32"):
        restore_params(path, {"w": Struct((2,), jnp.float32), "ids": Struct((1,), jnp.float32)})
    broken = save(tmp_path / "broken", {"w": jnp.asarray([np.nan, 1.0])})
    with pytest.raises(CheckpointError, match=r"broken/params: tensor 'w' holds NaN or infinite values; convert"):
        restore_params(broken, {"w": Struct((2,), jnp.float32)})


def test_a_target_that_differs_is_refused(tmp_path: Path) -> None:
    params = make_params()
    path = save(tmp_path / "tiny", params)
    bad_shape = structs(params) | {"embed.weight": Struct((6, 11), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"tiny: .*embed\.weight is \(11, 6\) and should be \(6, 11\)"):
        restore_params(path, bad_shape)
    with pytest.raises(CheckpointError, match="tiny: .*missing: more"):
        restore_params(path, structs(params) | {"more": Struct((1,), jnp.float32)})
    fewer = structs(params)
    del fewer["scale"]
    with pytest.raises(CheckpointError, match="tiny: 1 tensors are not used by this architecture: scale"):
        restore_params(path, fewer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [6, 11]}, r"'embed\.weight' is stored as float32 \(11, 6\), not float32 \(6, 11\) as jaxinfer"),
        ({"dtype": "bfloat16"}, r"'embed\.weight' is stored as float32 \(11, 6\), not bfloat16"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    params = make_params()
    path = save(tmp_path / "tiny", params)
    manifest = json.loads((path / "jaxinfer.json").read_text())
    manifest["tensors"]["embed.weight"] |= change
    (path / "jaxinfer.json").write_text(json.dumps(manifest))
    shape = tuple(manifest["tensors"]["embed.weight"]["shape"])
    with pytest.raises(CheckpointError, match=message):
        restore_params(path, structs(params) | {"embed.weight": Struct(shape, jnp.float32)})


def test_damaged_files_are_refused_or_read_right(tmp_path: Path) -> None:
    """Each file of the Orbax folder is cut, emptied and deleted in turn; Orbax's own notes are not needed to read."""
    params = {**make_params(), "large": jnp.arange(5000, dtype=jnp.float32)}
    path = save(tmp_path / "tiny", params)
    num_refused = 0
    for file in [item for item in sorted((path / "params").rglob("*")) if item.is_file()]:
        content = file.read_bytes()
        for kept in (content[: len(content) // 2], content[:-1], b"", None):
            file.unlink() if kept is None else file.write_bytes(kept)
            try:
                restored = restore_params(path, structs(params))
            except CheckpointError as error:
                assert str(path) in str(error) and "tensor '" in str(error)
                num_refused += 1
            else:
                for name, array in params.items():
                    np.testing.assert_array_equal(restored[name], array)
            file.write_bytes(content)
    assert num_refused >= 8


def test_overwriting(tmp_path: Path) -> None:
    path = save(tmp_path / "tiny", {"w": jnp.asarray([1.0])})
    with pytest.raises(CheckpointError, match="tiny: exists already; delete it"):
        save_checkpoint(path, {"w": jnp.asarray([2.0])}, {})
    save_checkpoint(path, {"w": jnp.asarray([2.0])}, {}, overwrite=True)
    assert restore_params(path, {"w": Struct((1,), jnp.float32)})["w"][0] == 2.0
    assert [item.name for item in tmp_path.iterdir()] == ["tiny"]
    (tmp_path / "photos").mkdir()
    with pytest.raises(CheckpointError, match="photos: is not a converted checkpoint and is not overwritten"):
        save_checkpoint(tmp_path / "photos", {"w": jnp.asarray([2.0])}, {}, overwrite=True)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointError, match="link: is not a converted checkpoint"):
        save_checkpoint(tmp_path / "link", {"w": jnp.asarray([2.0])}, {}, overwrite=True)


def test_a_failed_overwrite_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "tiny", {"w": jnp.asarray([1.0])})
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        save_checkpoint(path, {"w": jnp.asarray([2.0])}, {}, overwrite=True)
    assert [item.name for item in tmp_path.iterdir()] == ["tiny"]
    assert restore_params(path, {"w": Struct((1,), jnp.float32)})["w"][0] == 1.0


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, params: object) -> None:
        path.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(orbax, "_save_params", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "tiny", make_params(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "/a", "a/b/c", "", "jaxinfer.json", "params", "params/d"])
def test_refuses_extra_file_names(tmp_path: Path, name: str) -> None:
    source = tmp_path / "source"
    source.touch()
    with pytest.raises(CheckpointError, match="cannot name an extra file"):
        save_checkpoint(tmp_path / "tiny", make_params(), {}, {name: source})


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"format_version": 9}, "format version 9 is not 1"),
        ({"format_version": 1, "config": {}}, "lacks config, source, dtype or tensors"),
        (
            {"format_version": 1, "config": {}, "source": "", "dtype": "float32", "tensors": {"w": {"shape": [1]}}},
            "tensor 'w' lacks",
        ),
        (
            {"format_version": 1, "config": {}, "source": "", "dtype": "float32", "tensors": {"w": None}},
            "tensor 'w' lacks",
        ),
    ],
)
def test_refuses_bad_manifests(tmp_path: Path, manifest: dict[str, object], message: str) -> None:
    (tmp_path / "jaxinfer.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"jaxinfer\.json: {message}"):
        read_manifest(tmp_path)
