"""Checks of what stands deeper in a body than its declared fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxinfer.serve.errors import ApiError
from jaxinfer.tokenizer.messages import FieldError


def wrong(path: str, message: str, code: str | None = None) -> ApiError:
    """The error of a value inside a body; `path` says where, as `messages[0].content`."""
    return ApiError(400, f"{path}: {message}", param=path, code=code)


def check_keys(path: str, value: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise `ApiError` where an object has other keys than those known, unless they are null."""
    for key in value:
        if key not in known and value[key] is not None:
            name = f"{path}.{key:.60}"
            raise wrong(name, f"no such field; there are {', '.join(known)}", code="unknown_parameter")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field of chat completions name the field that it stands for here."""
    try:
        yield
    except ApiError as error:
        name = names.get(error.param or "")
        if error.param is None or name is None:
            raise
        message = error.message.replace(error.param, name, 1)
        raise ApiError(error.status, message, param=name, code=error.code) from None


@contextmanager
def repathed(*changes: tuple[str, str]) -> Iterator[None]:
    """Errors that name a field by its path in a chat completion name it by its path here."""
    try:
        yield
    except FieldError as error:
        param, message = error.param, str(error)
        for old, new in changes:
            param, message = param.replace(old, new), message.replace(old, new)
        raise ApiError(400, message, param=param) from None
