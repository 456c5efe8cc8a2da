"""`python -m jaxinfer.chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxinfer.engine.errors import RequestError
from jaxinfer.llm import LLM
from jaxinfer.phases import LOG_LEVELS, show_logs
from jaxinfer.request import SamplingParams

_HELP = """/help            this list
/set NAME VALUE  a sampling field: temperature, top_p, top_k, max_tokens, seed …
/clear           forget the conversation
/exit            leave (so does Ctrl-D); Ctrl-C stops an answer"""


def main(argv: list[str] | None = None) -> int:
    """Read lines, answer each, until the end of input."""
    parser = argparse.ArgumentParser(prog="python -m jaxinfer.chat", description=__doc__)
    parser.add_argument(
        "--model", help="a GGUF file, a Hugging Face folder, a converted checkpoint or a hub id (default: SmolLM2-135M)"
    )
    parser.add_argument("--max-model-len", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="info shows the phases of the start")
    arguments = parser.parse_args(argv)
    show_logs(arguments.log_level)
    try:
        llm = LLM(arguments.model, max_model_len=arguments.max_model_len, max_num_seqs=1)
    except ValueError as error:
        print(f"error: {error}")
        return 1
    print("Type a message; /help lists the commands.")
    settings: dict[str, float | int] = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line == "/exit":
            return 0
        if line == "/clear":
            messages = list(opening)
        elif line.startswith("/set "):
            settings = _set(settings, line.split()[1:])
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            messages = _answer(llm, [*messages, {"role": "user", "content": line}], settings)


def _set(settings: dict[str, float | int], words: list[str]) -> dict[str, float | int]:
    try:
        name, text = words
        changed = {**settings, name: _value(text)}
        SamplingParams(**changed)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        print(f"error: {error}")
        return settings
    return changed


def _value(text: str) -> Any:
    """A setting as JSON has it, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _answer(llm: LLM, messages: list[dict[str, str]], settings: dict[str, float | int]) -> list[dict[str, str]]:
    pieces: list[str] = []
    try:
        ids = llm.tokenizer.apply_chat_template(messages)
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        for piece in llm.stream({"prompt_token_ids": ids}, params):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except (ValueError, TypeError, RequestError) as error:
        print(f"error: {error}")
        return messages[:-1]
    print()
    return [*messages, {"role": "assistant", "content": "".join(pieces)}]


if __name__ == "__main__":
    raise SystemExit(main())
