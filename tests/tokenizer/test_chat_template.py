"""Chat templates: the golden prompts, what Hugging Face's renderer offers, and templates that mean harm."""

import time
from datetime import datetime
from typing import Any

import pytest

from jaxinfer.tokenizer import ChatTemplateError, Tokenizer, render_chat_template

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(source: str, messages: Any = HI, **options: Any) -> str:
    return render_chat_template(source, messages, **options)


def test_the_models_own_template_gives_the_golden_prompts(smollm: Tokenizer, golden: dict[str, Any]):
    chats = [item for item in golden["items"] if "messages" in item]
    assert chats
    for item in chats:
        assert smollm.apply_chat_template(item["messages"], tokenize=False) == item["prompt"]
        assert smollm.apply_chat_template(item["messages"]) == item["prompt_ids"]


def test_options_of_the_tokenizers_door(smollm: Tokenizer):
    assert not smollm.apply_chat_template(HI, add_generation_prompt=False, tokenize=False).endswith("assistant\n")
    own = "{{ bos_token }}{{ mode }}{{ tools | tojson }}"
    shown = smollm.apply_chat_template(HI, tools=[{"n": "é"}], chat_template=own, tokenize=False, mode="x")
    assert shown == '<|im_start|>x[{"n": "é"}]'
    continued = smollm.apply_chat_template(
        [*HI, {"role": "assistant", "content": "Sure, "}],
        add_generation_prompt=False,
        continue_final_message=True,
        tokenize=False,
    )
    assert continued.endswith("<|im_start|>assistant\nSure, ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{%- for m in messages -%}\n  {{ m['role'] }}\n{%- endfor %}", "user"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f(2) }}", "[a][2]"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x + 'b' * 3 }}", "a1bbb"),
        ("{{ 'a,b'.split(',') | join('-') }}{{ ' x '.strip() }}{{ ','.join(['p', 'q']) }}", "a-bxp,q"),
        ("{{ 'abc'[1:] }}{{ messages[::-1][0].role }}{{ 'x=%s' % 3 }}{{ '{:>3}'.format(7) }}", "bcuserx=3  7"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ dict(z=1) }}", "a1{'z': 1}"),
        ("{{ 'a\nb' | indent(2) }}{{ [3, 1] | sort | first }}{{ [1, 2] | sum }}{{ '7' | int + 1 }}", "a\n  b138"),
        ("{{ undefined_name }}{{ messages[0].nothing is defined }}{{ 2.567 | round(1) }}", "False2.6"),
        ("{{ tools is none }}{{ 'aXa' | replace('a', 'b') }}{{ 'aXa'.replace('a', '', 1) }}", "TruebXbXa"),
        ("{% call(x) g() %}{{ x }}{% endcall %}{% macro g() %}{{ caller(5) }}{% endmacro %}", None),
    ],
)
def test_what_templates_use(source: str, expected: str | None):
    if expected is None:
        with pytest.raises(ChatTemplateError):
            render(source)
    else:
        assert render(source) == expected


def test_the_time_now():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    with pytest.raises(ChatTemplateError, match="unusual format"):
        render("{{ strftime_now('%1000000000d') }}")


def test_text_parts_are_joined_and_other_parts_kept():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(CHATML, [{"role": "user", "content": parts}]) == "<|user|>a\nb<|end|>\n<|assistant|>"
    image = [{"type": "image"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content | length }}", [{"role": "user", "content": image}]) == "2"


def test_continuing_the_final_message():
    chat = [*HI, {"role": "assistant", "content": "hi"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, chat, **options) == "<|user|>hi<|end|>\n<|assistant|>hi"
    assert chat[-1]["content"] == "hi"
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        render(CHATML, chat, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="leaves the last message's content out"):
        render("nothing", chat, **options)
    with pytest.raises(ChatTemplateError, match="is not text"):
        render(CHATML, [{"role": "assistant", "content": None}], **options)


def test_a_missing_template_says_how_to_pass_one(sentencepiece: Tokenizer):
    with pytest.raises(ChatTemplateError, match=r"no chat template.*chat_template=SOURCE"):
        sentencepiece.apply_chat_template(HI)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("a\n{% if %}", "line 2"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' | center(9) }}", "No filter named 'center'"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore|unexpected"),
        ("{{ lipsum() }}", "undefined"),
    ],
)
def test_template_errors_are_value_errors(source: str, message: str):
    with pytest.raises(ValueError, match=message):
        render(source)


TWICE = "{% set x = 'ab' %}"
HARMFUL = {
    "huge range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "writes forever": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "string times": "{{ 'a' * 10 ** 10 }}",
    "times string": "{{ 10 ** 10 * 'a' }}",
    "list times": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power chain": "{% set x = 2 ** 4000 %}{{ x * x * x }}",
    "doubling by +": TWICE + "{% set x = x + x %}" * 60,
    "doubling by ~": TWICE + "{% set x = x ~ x %}" * 60,
    "doubling in a block": TWICE + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubling by join": TWICE + "{% set x = [x, x] | join %}" * 60,
    "doubling by str.join": TWICE + "{% set x = ''.join([x, x]) %}" * 60,
    "doubling by replace": TWICE + "{% set x = x | replace('', x) %}" * 60,
    "doubling by str.replace": TWICE + "{% set x = x.replace('', x) %}" * 60,
    "doubling by format": TWICE + "{% set x = '{0}{0}'.format(x) %}" * 60,
    "doubling by %": TWICE + "{% set x = '%s%s' % (x, x) %}" * 60,
    "doubling lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x | tojson }}",
    "doubling tuples": "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 60 + "{{ x == 1 }}",
    "doubling dicts": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "wide %": "{{ '%999999999d' % 1 }}",
    "variable %": "{{ '%*d' % (999999999, 1) }}",
    "wide format": "{{ '{:999999999}'.format(1) }}",
    "nested format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "wide indent": "{{ 'a' | indent(10 ** 9, true) }}",
    "wide json": "{{ [1] | tojson(indent=10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "round": "{{ 5 | round(-10 ** 9) }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "many copies by map": "{% set x = 'a' * 10 ** 6 %}{{ ([x] * 10 ** 5) | map('upper') | list | length }}",
    "backward search": "{% set x = 'a' * 10 ** 6 %}{{ x.rfind('b' + 'a' * 500000) }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 900 + "]" * 900 + " }}",
    "long source": "x" * (1 << 19),
    "16 M characters": "{% for i in range(20) %}{{ 'x' * 10 ** 6 }}{% endfor %}",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_templates_end_soon(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.tokenizer.template_limits.MAX_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(ValueError, match="chat template"):
        render(HARMFUL[name])
    # The limit, and as much again for a busy machine; unlimited, each runs for ages or fills the memory.
    assert time.monotonic() - started < 5


def test_a_long_conversation_is_within_the_limits():
    chat = [{"role": "user", "content": "word " * 200}] * 3000
    assert len(render(CHATML, chat)) > 3000 * 999


@pytest.mark.parametrize("messages", ["hi", [1], {"role": "user"}, [["role", "user"]]])
def test_messages_of_the_wrong_type(messages: Any):
    with pytest.raises(TypeError):
        render(CHATML, messages)


def test_messages_without_what_they_need():
    with pytest.raises(ChatTemplateError, match="list is empty"):
        render(CHATML, [])
    with pytest.raises(ChatTemplateError, match=r'messages\[1\]: has no "role"'):
        render(CHATML, [*HI, {"content": "x"}])
    with pytest.raises(TypeError):
        render(CHATML, HI, tools="f")
