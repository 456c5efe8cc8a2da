"""A batch as it is kept and told."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxinfer.jobs.durable import write_durably
from jaxinfer.serve.batch_schemas import BatchRequest
from jaxinfer.serve.file_store import StoredFile, new_file_id

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[str] = frozenset({"completed", "failed", "expired", "cancelled"})
WINDOW_S = 24 * 3600
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@dataclass
class Batch:
    """What is known of a batch beside its results. Its output files have their ids from the beginning, so that writing
    them again after a crash makes no second ones; they are told once they are there."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    filename: str
    made_ns: int
    metadata: dict[str, str] | None
    output_lifetime_s: int | None
    output_id: str = field(default_factory=new_file_id)
    error_id: str = field(default_factory=new_file_id)
    status: Status = "validating"
    outcome: Status = "completed"  # what becomes of it after "finalizing"
    times: dict[str, int] = field(default_factory=dict)
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    has_output: bool = False
    has_errors: bool = False

    @classmethod
    def of(cls, body: BatchRequest, file: StoredFile) -> Batch:
        """The batch that a body asks for."""
        return cls(
            f"batch_{uuid.uuid4().hex}",
            file.owner,
            body.endpoint,
            file.id,
            file.filename,
            time.time_ns(),
            body.metadata,
            None if body.output_expires_after is None else body.output_expires_after.seconds,
        )

    @classmethod
    def load(cls, folder: Path) -> Batch:
        """A batch that was saved. Raises `ValueError`, `TypeError` or `OSError` for one that cannot be read."""
        found = cls(**json.loads((folder / "batch.json").read_bytes()))
        if found.id != folder.name:
            raise ValueError(f"it is of {found.id!r:.60}")
        return found

    def save(self, folder: Path) -> None:
        """Keep it, whatever happens next."""
        write_durably(folder / "batch.json", json.dumps(dataclasses.asdict(self)).encode())

    @property
    def expires_at(self) -> int:
        """Seconds since the epoch."""
        return self.made_ns // 10**9 + WINDOW_S

    def enter(self, status: Status) -> None:
        """Change the status, and note when."""
        self.status = status
        self.times[status] = int(time.time())

    def told(self) -> dict[str, Any]:
        """In the shape of the OpenAI API."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.made_ns // 10**9,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "expires_at": self.expires_at,
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }
