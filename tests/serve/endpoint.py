"""One endpoint as the walk over the table of fields asks it: from a body that is taken, with changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.serve import effects, offline_effects

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "once upon a time", "max_tokens": 10, "seed": 1},
    CHAT: {"messages": [{"role": "user", "content": "once upon a time"}], "max_tokens": 10, "seed": 1},
    "/tokenize": {"prompt": "once"},
    "/detokenize": {"tokens": [70, 71, 72]},
    **offline_effects.BASES,
    **effects.BASES,
}
Check = Callable[["Endpoint"], None]


class Endpoint:
    """Asks one endpoint, from its base body on."""

    def __init__(self, served: Any, path: str):
        self.served = served
        self.path = path

    def post(self, **changes: Any) -> Any:
        body = {**BASES[self.path], **changes}
        return offline_effects.post(self.served, self.path, {k: v for k, v in body.items() if v is not ...})

    def answer(self, **changes: Any) -> Any:
        response = self.post(**changes)
        assert response.status_code == 200, response.text
        return response.json()

    def choice(self, **changes: Any) -> Any:
        return self.answer(**changes)["choices"][0]

    def text(self, **changes: Any) -> str:
        choice = self.choice(**changes)
        return choice["text"] if "text" in choice else choice["message"]["content"]

    def ids(self, **changes: Any) -> list[int]:
        return self.choice(return_token_ids=True, **changes)["token_ids"]

    def error(self, **changes: Any) -> Any:
        response = self.post(**changes)
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        return {"param": error["message"], "code": "", **error}  # the Messages API has the path in its message only

    def events(self, **changes: Any) -> list[Any]:
        text = self.post(stream=True, **changes).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def passed(self, **changes: Any) -> dict[str, Any]:
        """What `AsyncLLM.submit` is given beside the prompt."""
        llm, seen = self.served.server.llm, {}
        submit = llm.submit

        def spy(*values: Any, **named: Any) -> Any:
            seen.update(named)
            return submit(*values, **named)

        llm.submit = spy
        try:
            self.answer(**changes)
        finally:
            del llm.submit
        return seen
