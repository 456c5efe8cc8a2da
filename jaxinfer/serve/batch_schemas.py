"""The bodies of the files and batches endpoints. Each field says where it is enforced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxinfer.serve.fields import Body, Enforced

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
LifetimeS = Annotated[int, Field(ge=3600, le=2592000)]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ExpiresAfter(Body):
    """When a file goes."""

    anchor: Literal["created_at"]
    seconds: LifetimeS


class FileUpload(Body):
    """`POST /v1/files`: the parts of the form, beside the file itself."""

    file: Annotated[str, Enforced("Upload: the part with a file name; its content is streamed to the store")]
    purpose: Annotated[Literal["batch"], Enforced("FileStore: what the file is for")]
    expires_after: Annotated[ExpiresAfter | None, Enforced("FileStore: the file goes after so many seconds")] = None


class BatchRequest(Body):
    """`POST /v1/batches`."""

    input_file_id: Annotated[str, Enforced("FileStore: the file whose lines are run")]
    endpoint: Annotated[Endpoint, Enforced("lines for another url are refused")]
    completion_window: Annotated[Literal["24h"], Enforced("the batch expires after it")]
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None, Field(max_length=16), Enforced("kept and told with the batch")
    ] = None
    output_expires_after: Annotated[ExpiresAfter | None, Enforced("FileStore: output and error file go after it")] = (
        None
    )
