"""Hugging Face folders: the same vocabulary as from GGUF, the companions' settings, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.tokenizer.token_bytes import Family


def save(tokenizer: Tokenizer, folder: Path, **companions: Any) -> Path:
    """Write a tokenizer's folder; `companions` are JSON files by stem."""
    folder.mkdir(exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for stem, content in companions.items():
        (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


SMOLLM_CONFIG = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "special": True}}


@pytest.fixture(scope="module")
def smollm_folder(smollm: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**SMOLLM_CONFIG, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    folder = tmp_path_factory.mktemp("hf") / "smollm"
    return save(smollm, folder, tokenizer_config=config, generation_config={"eos_token_id": [2, 0]})


@pytest.fixture(scope="module")
def from_folder(smollm_folder: Path) -> Tokenizer:
    return load_tokenizer(smollm_folder)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text("aB 12\n'é日🙂<|im_end|>", max_size=40))
def test_folder_and_gguf_agree(smollm: Tokenizer, from_folder: Tokenizer, text: str):
    ids = smollm.encode(text)
    assert from_folder.encode(text) == ids
    assert from_folder.decode(ids) == smollm.decode(ids) == smollm.backend.decode(ids, skip_special_tokens=False)
    skipping = from_folder.decode(ids, skip_special_tokens=True)
    assert skipping == smollm.backend.decode(ids, skip_special_tokens=True)


def test_what_the_companions_say(smollm: Tokenizer, from_folder: Tokenizer, smollm_folder: Path):
    assert (from_folder.bos_token_id, from_folder.eos_token_id, from_folder.eos_token_ids) == (1, 2, (2, 0))
    assert from_folder.special_ids == smollm.special_ids
    assert from_folder.vocab_size == smollm.vocab_size
    assert from_folder.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<|im_end|>"
    (smollm_folder / "chat_template.jinja").write_text("file {{ messages[0].role }}", encoding="utf-8")
    again = load_tokenizer(smollm_folder / "tokenizer.json")
    assert again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "file user"


def test_sentencepiece_folder_equals_gguf(sentencepiece: Tokenizer, tmp_path: Path):
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    folder = save(sentencepiece, tmp_path / "sp", tokenizer_config=names)
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    description["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert loaded.family is Family.SENTENCEPIECE and loaded.strip_leading_space
    for text in ("ab bc", " é", "🙂<|turn|> a", "", "    a"):
        ids = sentencepiece.encode(text)
        assert loaded.encode(text) == ids and ids[0] == 1
        assert loaded.encode(text, add_special_tokens=False) == ids[1:]
        assert loaded.decode(ids) == sentencepiece.decode(ids) == loaded.backend.decode(ids, skip_special_tokens=False)


def test_named_templates(smollm: Tokenizer, tmp_path: Path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    loaded = load_tokenizer(save(smollm, tmp_path / "a", tokenizer_config={"chat_template": templates}))
    chat = [{"role": "user", "content": "x"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "plain"
    assert loaded.apply_chat_template(chat, tools=[{"name": "f"}], tokenize=False) == "1"
    assert loaded.apply_chat_template(chat, chat_template="tool_use", tools=[], tokenize=False) == "0"


def test_padding_and_truncation_in_the_file_are_ignored(smollm: Tokenizer, tmp_path: Path):
    folder = save(smollm, tmp_path / "cut")
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    description["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    assert len(load_tokenizer(folder).encode("one two three four")) == 4


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["tokenizer", "tokenizer_config", "generation_config", "special_tokens_map"]), st.data())
def test_malformed_files_raise_value_errors(tmp_path: Path, sentencepiece: Tokenizer, stem: str, data: st.DataObject):
    folder = save(sentencepiece, tmp_path / "broken", tokenizer_config={}, generation_config={}, special_tokens_map={})
    leaf = st.none() | st.integers() | st.text(max_size=4)
    keys = st.sampled_from(["eos_token_id", "chat_template", "bos_token", "decoder", "model", "x"])
    content = data.draw(st.text(max_size=6) | st.dictionaries(keys, leaf | st.lists(leaf, max_size=2)).map(json.dumps))
    (folder / f"{stem}.json").write_text(content, encoding="utf-8")
    try:
        load_tokenizer(folder)
    except ValueError as error:
        assert stem in str(error) or "chat_template" in str(error)


def test_refusals(tmp_path: Path, smollm_folder: Path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file; give the folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match="save_pretrained"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="local path"):
        load_tokenizer(smollm_folder, revision="main")


def test_unknown_decoders_are_refused(tmp_path: Path):
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"its decoder is None; only byte-level"):
        load_tokenizer(tmp_path)


def test_gguf_files_are_taken_too(smollm2_path: Path, smollm: Tokenizer):
    assert load_tokenizer(smollm2_path).encode("In 1984") == smollm.encode("In 1984")


def test_other_threads_go_on_while_a_long_text_is_encoded():
    import threading
    import time

    tokenizer = load_tokenizer(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-llama")
    text = "ab " * 300_000
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    turns, before_s = 0, time.monotonic()
    thread.start()
    assert begun.wait(10)
    while not ended.is_set():  # a lock that is kept allows a turn or two, before and after
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 20 * (time.monotonic() - before_s)
