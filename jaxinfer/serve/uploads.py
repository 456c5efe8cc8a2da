"""A file in a form (multipart/form-data), written to the store as it comes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jaxinfer.serve.batch_schemas import FileUpload
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.file_store import FileStore, StoredFile

MAX_FORM_BYTES = 64 << 10
"""What a form may hold beside the file."""
_MAX_FIELD_BYTES = 1024
_MAX_PARTS = 16
_WRITTEN_BYTES = 1 << 20


async def receive(request: Request, store: FileStore, owner: str) -> StoredFile:
    """Store the file of a form.

    Raises:
        ApiError: no such form, or no room for the file.
        RequestValidationError: a field of the form is wrong.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "the body must be multipart/form-data with a file and its purpose", param="file")
    part = store.new_part()
    try:
        form = _Form()
        try:
            parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]
            async for chunk in request.stream():
                parser.write(chunk)
                part.reserve(form.take_size())
                if len(form.content) >= _WRITTEN_BYTES:
                    await asyncio.to_thread(part.write, form.take_content())
            parser.finalize()
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from None
        if not form.ended:
            raise ApiError(400, "the form is cut off: its last boundary is missing")
        upload = _checked(form.fields)
        await asyncio.to_thread(part.write, form.take_content())
        lifetime_s = None if upload.expires_after is None else upload.expires_after.seconds
        return await part.keep(owner, upload.file, upload.purpose, lifetime_s)
    finally:
        part.drop()


def _checked(fields: dict[str, Any]) -> FileUpload:
    """The form's fields, checked as the bodies of the other endpoints are."""
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if anchor is not None or seconds is not None:
        number = int(seconds) if seconds is not None and seconds.isdecimal() and len(seconds) < 16 else seconds
        given = {"anchor": anchor, "seconds": number}
        fields["expires_after"] = {name: value for name, value in given.items() if value is not None}
    try:
        return FileUpload.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None


class _Form:
    """What the parser finds: the small fields, and the content of the file that has not been taken yet."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.content = bytearray()
        self.ended = False
        self._num_parts = 0
        self._size = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._headers: dict[bytes, bytes] = {}
        self._name: str | None = None  # of the field that is being read; None in the file
        self._value = bytearray()

    def callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._data,
            "on_part_end": self._close,
            "on_end": self._end,
        }

    def take_content(self) -> bytes:
        content, self.content = bytes(self.content), bytearray()
        return content

    def take_size(self) -> int:
        """Bytes of the file since the last call."""
        size, self._size = self._size, 0
        return size

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ApiError(400, f"the form has more than {_MAX_PARTS} parts")
        self._headers, self._value = {}, bytearray()

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = (bytearray(), bytearray())

    def _open(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name:
            raise ApiError(400, "a part of the form has no name")
        if name in self.fields:
            raise ApiError(400, f"{name:.60} is given twice", param=name[:60])
        self._name = name
        if name == "file":
            if b"filename" not in options:
                raise ApiError(400, "file must be sent as a file, with a file name", param="file")
            self._name = None
            self.fields["file"] = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self.content += data[start:end]
            self._size += end - start
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise ApiError(400, f"{self._name:.60} is longer than {_MAX_FIELD_BYTES} bytes", param=self._name[:60])

    def _close(self) -> None:
        if self._name is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True
