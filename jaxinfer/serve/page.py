"""The page at `/`: status and chat. Its files are read once, at import, so that no request's path reaches the disk."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter, Request, Response

from jaxinfer.serve.errors import ApiError

router = APIRouter()

_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, and no string becomes markup: what a model writes is text.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def _read_files() -> dict[str, tuple[bytes, dict[str, str]]]:
    found = {}
    for file in resources.files("jaxinfer.serve").joinpath("page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[file.name] = body, {**_HEADERS, "content-type": kind, "etag": etag}
    return found


FILES = _read_files()
INDEX = FILES.pop("index.html")  # its links are relative to `/`
PATHS = frozenset({"/", *(f"/page/{name}" for name in FILES)})
"""What is served without an API key: the page asks for one."""


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    return _answer(*INDEX, request)


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str, request: Request) -> Response:
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name!r:.100}")
    return _answer(*FILES[name], request)


def _answer(body: bytes, headers: dict[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
