"""What is known of one request that was sent: moments, counts, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """One request. Moments are seconds on one clock from the start of the run.

    `due_s` is when it was scheduled to be sent: a session's arrival, in a closed loop the end of the request before.
    Latencies count from there. `woke_s` is when the client began with it, `sent_s` when it had a place under the
    concurrency limit. `text_s` are the moments of the chunks that carried text, `last_s` that of the last chunk that
    carried text or a finish_reason.
    """

    session: int
    turn: int
    due_s: float
    requested_tokens: int | None = None
    num_prompt_ids: int | None = None
    woke_s: float = 0.0
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    text_s: list[float] = field(default_factory=list)
    status: int | None = None
    error: str | None = None
    detail: str = ""
    done: bool = False
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None
    counted_tokens: int | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether an answer came that ended as an answer does; `checks` says whether it is also right."""
        return self.error is None and self.first_s is not None

    @property
    def num_tokens(self) -> int:
        """Output tokens as the server's usage states them; without a usage, the chunks with text."""
        return len(self.text_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled moment to the first chunk, waiting in the client included."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        """From the scheduled moment to the last chunk with text or a finish_reason."""
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e − TTFT) ÷ (output tokens − 1); None below two tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """ITL: the time between each chunk with text and the one before."""
        return [after - before for before, after in zip(self.text_s, self.text_s[1:], strict=False)]
