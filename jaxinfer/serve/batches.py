"""`/v1/batches`: files of requests that are answered while there is room beside the others."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from jaxinfer.serve.batch_schemas import BatchRequest
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.files import check_query, owner_of, page_of, service_of
from jaxinfer.serve.server import Server
from jaxinfer.serve.sse import answer

router = APIRouter()


@router.post("/v1/batches")
async def create_batch(request: Request, body: BatchRequest) -> Response:
    """Begin a batch."""
    server: Server = request.app.state.server
    if server.admission.draining:
        raise ApiError(503, "the server is shutting down; ask another", code="draining", headers={"Retry-After": "5"})
    batch = await service_of(request).create(owner_of(request), body)
    return answer(batch.told())


@router.get("/v1/batches")
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """The owner's batches, the newest first."""
    check_query(request, {"after", "limit"})
    return answer(page_of(service_of(request).listed(owner_of(request)), after, limit))


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """How a batch is doing."""
    return answer(service_of(request).get(owner_of(request), batch_id).told())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Have a batch end with what it has."""
    batch = await service_of(request).cancel(owner_of(request), batch_id)
    return answer(batch.told())
