"""From an input record to what the engine is asked: the prompt's tokens, sampling parameters, and fields to copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.batch.config import JobConfig
from jaxinfer.batch.fields import from_json, plain, sampling_params, single, text_of
from jaxinfer.batch.lines import CHAT, is_line, read_line, sampling_fields
from jaxinfer.batch.records import InputRecord
from jaxinfer.request import SamplingParams, plain_ids
from jaxinfer.structured.forms import FORM_FIELDS, form_of
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.messages import template_messages

_SAMPLING = frozenset(each.name for each in fields(SamplingParams))


class RecordError(ValueError):
    """A record that cannot be run: what is wrong with it, and the remedy, without its place."""


class LongPromptError(RecordError):
    """A prompt that leaves no room for a token."""


@dataclass(frozen=True)
class Ask:
    """One record as the engine takes it; `features` are the fields to copy to the result."""

    prompt_ids: list[int]
    params: SamplingParams
    features: dict[str, Any]


class Requests:
    """Makes requests of the records of a job. May be used by several threads.

    Args:
        tokenizer: its chat template reads `messages`.
        default_fields: fields of `SamplingParams` that the model recommends; the job's go before them.
        max_model_len: tokens of prompt and output together.
        vocab_size: of the model; token ids are below it.
        reserved: names that the results have themselves.

    Raises:
        ValueError: the job's sampling fields do not go with the model's, or a field to copy has a reserved name.
    """

    def __init__(
        self,
        config: JobConfig,
        tokenizer: Tokenizer,
        default_fields: Mapping[str, Any],
        max_model_len: int,
        vocab_size: int,
        reserved: frozenset[str],
    ):
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._reserved = reserved
        own = {name: plain(name, value) for name, value in config.sampling.items()}
        self._base = {**default_fields, **own}
        # Of records without fields of their own: checked once.
        self.params = sampling_params({**default_fields, **config.sampling})
        if clash := sorted(reserved.intersection(config.pass_through or ())):
            raise ValueError(_reserved_words(clash[0]))
        self._unseen = set(config.pass_through or ())
        # Two of these names may be the same: `--prompt-feature messages` is a conversation.
        self._sources = tuple(dict.fromkeys((config.prompt_feature, "prompt_token_ids", "messages")))
        self._own_names = _SAMPLING.union(FORM_FIELDS, self._sources)

    def make(self, file: str, record: InputRecord) -> Ask:
        """What a record of `file` asks.

        Raises:
            RecordError: it cannot be run, with the field at fault; `LongPromptError`, a kind of it, for a prompt that
                leaves no room.
        """
        given = record.fields
        try:
            if is_line(given):
                ids, own = self._of_line(given)
            else:
                ids, own = self._prompt(given), self._sampling(given)
            params = SamplingParams(**{**self._base, **own}) if own else copy(self.params)
            if own.get("seed") is None:
                object.__setattr__(params, "seed", derived_seed(self._config.seed, file, record.index))
            if params.return_hidden_states or params.return_logits:
                raise ValueError("return_hidden_states, return_logits: results hold no arrays; leave them out")
            return Ask(self._fitted(ids, params), params, self._features(given))
        except RecordError:
            raise
        except ValueError as error:
            raise RecordError(str(error)) from None

    @property
    def unseen_names(self) -> list[str]:
        """Fields to copy that no record had so far."""
        return sorted(self._unseen)

    def features(self, record: InputRecord) -> dict[str, Any]:
        """The fields to copy of a record that cannot be run, as far as results can have them."""
        return {name: value for name, value in self._copied(record.fields).items() if name not in self._reserved}

    def _prompt(self, given: Mapping[str, Any]) -> list[int]:
        """The tokens of a record's prompt, from the one field that has it."""
        found = [name for name in self._sources if given.get(name) is not None and given[name] != []]
        if not found:
            if empty := [name for name in self._sources if name in given]:
                raise RecordError(f"its {empty[0]} is null or empty; give it a prompt")
            names = ", ".join(sorted(given))[:200] or "none"
            raise RecordError(
                f"it has no prompt: {', '.join(self._sources)} are missing; its fields are {names}; "
                "--prompt-feature names the one that holds the text"
            )
        if len(found) > 1:
            raise RecordError(f"it has several prompts: {' and '.join(found)}; leave it one")
        (name,) = found
        if name == "prompt_token_ids":
            return self._ids(name, given[name])
        if name == "messages":
            return self._conversation(_messages_of(given[name]), {})
        return self._text(name, single(name, text_of(name, given[name])))

    def _text(self, name: str, text: Any, special: bool = True) -> list[int]:
        if not isinstance(text, str):
            raise RecordError(f"{name}={text!r:.60} must be text; token ids go into prompt_token_ids")
        try:
            return _filled(name, self._tokenizer.encode(text, special))
        except ValueError as error:
            raise RecordError(f"{name}: {str(error).removeprefix('encode: ')}") from None

    def _ids(self, name: str, value: Any) -> list[int]:
        return _filled(name, plain_ids(name, value, self._vocab_size))

    def _conversation(self, messages: Any, options: Mapping[str, Any]) -> list[int]:
        """The tokens of messages; `options` go to the template."""
        chat = template_messages(messages)
        if any("tool_calls" in message or message["role"] == "tool" for message in chat):
            raise RecordError("messages: a job's conversations are without calls of tools; leave them out")
        template = self._config.chat_template
        ids = self._tokenizer.apply_chat_template(chat, chat_template=template, **options)
        return _filled("messages", ids)

    def _sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A record's own sampling fields; null is absent."""
        names = _SAMPLING.union(FORM_FIELDS)
        return _with_form({name: value for name, value in given.items() if name in names and value is not None})

    def _of_line(self, given: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """The tokens and sampling fields of a line in the OpenAI batch format."""
        url, body = read_line(given, self._config.model_names)
        forms = {name: body[name] for name in FORM_FIELDS if name in body}
        own = sampling_fields(url, body, self._config.sampling)
        if url == CHAT:
            ids = self._conversation(body.get("messages"), _template_options(body))
        else:
            ids = self._completion_prompt(body)
        return ids, _with_form({**own, **forms})

    def _completion_prompt(self, body: Mapping[str, Any]) -> list[int]:
        prompt, special = body.get("prompt"), body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise RecordError(f"body.add_special_tokens={special!r:.60} must be true or false")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise RecordError(f"body.prompt has {len(prompt)} prompts; give each a line of its own")
            prompt = prompt[0]
        if isinstance(prompt, list):
            return self._ids("body.prompt", prompt)
        return self._text("body.prompt", prompt, special)

    def _fitted(self, ids: list[int], params: SamplingParams) -> list[int]:
        """The prompt, cut where it leaves no room and the job says so."""
        most = self._max_model_len - (params.max_tokens != 0)
        if len(ids) <= most:
            return ids
        policy = self._config.on_long_prompt
        if policy not in ("truncate-left", "truncate-right"):
            raise LongPromptError(
                f"the prompt has {len(ids)} tokens, and with max_model_len={self._max_model_len} it may have {most}; "
                "shorten it, raise --max-model-len, or see --on-long-prompt"
            )
        room = 1 if params.max_tokens is None else params.max_tokens
        kept = max(1, self._max_model_len - room)
        return ids[-kept:] if policy == "truncate-left" else ids[:kept]

    def _features(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = self._copied(given)
        if clash := next((name for name in found if name in self._reserved), None):
            raise RecordError(_reserved_words(clash))
        return found

    def _copied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields to copy: those that the job names, or those that mean nothing else."""
        named = self._config.pass_through
        if self._unseen:
            self._unseen = {name for name in self._unseen if name not in given}
        if is_line(given):
            names = ["custom_id", *(name for name in named or () if name != "custom_id")]
        else:
            names = [name for name in given if name not in self._own_names] if named is None else named
        return {name: given[name] for name in names if name in given}


def derived_seed(job_seed: int, file: str, index: int) -> int:
    """The seed of a record that has none: 64 bits of a hash over the job's, the file's name without its folder, and
    the record's place in the file."""
    name = file.rstrip("/").rpartition("/")[2]
    content = f"{job_seed}\0{name}\0{index}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def _with_form(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields as `SamplingParams` takes them, with one form of all that `FORM_FIELDS` ask for. A None is meant,
    an empty list of a field that takes one value is none."""
    own: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    for name, value in asked.items():
        if name in FORM_FIELDS:
            if (read := _form_value(name, value)) is not None:
                forms[name] = read
        elif (read := plain(name, value)) is not None or value is None:
            own[name] = read
    return {**own, "structured_outputs": form_of(forms)} if forms else own


def _form_value(name: str, value: Any) -> Any:
    """What a field of a form holds; objects may be JSON text."""
    value = text_of(name, value)
    if name == "guided_choice":
        return value
    value = single(name, value)
    return value if name in ("guided_regex", "guided_grammar", "guided_json") else from_json(name, value)


def _messages_of(value: Any) -> Any:
    """The messages themselves, or of their JSON text."""
    value = text_of("messages", value)
    if isinstance(value, list) and any(isinstance(each, str) for each in value):
        value = single("messages", value)
    return from_json("messages", value)


def _template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat completion tells the template."""
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise RecordError(f"body.chat_template_kwargs={variables!r:.60} must be an object")
    own = {"self", "tokenize", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    if clash := sorted(own.intersection(variables)):
        raise RecordError(f"body.chat_template_kwargs: {clash[0]} cannot be set there")
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(body.get(name, False), bool):
            raise RecordError(f"body.{name}={body[name]!r:.60} must be true or false")
    continues = body.get("continue_final_message", False)
    generates = body.get("add_generation_prompt", not continues)
    return {**variables, "continue_final_message": continues, "add_generation_prompt": generates}


def _filled(name: str, ids: list[int]) -> list[int]:
    if not ids:
        raise RecordError(f"{name} is empty; give at least one token")
    return ids


def _reserved_words(name: str) -> str:
    return f"{name!r} is a field of the results too: rename it, or have --pass-through name the fields to copy"
