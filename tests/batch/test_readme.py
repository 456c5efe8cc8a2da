"""The README's batch command, and what it shows of its results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxinfer.batch.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_command_gives_what_is_shown(tmp_path, monkeypatch, capsys, smollm2_path):
    section = (ROOT / "README.md").read_text().partition("## Run a batch")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^    scripts/batch (.*)$", section, re.MULTILINE)
    argv = shlex.split(command)
    argv[argv.index("results")] = str(tmp_path / "results")
    monkeypatch.chdir(ROOT)
    assert main(argv) == 0
    said = capsys.readouterr().err
    shown = re.search(r"^    jaxinfer: (\d+ records, \d+ tokens) in results;", section, re.MULTILINE)
    assert shown is not None and f"jaxinfer: {shown[1]} in {tmp_path / 'results'};" in said
    lines = (tmp_path / "results" / "results-00000-of-00001.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list(range(1, 9))
    third = re.sub(r'"fingerprint":"\w+"', "", lines[2])
    pieces = re.split(r'…|"fingerprint":"\w+"', "".join(re.findall(r"^    (?=\{| )(.*)$", section, re.MULTILINE)))
    pieces = [re.sub(r"\n? {2,}", "", piece) for piece in pieces]
    assert len(pieces) > 4
    for piece in pieces:
        assert piece.strip(",}] ") in third
