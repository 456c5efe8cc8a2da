"""Compiled programs in files, so that the next process need neither trace nor compile them.

    <folder>/<key>.program      magic | sha256 of (key, body) | body, a pickle of {part: serialized executable}

A key is the digest of all that a program follows from: its description, the environment (`environment.py`), and jax's
settings. Anything else than an exact match is another file. Files are written beside their name and then renamed, so
that processes may share a folder, and the ones used longest ago are removed when the folder grows over its limit. Since
unpickling runs code, a folder or file that others may write to is not read.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxinfer.engine.environment import environment
from jaxinfer.user_folders import user_folder

logger = logging.getLogger("jaxinfer")

LIMIT_BYTES = 1 << 30
"""What a folder may hold; beyond it the programs used longest ago go first."""

_MAGIC = b"jaxinfer program 1\n"
_SUFFIX = ".program"
_KNOWN_PACKAGES = frozenset(
    {"jaxinfer", "pallas_kernels", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"}
    | {"builtins", "collections", "copyreg", "enum", "functools"}
)
_STALE_S = 3600.0


class ProgramStore:
    """A folder of compiled programs. No failure here stops anything: a program that cannot be read is made anew."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES):
        """Make the folder if there is none.

        Raises:
            OSError: it cannot be made, or is no folder.
            PermissionError: others may write to it.
        """
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._warned = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(os.stat(folder), folder)

    def key_of(self, name: str, description: Any) -> str | None:
        """The key of a program, or None where it follows from code outside of known packages."""
        try:
            described = _Describer.dumps((name, description))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            logger.debug("program %s is not stored: %s", name, error)
            return None
        settings = {name: getattr(jax.config, name, value) for name, value in sorted(jax.config.values.items())}
        followed = "\0".join(f"{name}={value!r}" for name, value in [*environment().items(), *settings.items()])
        return hashlib.sha256(followed.encode() + described).hexdigest()

    def load(self, key: str) -> dict[str, Any] | None:
        """The parts of the program stored under `key`, or None."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                _check_private(os.fstat(file.fileno()), path)
                content = file.read()
            parts = _decode(key, content)
            with suppress(OSError):
                os.utime(path)
            return parts
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a file: pickle and XLA raise many kinds
            self._warn(f"{path} is ignored and made anew ({_one_line(error)})")
            return None

    def save(self, key: str, parts: dict[str, Any]) -> None:
        """Store a program, unless its parts are of a kind that XLA cannot serialize."""
        if _jax_caches():  # what jax took from its own cache cannot be serialized again
            return
        try:
            content = _encode(key, parts)
        except Exception as error:
            logger.debug("a program is not stored: %s", _one_line(error))
            return
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                os.replace(temporary, self._path(key))
            except BaseException:
                os.unlink(temporary)
                raise
            self._trim()
        except OSError as error:
            self._warn(f"a program could not be stored in {self.folder} ({_one_line(error)})")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _warn(self, message: str) -> None:
        """One notice a process, so that a damaged folder does not flood the log."""
        logger.log(logging.DEBUG if self._warned else logging.WARNING, "compilation cache: %s", message)
        self._warned = True

    def _trim(self) -> None:
        """Remove the files used longest ago while the folder is over its limit, and what crashed writers left."""
        found = []
        for path in self.folder.iterdir():
            with suppress(OSError):
                status = path.stat()
                if path.suffix == ".tmp" and time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
                elif path.suffix == _SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink()
            excess -= size


def open_store(compilation_cache: Any) -> ProgramStore | None:
    """The store that `LLM(compilation_cache=…)` asks for; None for none.

    Raises:
        ValueError: a folder that was asked for cannot be used, or jax's own cache is on besides.
    """
    if compilation_cache is False or (compilation_cache is None and _jax_caches()):
        return None
    if not isinstance(compilation_cache, str | os.PathLike | bool | None) or compilation_cache == "":
        raise ValueError(f"compilation_cache={compilation_cache!r} must be a folder, True, False or None")
    if _jax_caches():
        raise ValueError(
            f"compilation_cache={compilation_cache!r}: jax's own persistent compilation cache is on "
            "(jax_compilation_cache_dir), and programs that came from it cannot be stored; leave one of them out"
        )
    given = compilation_cache if isinstance(compilation_cache, str | os.PathLike) else None
    try:
        return ProgramStore(user_cache_folder() if given is None else Path(given).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # no home folder, a name that no folder can have
        if compilation_cache is not None:
            raise ValueError(f"compilation_cache={compilation_cache!r}: {_one_line(error)}") from error
        logger.warning("compilation cache: off (%s); give compilation_cache=FOLDER to LLM", _one_line(error))
        return None


def user_cache_folder() -> Path:
    """Where this user's programs are kept: `jaxinfer/programs` in the platform's folder for caches."""
    return user_folder("cache").expanduser() / "programs"


def _jax_caches() -> bool:
    config: Any = jax.config  # whose attributes jax 0.10 does not declare
    return bool(config.jax_compilation_cache_dir and config.jax_enable_compilation_cache)


def _check_private(status: os.stat_result, path: Path) -> None:
    """Raise `PermissionError` where others than this user and root could have written."""
    if hasattr(os, "geteuid") and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
        owner, mode = status.st_uid, stat.filemode(status.st_mode)
        raise PermissionError(
            f"{path} belongs to user {owner} with mode {mode}, so that others could put code there: "
            "make it your own and run chmod go-w on it"
        )


def _encode(key: str, parts: dict[str, Any]) -> bytes:
    body = pickle.dumps({name: serialize_executable.serialize(part) for name, part in parts.items()})
    return _MAGIC + hashlib.sha256(key.encode() + body).digest() + body


def _decode(key: str, content: bytes) -> dict[str, Any]:
    start = len(_MAGIC) + hashlib.sha256().digest_size
    body = content[start:]
    if content[:start] != _MAGIC + hashlib.sha256(key.encode() + body).digest():
        raise ValueError("it is damaged or of another version")
    serialized = pickle.loads(body)
    return {name: serialize_executable.deserialize_and_load(*part) for name, part in serialized.items()}


class _Describer(pickle.Pickler):
    """Pickles a description, and refuses classes and functions whose code the key would not cover."""

    @classmethod
    def dumps(cls, description: Any) -> bytes:
        file = io.BytesIO()
        cls(file, protocol=4).dump(description)
        return file.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.sharding.Sharding):
            return str, (repr(obj),)
        if isinstance(obj, jax.ShapeDtypeStruct):
            return tuple, ([obj.shape, str(obj.dtype), bool(obj.weak_type), obj.sharding],)
        code = obj if hasattr(obj, "__qualname__") else type(obj)
        package = str(getattr(code, "__module__", None)).split(".")[0]
        if package not in _KNOWN_PACKAGES:
            name = f"{code.__module__}.{code.__qualname__}"
            raise pickle.PicklingError(f"{name} is outside the packages whose changes the key would show")
        return NotImplemented


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
