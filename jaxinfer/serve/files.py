"""`/v1/files`: what clients upload for batches, and what batches give back."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from jaxinfer.serve import uploads
from jaxinfer.serve.batch_service import BatchService
from jaxinfer.serve.batch_state import Batch
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.file_store import StoredFile
from jaxinfer.serve.server import tenant_of
from jaxinfer.serve.sse import answer

router = APIRouter()


def service_of(request: Request) -> BatchService:
    """What keeps files and batches. Raises the 404 where the server keeps none."""
    service: BatchService | None = request.app.state.batches
    if service is None:
        raise ApiError(
            404, "files and batches are off: the server has no folder for them (--batch-dir)", code="batches_off"
        )
    return service


def owner_of(request: Request) -> str:
    """Whose files a request sees: those of its API key's owner."""
    return tenant_of(request, None)


def check_query(request: Request, known: AbstractSet[str]) -> None:
    """Raise `ApiError` for a query parameter that an endpoint does not have."""
    if unknown := sorted(set(request.query_params) - known):
        raise ApiError(400, f"{unknown[0]:.60}: no such parameter", param=unknown[0][:60], code="unknown_parameter")


def page_of(items: Sequence[StoredFile] | Sequence[Batch], after: str | None, limit: int) -> dict[str, Any]:
    """Those after one that is named, as many as asked. Raises `ApiError` where that is none of them."""
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(404, f"after: there is no {after!r:.60}", param="after")
        start = places[0] + 1
    page = [item.told() for item in items[start : start + limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Store the file of a form."""
    file = await uploads.receive(request, service_of(request).store, owner_of(request))
    return answer(file.told())


@router.get("/v1/files")
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The owner's files, by the time they were made."""
    check_query(request, {"purpose", "after", "limit", "order"})
    files = service_of(request).store.listed(owner_of(request), purpose)
    return answer(page_of(files if order == "desc" else files[::-1], after, limit))


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> Response:
    """What is told of a file."""
    return answer(service_of(request).store.get(owner_of(request), file_id).told())


@router.get("/v1/files/{file_id}/content")
async def retrieve_file_content(request: Request, file_id: str) -> Response:
    """A file as it is."""
    store = service_of(request).store
    file = store.get(owner_of(request), file_id)
    return FileResponse(store.path(file.id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Take a file away."""
    service_of(request).store.delete(owner_of(request), file_id)
    return answer({"id": file_id, "object": "file", "deleted": True})
