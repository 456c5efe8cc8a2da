"""The requests of a soak. Case `index` of a seed is the same in every run, whatever came before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxinfer.bench.soak.bad import BAD
from jaxinfer.bench.soak.forms import FORMS, SCHEMAS, TOOLS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_TEXT = "once upon a time the cat sat on its mat and said seven times that no other mat was half as warm"
_WORDS = _TEXT.split()
NUM_TOOL_TOKENS = 80
_NUM_PREFIXES, NUM_REPEATED = 4, 6
_ENDED, _CUT = frozenset({"stop", "length"}), frozenset({"stop", "length", "timeout"})

Behaviour = Literal["read", "slow", "stall", "abort", "leave", "crowd leaves", "burst", "half a body", "garbage"]


@dataclass(frozen=True)
class World:
    """What is known of the server: `paths` are those of its OpenAPI document, `capacity` the sequences that it takes.

    `vocab_size` bounds token ids; the lowest ids, which tend to be special, are not used. `without` are kinds of
    requests that its context has no room for.
    """

    model: str
    paths: frozenset[str]
    max_model_len: int
    vocab_size: int
    capacity: int | None
    seed: int = 0
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Expect:
    """What the answer must be.

    status: 200, or the error's, with its `param` and `code` where those are given.
    may_be_full: whether 429 with Retry-After may come in place of it.
    num_choices: of completions and chats. prompt_tokens: where it is known here.
    max_tokens: of each choice; `exact` where a choice ends at them and nowhere before.
    form: what a choice that ended by itself must match. calls: what must be called.
    echo: what each text begins with. logprobs: whether log-probabilities come. repeat: cases of one name have the same
    tokens.
    """

    status: int = 200
    param: str | None = None
    code: str | None = None
    may_be_full: bool = True
    num_choices: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    exact: bool = False
    reasons: frozenset[str] = _ENDED
    form: str | None = None
    calls: str | None = None
    echo: str | None = None
    logprobs: bool = False
    repeat: str | None = None


@dataclass(frozen=True)
class Case:
    """One request and what its client does. `raw` is sent in place of a body; `pace` is the behaviour's measure."""

    index: int
    kind: str
    path: str
    body: Mapping[str, Any]
    expect: Expect
    behaviour: Behaviour = "read"
    pace: float = 0.0
    method: str = "POST"
    raw: bytes | None = None
    headers: Mapping[str, str] | None = None

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    def described(self) -> dict[str, Any]:
        """For a report: all that it takes to send it again."""
        body = dict(self.body) if self.raw is None else self.raw[:400].decode("utf-8", "replace")
        told = {"index": self.index, "kind": self.kind, "behaviour": self.behaviour, "path": self.path, "body": body}
        return {**told, **({"headers": dict(self.headers)} if self.headers else {})}


def make_case(world: World, index: int, kinds: tuple[str, ...] | None = None) -> Case:
    """Case `index`, of one of `kinds`, or of all that the server has the endpoints for."""
    rng = random.Random(f"{world.seed} {index}")
    known = [name for name, kind in KINDS.items() if kind.path is None or kind.path in world.paths]
    names = [name for name in known if name not in world.without and (kinds is None or name in kinds)]
    (name,) = rng.choices(names, [KINDS[name].weight for name in names])
    case = KINDS[name].make(rng, world)
    return replace(case, index=index, kind=name)


def repeated_case(world: World, number: int) -> Case:
    """One of the few requests that are sent again and again and must get the same tokens each time."""
    rng = random.Random(f"{world.seed} repeated {number}")
    prompt = _ids(rng, world, rng.randint(1, min(120, world.max_model_len // 2)))
    num = rng.randint(1, min(24, world.max_model_len - len(prompt)))
    body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True, "return_token_ids": True, "n": 1 + number % 2}
    body |= {"temperature": 0} if number % 3 == 0 else {"seed": number, "top_p": 0.9}
    expect = Expect(num_choices=1 + number % 2, prompt_tokens=len(prompt), max_tokens=num, exact=True)
    return Case(0, "", COMPLETIONS, body, replace(expect, reasons=frozenset({"length"}), repeat=str(number)))


def _repeated(rng: random.Random, world: World) -> Case:
    case = repeated_case(world, rng.randrange(NUM_REPEATED))
    return replace(case, body={**case.body, **_streamed(rng)})


def _streamed(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    return {"stream": True, **({"stream_options": {"include_usage": True}} if rng.random() < 0.8 else {})}


def _length(rng: random.Random, most: int) -> int:
    """From 1 to `most`; short ones are as frequent as long ones are long."""
    return max(1, min(most, round(most ** rng.random())))


def _ids(rng: random.Random, world: World, num: int) -> list[int]:
    return [rng.randrange(3, world.vocab_size) for _ in range(num)]


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=num_words))


def _prefixed(rng: random.Random, world: World, num: int) -> list[int]:
    """A prompt that begins as others do."""
    prefix = _ids(random.Random(f"{world.seed} prefix {rng.randrange(_NUM_PREFIXES)}"), world, world.max_model_len)
    shared = rng.randrange(num + 1)
    return prefix[:shared] + _ids(rng, world, num - shared)


def _who(rng: random.Random) -> dict[str, Any]:
    """How the request is served."""
    found: dict[str, Any] = {}
    if rng.random() < 0.4:
        found["user"] = f"tenant-{rng.randrange(5)}"
    if rng.random() < 0.3:
        found["priority"] = rng.randint(-2, 2)
    if rng.random() < 0.3:
        found["cache_salt"] = f"salt-{rng.randrange(3)}"
    if rng.random() < 0.08:
        found["timeout_s"] = round(10 ** rng.uniform(-3, 1), 3)
    return found


def _sampling(rng: random.Random, world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": rng.choice([0, 0.5, 1.0, 1.5])}
    options: dict[str, Callable[[], Any]] = {
        "top_p": lambda: rng.choice([0.1, 0.9, 1.0]),
        "top_k": lambda: rng.choice([-1, 1, 20]),
        "min_p": lambda: rng.choice([0, 0.05, 0.5]),
        "typical_p": lambda: rng.choice([0.5, 1]),
        "seed": lambda: rng.randrange(2**40),
        "presence_penalty": lambda: rng.uniform(-2, 2),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "repetition_penalty": lambda: rng.uniform(0.8, 1.5),
        "logit_bias": lambda: {str(token): rng.uniform(-5, 5) for token in _ids(rng, world, 3)},
        "bad_words": lambda: rng.sample(_WORDS, 2),
        "stop_token_ids": lambda: _ids(rng, world, 2),
        "stop": lambda: rng.choice(["e", ["the", "mat"], [".", "\n"]]),
    }
    found |= {name: make() for name, make in options.items() if rng.random() < 0.12}
    return found


def _completion(rng: random.Random, world: World) -> Case:
    num_prompts = rng.choice([1, 1, 1, 1, 1, 2, 3])
    most = world.max_model_len - 1
    text = num_prompts == 1 and rng.random() < 0.3
    if text:
        prompt: Any = _text(rng, _length(rng, max(1, most // 8)))
        lengths, room = None, world.max_model_len // 4
    else:
        make = rng.choice([_ids, _prefixed])
        prompts = [make(rng, world, most if rng.random() < 0.03 else _length(rng, most)) for _ in range(num_prompts)]
        prompt = prompts[0] if num_prompts == 1 else prompts
        lengths = [len(each) for each in prompts]
        room = world.max_model_len - max(lengths)
    num = room if rng.random() < 0.03 else _length(rng, min(64, room))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num, **_sampling(rng, world), **_who(rng)}
    body |= _details(rng, num) | _streamed(rng)
    ends = "stop" in body or "stop_token_ids" in body or "timeout_s" in body
    expect = Expect(
        num_choices=num_prompts * body.get("n", 1),
        prompt_tokens=None if lengths is None else sum(lengths),
        max_tokens=num,
        exact=body.get("ignore_eos") is True and not ends,
        reasons=_CUT if "timeout_s" in body else _ENDED,
        echo=prompt if text and body.get("echo") else None,
        logprobs="logprobs" in body,
    )
    return Case(0, "", COMPLETIONS, body, expect)


def _details(rng: random.Random, num_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["n"] = rng.randint(2, 4)
        if rng.random() < 0.4:
            found["best_of"] = found["n"] + rng.randrange(3)
    if rng.random() < 0.5:
        found["ignore_eos"] = True
    if rng.random() < 0.3:
        found["return_token_ids"] = True
    if rng.random() < 0.15:
        found["min_tokens"] = rng.randint(0, num_tokens)
    if rng.random() < 0.2:
        found["echo"] = True
    if rng.random() < 0.25:
        found["logprobs"] = rng.randint(0, 20)
    elif rng.random() < 0.1:
        found["prompt_logprobs"] = rng.randint(0, 5)
    return found


def _messages(rng: random.Random, world: World) -> list[dict[str, str]]:
    num_words = _length(rng, max(1, world.max_model_len // 10))
    messages = [{"role": "user", "content": _text(rng, num_words)}]
    if rng.random() < 0.3:
        messages = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    return [{"role": "system", "content": "Be brief."}, *messages] if rng.random() < 0.3 else messages


def _chat(rng: random.Random, world: World) -> Case:
    num = _length(rng, min(64, world.max_model_len // 4))
    body = {"messages": _messages(rng, world), "max_tokens": num, **_sampling(rng, world), **_who(rng)}
    if rng.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": rng.randint(0, 20)}
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    body |= _streamed(rng)
    reasons = _CUT if "timeout_s" in body else _ENDED
    logprobs = body.get("logprobs") is True
    expect = Expect(num_choices=body.get("n", 1), max_tokens=num, reasons=reasons, logprobs=logprobs)
    return Case(0, "", CHAT, body, expect)


def _formed(rng: random.Random, world: World) -> Case:
    name = rng.choice(sorted(FORMS))
    body: dict[str, Any] = {"max_tokens": rng.choice([8, 40, 100]), "temperature": rng.choice([0, 1]), **_who(rng)}
    body |= {"n": 2} if rng.random() < 0.3 else {}
    body |= {"logprobs": True} if rng.random() < 0.2 else {}
    body |= FORMS[name].fields
    expect = Expect(
        num_choices=body.get("n", 1),
        max_tokens=body["max_tokens"],
        reasons=_CUT if "timeout_s" in body else _ENDED,
        form=name,
        logprobs="logprobs" in body,
    )
    if rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": _text(rng, 5)}]
        return Case(0, "", CHAT, body | _streamed(rng), expect)
    body |= {"prompt": _text(rng, 5), **({"logprobs": 1} if "logprobs" in body else {})}
    return Case(0, "", COMPLETIONS, body | _streamed(rng), expect)


def _new_form(rng: random.Random, world: World) -> Case:
    """A form that nobody has asked for before, so that the store of compiled ones is always short."""
    letters = "".join(rng.choices("abcdefgh", k=6))
    body = {"prompt": _text(rng, 3), "max_tokens": 12, "guided_regex": f"{letters}[0-9]{{1,3}}", **_streamed(rng)}
    return Case(0, "", COMPLETIONS, body, Expect(num_choices=1, max_tokens=12, form=f"regex:{body['guided_regex']}"))


def _tools(rng: random.Random, world: World) -> Case:
    choice = rng.choice(["auto", "none", "required", {"type": "function", "function": {"name": "add"}}])
    forced = choice == "required" or isinstance(choice, dict)
    body = {
        "messages": [{"role": "user", "content": _text(rng, 3)}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": NUM_TOOL_TOKENS if forced else 16,
        "temperature": rng.choice([0, 1]),
        **_streamed(rng),
    }
    if rng.random() < 0.3:
        body["parallel_tool_calls"] = False
    reasons = frozenset({"tool_calls", "length"}) if forced else _ENDED | {"tool_calls"}
    calls = ("add" if isinstance(choice, dict) else "any") if forced else None
    return Case(0, "", CHAT, body, Expect(num_choices=1, max_tokens=body["max_tokens"], reasons=reasons, calls=calls))


def _bad(rng: random.Random, world: World) -> Case:
    return rng.choice(BAD)(world)


def _behaving(behaviour: Behaviour, low: float | int, high: float | int) -> Callable[[random.Random, World], Case]:
    """Long answers whose client behaves so, after between `low` and `high` seconds or events."""

    def make(rng: random.Random, world: World) -> Case:
        prompt = _prefixed(rng, world, _length(rng, world.max_model_len // 2))
        num = max(1, world.max_model_len // 4)
        stream = behaviour in ("slow", "stall", "abort") or rng.random() < 0.3
        body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True, "n": rng.choice([1, 1, 2]), "stream": stream}
        if behaviour == "stall":
            body |= {"logprobs": 20, "n": 4}
        expect = Expect(
            num_choices=body["n"],
            prompt_tokens=len(prompt),
            max_tokens=num,
            exact=True,
            reasons=frozenset({"length"}),
            logprobs="logprobs" in body,
        )
        return Case(
            0, "", COMPLETIONS, body | _who(rng) | {"timeout_s": None}, expect, behaviour, rng.uniform(low, high)
        )

    return make


def _burst(rng: random.Random, world: World) -> Case:
    body = {"prompt": _ids(rng, world, 8), "max_tokens": 4, "ignore_eos": True}
    expect = Expect(num_choices=1, prompt_tokens=8, max_tokens=4, exact=True, reasons=frozenset({"length"}))
    return Case(0, "", COMPLETIONS, body, expect, "burst", pace=float(world.capacity or 64) * 1.5)


def _rude(behaviour: Behaviour) -> Callable[[random.Random, World], Case]:
    def make(rng: random.Random, world: World) -> Case:
        body = {"prompt": _text(rng, 30), "max_tokens": 4}
        return Case(0, "", COMPLETIONS, body, Expect(), behaviour, rng.random())

    return make


def _tokenize(rng: random.Random, world: World) -> Case:
    body = {"prompt": _text(rng, 40)} if rng.random() < 0.5 else {"messages": _messages(rng, world)}
    return Case(0, "", "/tokenize", body, Expect(may_be_full=False))


def _embeddings(rng: random.Random, world: World) -> Case:
    num = rng.randint(1, 3)
    inputs = [_ids(rng, world, _length(rng, world.max_model_len // 2)) for _ in range(num)]
    expect = Expect(num_choices=num, prompt_tokens=sum(map(len, inputs)))
    return Case(0, "", "/v1/embeddings", {"model": world.model, "input": inputs}, expect)


def _score(rng: random.Random, world: World) -> Case:
    """Log-likelihoods of continuations, or cosine similarities."""
    if rng.random() < 0.5:
        texts = [_text(rng, _length(rng, 8)) for _ in range(rng.randint(1, 4))]
        body = {"prompt": _text(rng, _length(rng, max(1, world.max_model_len // 16))), "continuations": texts}
        return Case(0, "", "/v1/score", body, Expect(num_choices=len(texts)))
    texts = [_text(rng, _length(rng, max(1, world.max_model_len // 10))) for _ in range(rng.randint(1, 4))]
    return Case(0, "", "/v1/score", {"text_1": _text(rng, 4), "text_2": texts}, Expect(num_choices=len(texts)))


def _responses(rng: random.Random, world: World) -> Case:
    body: dict[str, Any] = {"model": world.model, "input": _text(rng, 8), "max_output_tokens": 16}
    if rng.random() < 0.3:
        schema = {"type": "json_schema", "name": "answer", "schema": SCHEMAS["person"]}
        body |= {"text": {"format": schema}, "max_output_tokens": 100}
    body |= {"stream": True} if rng.random() < 0.5 else {}
    return Case(0, "", "/v1/responses", body, Expect(max_tokens=body["max_output_tokens"]))


def _anthropic(rng: random.Random, world: World) -> Case:
    body = {"model": world.model, "max_tokens": 16, "messages": [{"role": "user", "content": _text(rng, 8)}]}
    body |= {"stream": True} if rng.random() < 0.5 else {}
    return Case(0, "", "/v1/messages", body, Expect(max_tokens=16))


@dataclass(frozen=True)
class Kind:
    """A kind of request: how often it comes, how one is made, and the endpoint without which there are none."""

    weight: int
    make: Callable[[random.Random, World], Case]
    path: str | None = None


KINDS = {
    "completion": Kind(24, _completion),
    "chat": Kind(14, _chat, CHAT),
    "form": Kind(10, _formed, CHAT),
    "new form": Kind(2, _new_form),
    "tools": Kind(5, _tools, CHAT),
    "repeat": Kind(6, _repeated),
    "bad": Kind(16, _bad, CHAT),
    "abort": Kind(6, _behaving("abort", 0, 12)),
    "leave": Kind(6, _behaving("leave", 0, 0.5)),
    "crowd leaves": Kind(2, _behaving("crowd leaves", 0, 0.5)),
    "slow": Kind(2, _behaving("slow", 0.005, 0.02)),
    "stall": Kind(1, _behaving("stall", 1, 4)),
    "half a body": Kind(3, _rude("half a body")),
    "garbage": Kind(2, _rude("garbage")),
    "burst": Kind(1, _burst),
    "tokenize": Kind(2, _tokenize, "/tokenize"),
    "embeddings": Kind(3, _embeddings, "/v1/embeddings"),
    "score": Kind(2, _score, "/v1/score"),
    "responses": Kind(4, _responses, "/v1/responses"),
    "messages": Kind(4, _anthropic, "/v1/messages"),
}
