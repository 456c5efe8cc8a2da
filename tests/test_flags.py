"""Flags that commands share, and the files that hold them."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys

import pytest

from jaxinfer.flags import (
    Items,
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    add_model_flags,
    json_object,
    load_processors,
    parse_with_config,
    size_bytes,
)


def make_parser():
    parser = Parser()
    add_config_flag(parser)
    add_model_flags(parser)
    add_engine_flags(parser.add_argument_group("engine"))
    parser.add_argument("--shares", type=json_object)
    parser.add_argument("--level", choices=("low", "high"), default="low")
    parser.add_argument("--word", action=Items, default=argparse.SUPPRESS)
    parser.add_argument("--name", nargs="+")
    return parser


def parse(*argv):
    return parse_with_config(make_parser(), argv)


def test_flags_are_the_arguments_of_the_engine():
    from jaxinfer import LLM

    known = inspect.signature(LLM.__init__).parameters
    flags = vars(parse())
    given = {name: flags[name] for name in flags if name not in ("config", "level", "name", "shares")}
    assert set(known) - set(given) == {"self", "params", "verbose", "tenant_weights"}
    assert {name: value for name, value in given.items() if value != known[name].default} == {}


@pytest.mark.parametrize(("text", "size"), [("500000", 500000), ("800k", 800 << 10), ("8M", 8 << 20), ("1g", 1 << 30)])
def test_sizes(text, size):
    assert size_bytes(text) == size


def test_a_file_sets_flags_and_the_command_line_goes_first(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text(
        "max-model-len: auto\nmax_num_seqs: 8\nenable-prefix-caching: false\nname: [a, b]\nshares: {ann: 2}\n"
        "word: ['--x', '#']\npage-size: 8\n"
    )
    flags = parse("--config", str(file), "--max-num-seqs", "4")
    assert (flags.max_model_len, flags.max_num_seqs, flags.page_size) == ("auto", 4, 8)
    assert flags.enable_prefix_caching is False and flags.name == ["a", "b"]
    assert flags.shares == {"ann": 2} and flags.word == ["--x", "#"]
    assert parse("--config", str(file), "--word", "y", "--word=z", "--enable-prefix-caching").word == ["y", "z"]


def test_items_are_gathered():
    assert parse("--word", "a", "b", "--word=--c").word == ["a", "b", "--c"]
    assert not hasattr(parse(), "word")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no-such-flag: 1", "no-such-flag"),
        ("no-overlap: true", "no-overlap"),
        ("max-model-len: many", "max-model-len"),
        ("enable-prefix-caching: maybe", "true or false"),
        ("shares: [1]", "no JSON object"),
        ("- a\n- b", "map flags"),
        ("a: [", "flags.yaml"),
        ("config: other.yaml", "config"),
        ("level: loud", "level"),
        ("word: []", "word"),
        ("name: []", "name"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path, text, words):
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(words)):
        parse("--config", str(file))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "long"], "--max-model-len"),
        (["--shares", "[1]"], "no JSON object"),
        (["--shares", "[" * 100_000], "no JSON object"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--word"], "--word"),
    ],
)
def test_bad_flags_are_refused_by_name(flags, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(*flags)


@pytest.mark.parametrize("text", ["", "8Q", "M", "-1", "1.5M"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        size_bytes(text)


def test_processors_are_found_by_their_places(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_flags.py").write_text(
        "from jaxinfer import LogitsProcessor\nP = LogitsProcessor('p', max)\nQ = 1\n"
    )
    (found,) = load_processors(parse("--logits-processors", "of_flags:P").logits_processors)
    assert found.name == "p"
    for place, words in (
        ("of_flags:R", "'R'"),
        ("of_flags:Q", "it is a int"),
        ("of_flags", "package.module:NAME"),
        ("no_such_module:P", "no_such_module"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)) as caught:
            load_processors([place])
        assert place in str(caught.value)


def test_reading_flags_loads_no_jax():
    code = "import sys, jaxinfer.flags; assert not {'jax', 'numpy', 'yaml'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
