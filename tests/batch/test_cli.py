"""Flags of a job and its configuration file."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from jaxinfer.batch.cli import make_parser, parse, sampling_flags
from jaxinfer.batch.config import JobConfig
from jaxinfer.batch.fields import ARRAYS, sampling_params
from jaxinfer.flags import UsageError
from jaxinfer.request import SamplingParams

FILES = ["--input", "a.tfrecord", "--output", "out"]
# Of each sampling flag: words of the command line, and the value that the field gets.
SAMPLING = {
    "n": (["2"], 2),
    "best_of": (["3"], 3),
    "temperature": (["0.5"], 0.5),
    "top_k": (["-1"], -1),
    "top_p": (["0.9"], 0.9),
    "min_p": (["0.1"], 0.1),
    "typical_p": (["0.8"], 0.8),
    "repetition_penalty": (["1.1"], 1.1),
    "presence_penalty": (["-0.5"], -0.5),
    "frequency_penalty": (["0.5"], 0.5),
    "logit_bias": (['{"3": -1.5}'], {3: -1.5}),
    "allowed_token_ids": (["1", "2"], [1, 2]),
    "bad_words": (["a", "b"], ["a", "b"]),
    "apply_logits_processors": (['{"favour": {"amount": 2}}'], {"favour": {"amount": 2.0}}),
    "max_tokens": (["7"], 7),
    "min_tokens": (["1"], 1),
    "stop": (["x", "y"], ["x", "y"]),
    "stop_token_ids": (["5"], [5]),
    "ignore_eos": ([], True),
    "include_stop_str_in_output": ([], True),
    "skip_special_tokens": (None, False),
    "logprobs": (["0"], 0),
    "prompt_logprobs": (["1"], 1),
    "structured_outputs": (['{"regex": "a+"}'], {"regex": "a+"}),
}


def test_every_sampling_field_is_a_flag():
    assert set(sampling_flags()) == set(SAMPLING)
    assert {each.name for each in fields(SamplingParams)} - set(sampling_flags().values()) == {"seed", *ARRAYS}


@pytest.mark.parametrize("dest", SAMPLING)
def test_sampling_flags_arrive(dest, tmp_path):
    words, value = SAMPLING[dest]
    flag, name = dest.replace("_", "-"), sampling_flags()[dest]
    argv = [f"--no-{flag}"] if words is None else [f"--{flag}", *words]
    config = parse([*FILES, *argv])
    assert set(config.sampling) == {name}
    made = getattr(sampling_params({"best_of": None, **config.sampling}), name)
    assert (made if name != "structured_outputs" else {"regex": made.regex}) == value
    assert value != getattr(SamplingParams(), name), "it is not the default"
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({flag: value}))
    assert sampling_params(parse([*FILES, "--config", str(file)]).sampling) == sampling_params(config.sampling)


def test_as_many_tokens_as_the_context_holds():
    assert parse([*FILES, "--max-tokens", "none"]).sampling == {"max_tokens": None}
    assert parse(FILES).sampling == {}


def test_every_setting_of_the_engine_arrives():
    from jaxinfer import LLM

    known = inspect.signature(LLM.__init__).parameters
    arguments = parse(FILES).llm_arguments()
    assert set(known) - set(arguments) == {"self", "params", "tenant_weights"}
    assert set(arguments) <= set(known)
    differing = {name: value for name, value in arguments.items() if value != known[name].default}
    assert differing == {"batch_invariant": True}, "so that restarts give the same bits everywhere"


def test_what_is_given_arrives(tmp_path):
    config = parse(
        ["--input", "a*", "b", "--input", "c", "--output", "gs://bucket/x", "--state", "s", "--format", "jsonl"]
        + ["--input-format", "parquet", "--prompt-feature", "q", "--pass-through", "id", "--model", "m", "--seed", "9"]
        + ["--on-error", "record", "--on-long-prompt", "skip", "--records-per-shard", "5", "--limit", "7", "--dry-run"]
        + ["--window", "8", "--accept-changes", "--quiet", "--log-level", "info", "--max-model-len", "64"]
        + ["--no-batch-invariant", "--served-model-name", "gpt", "--chat-template", "{{ messages }}"]
    )
    assert (config.inputs, config.output, config.state) == (("a*", "b", "c"), "gs://bucket/x", Path("s"))
    assert (config.format, config.input_format, config.prompt_feature) == ("jsonl", "parquet", "q")
    assert (config.pass_through, config.model, config.model_names, config.seed) == (("id",), "m", ("gpt",), 9)
    assert (config.on_error, config.on_long_prompt, config.log_level) == ("record", "skip", "info")
    assert (config.records_per_shard, config.limit, config.window) == (5, 7, 8)
    assert config.dry_run and config.accept_changes and config.quiet
    assert config.engine["max_model_len"] == 64 and config.engine["batch_invariant"] is False
    assert config.chat_template == "{{ messages }}"
    arguments = config.llm_arguments()
    assert (arguments["model"], arguments["seed"], arguments["verbose"]) == ("m", 9, False)
    assert parse([*FILES, "--model", "m"]).model_names == () and parse(FILES).pass_through is None


def test_every_flag_may_stand_in_a_file(tmp_path):
    """What a flag takes on the command line, a line of the file takes too, and comes to the same."""
    own = {"input": ["x"], "state": "s", "log_level": "info", "format": "jsonl", "input_format": "jsonl"}
    own |= {"on_error": "skip", "on_long_prompt": "skip", "dtype": "float32"}
    own |= {dest: value for dest, (_, value) in SAMPLING.items()}
    file = tmp_path / "job.yaml"
    default = parse(FILES)
    for action in make_parser()._actions:
        if action.dest in ("help", "config", "chat_template"):
            continue
        flipped = isinstance(action, argparse.BooleanOptionalAction) and action.default is not True
        plain = ["4"] if action.nargs == "+" else flipped if isinstance(action, argparse.BooleanOptionalAction) else "4"
        file.write_text(json.dumps({action.option_strings[0].removeprefix("--"): own.get(action.dest, plain)}))
        given = FILES if action.dest not in ("input", "output") else FILES[2:] if action.dest == "input" else FILES[:2]
        assert parse([*given, "--config", str(file)]) != default, action.dest


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output", "o"], "--input is missing"),
        (["--input", "i"], "--output is missing"),
        ([*FILES, "--format", "csv"], "--format"),
        ([*FILES, "--limit", "0"], "limit=0"),
        ([*FILES, "--records-per-shard", "0"], "records_per_shard=0"),
        ([*FILES, "--window", "0"], "window=0"),
        ([*FILES, "--seed", "-1"], "seed=-1"),
        ([*FILES, "--prompt-feature", ""], "prompt_feature"),
        ([*FILES, "--temperature", "-1"], "temperature=-1.0"),
        ([*FILES, "--temprature", "1"], "--temprature"),
        ([*FILES, "--top-p", "x"], "--top-p"),
        ([*FILES, "--max-tokens", "1.5"], "--max-tokens"),
        ([*FILES, "--structured-outputs", '{"regx": "a"}'], "regx"),
        ([*FILES, "--structured-outputs", "{}"], "exactly one"),
        ([*FILES, "--logit-bias", "[1]"], "no JSON object"),
        ([*FILES, "--return-logits"], "--return-logits"),
        ([*FILES, "--chat-template", "/no/such/file"], "/no/such/file"),
        ([*FILES, "--state", "gs://b/x"], "local folder"),
        (["--input", "i", "--output", "s3://b/o"], "local folder"),
        ([*FILES, "--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_bad_flags_are_refused_by_name(flags, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(flags)


def test_logits_processors_are_named_by_their_places(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_batch.py").write_text("from jaxinfer import LogitsProcessor\nP = LogitsProcessor('p', max)\n")
    config = parse([*FILES, "--logits-processors", "of_batch:P"])
    assert config.engine["logits_processors"] == ["of_batch:P"], "a place can be kept and compared"
    (found,) = config.llm_arguments()["logits_processors"]
    assert found.name == "p"


def test_a_logits_processor_that_is_not_there_is_named():
    config = parse([*FILES, "--logits-processors", "no_such_module:P"])
    with pytest.raises(UsageError, match="no_such_module:P"):
        config.llm_arguments()


def test_arrays_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="return_logits: results hold no arrays"):
        JobConfig(("a",), "o", sampling={"return_logits": True})


def test_help_tells_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert [a.option_strings[0] for a in make_parser()._actions if a.option_strings[-1] not in text] == []


def test_reading_flags_loads_no_jax():
    code = f"import sys; from jaxinfer.batch.cli import parse; parse({FILES!r}); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
