"""Sets of prompts: endless, and the same for the same seed. A session is one conversation, of one turn or more."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

PROMPT_SETS = ("random", "shared-prefix", "multi-turn")
ENDPOINTS = ("completions", "chat")

# Short and common, so that a tokenizer mostly has one token for each with the space before it.
_TEXT = """
able about above across act add after again age ago air all along also always and animal answer any area arm art ask
back ball base be bear bed been before began begin behind best better between big bird black blue boat body book both
box boy bring brought build bus but buy by call came can car care carry cat catch cause center certain change check
child city class clear close cold color come common complete cost could country course cover cross cry cut dark day
deep did differ direct do dog door down draw drive dry during each early earth east eat else end enough even ever every
example eye face fact fall family far farm fast father feel feet few field figure fill final find fine fire first fish
five floor fly follow food foot force form found four free friend from front full game gave get girl give glass go gold
gone good got great green ground group grow had half hand happen hard has have he head hear heart heat help her here
high him his hold home hope horse hot hour house how hundred idea if in inch island it job just keep kind king knew know
land language large last late laugh law lay lead learn leave left less let letter life light like line list listen
little live long look lot love low machine made main make man many map mark may mean measure men might mile mind minute
miss money month moon more morning most mother mountain move much music must name near need never new next night no
north note nothing now number object ocean of off often oh old on once one only open or order other our out over own
page paper part pass past path pattern people perhaps person picture piece place plain plan plane plant play point poor
port pose power press problem product pull put question quick rain ran reach read ready real red rest right river road
rock room round rule run said sail same saw say school science sea second see seem self sell send sentence serve set
seven several shape ship short should show side simple since sing sit six size sleep slow small snow so some song soon
sound south space special spell spend stand star start state stay step still stood stop story street strong study such
sun sure surface system table take talk teach tell ten test than that the their them then there these they thing think
third this those though thought thousand three through time to together told too took top town travel tree true try turn
two under unit until up upon us use usual very voice vowel wait walk want war warm was watch water way we week weight
well went were west what wheel when where which while white who whole why wide will wind winter wish with woman wonder
wood word work world would write year yes yet you young your
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Turn:
    """One request: `content` is a text, token ids or a list of chat messages; `fields` go into the body as they are."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


Session = tuple[Turn, ...]


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens; a word is about one. Each is drawn evenly from `length·(1 ± range_ratio)`, 1 at least.

    With a `vocab_size` prompts are token ids below it, and their lengths exact.

    Raises:
        ValueError: a value out of its range.
    """

    input_len: int = 128
    output_len: int = 64
    range_ratio: float | int = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio={self.range_ratio}: must be from 0 up to, not including, 1")

    def draw_input(self, rng: random.Random) -> int:
        return self._draw(rng, self.input_len)

    def draw_output(self, rng: random.Random) -> int:
        return self._draw(rng, self.output_len)

    def _draw(self, rng: random.Random, length: int) -> int:
        return max(1, rng.randint(round(length * (1 - self.range_ratio)), round(length * (1 + self.range_ratio))))

    def text(self, rng: random.Random, length: int) -> str | list[int]:
        """Words, or token ids where there is a `vocab_size`."""
        if self.vocab_size is not None:
            return [rng.randrange(self.vocab_size) for _ in range(length)]
        return " ".join(rng.choices(_WORDS, k=length))


def random_sessions(lengths: Lengths, seed: int = 0) -> Iterator[Session]:
    """Prompts that share nothing."""
    rng = random.Random(f"random {seed}")
    while True:
        prompt = lengths.text(rng, lengths.draw_input(rng))
        yield (Turn(prompt, lengths.draw_output(rng)),)


def shared_prefix_sessions(
    lengths: Lengths, prefix_len: int, num_prefixes: int = 1, seed: int = 0
) -> Iterator[Session]:
    """Prompts that begin with one of `num_prefixes` texts of `prefix_len` tokens, in turn, and go on with their own."""
    if prefix_len < 1 or num_prefixes < 1:
        raise ValueError(f"prefix_len={prefix_len} and num_prefixes={num_prefixes} must be 1 or more")
    rng = random.Random(f"shared-prefix {seed}")
    prefixes = [lengths.text(rng, prefix_len) for _ in range(num_prefixes)]
    for prefix in itertools.cycle(prefixes):
        own = lengths.text(rng, lengths.draw_input(rng))
        prompt = f"{prefix} {own}" if isinstance(prefix, str) else [*prefix, *own]
        yield (Turn(prompt, lengths.draw_output(rng)),)


def multi_turn_sessions(lengths: Lengths, num_turns: int, seed: int = 0) -> Iterator[Session]:
    """Conversations of `num_turns` questions; each request repeats what was said before, the answers included.

    Raises:
        ValueError: fewer than one turn, or token ids, to which no answer's text can be appended.
    """
    if num_turns < 1:
        raise ValueError(f"turns={num_turns}: must be 1 or more")
    if lengths.vocab_size is not None:
        raise ValueError("a conversation continues with the answer's text, so its prompts cannot be token ids")
    rng = random.Random(f"multi-turn {seed}")
    while True:
        yield tuple(
            Turn(lengths.text(rng, lengths.draw_input(rng)), lengths.draw_output(rng)) for _ in range(num_turns)
        )


def compose(endpoint: str, turn: Turn, before: list[tuple[Turn, str]]) -> dict[str, Any]:
    """The part of a request's body that holds the prompt, after the turns and answers `before` it.

    Raises:
        ValueError: content of another kind than the endpoint takes.
    """
    if endpoint == "chat":
        messages: list[Any] = []
        for past, answer in before:
            messages += [*_messages(past), {"role": "assistant", "content": answer}]
        return {"messages": [*messages, *_messages(turn)]}
    if not before:
        if isinstance(turn.content, list) and turn.content and isinstance(turn.content[0], dict):
            raise ValueError("messages need --endpoint chat")
        return {"prompt": turn.content}
    return {"prompt": "".join(f"{past.content}\n{answer}\n" for past, answer in before) + f"{turn.content}"}


def _messages(turn: Turn) -> list[Any]:
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    if not turn.content or isinstance(turn.content[0], int):
        raise ValueError("token ids need --endpoint completions")
    return turn.content
