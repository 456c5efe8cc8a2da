"""The README's commands for the server do what they say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
CURL = [
    shlex.split(command.replace("\\\n", " "))
    for command in re.findall(r"^    (curl (?:.*\\\n)*.*)$", README, re.MULTILINE)
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_commands(served):
    assert len(CURL) == 2
    answers = []
    for command in CURL:
        here = [word.replace("http://127.0.0.1:8000", served.url) for word in command]
        assert here != command
        done = subprocess.run([*here, "-sS"], capture_output=True, text=True, timeout=60, check=True)
        answers.append(done.stdout)
    whole, streamed = answers
    assert json.loads(whole)["choices"][0]["message"]["role"] == "assistant"
    assert streamed.endswith("data: [DONE]\n\n")


def test_the_python_example(served):
    (example,) = re.findall(r"```python\n(from openai .*?)```", README, re.DOTALL)
    own = example.replace("http://127.0.0.1:8000", served.url).replace("SmolLM2-135M-Instruct", "tiny")
    found: dict[str, object] = {}
    exec(own, found)
    found["client"].close()
    assert found["answer"].usage.completion_tokens > 0
