"""`/v1/score`: how likely continuations are after a prompt, or how alike two texts are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxinfer.request import plain_ids
from jaxinfer.scoring import SCORE_PARAMS, ContinuationScore, join, score_of
from jaxinfer.serve import crowd, pooling, prompts
from jaxinfer.serve.embedding_schemas import ScoreRequest
from jaxinfer.serve.embeddings import MAX_INPUTS
from jaxinfer.serve.errors import ApiError
from jaxinfer.serve.server import Call, Prompt, Server
from jaxinfer.serve.sse import answer, unless_gone

router = APIRouter()

_FORMS = (("prompt", "continuations"), ("text_1", "text_2"))


@router.post("/v1/score")
@router.post("/score", include_in_schema=False)
async def create_score(request: Request, body: ScoreRequest) -> Response:
    """`prompt` and `continuations`: log-likelihoods, as `LLM.score`. `text_1` and `text_2`: cosine similarities."""
    server: Server = request.app.state.server
    server.check_model(body.model)
    likelihood = _is_likelihood(body)
    call = Call.make(request, "score", body.user, body.priority, body.cache_salt, body.timeout_s)
    work = _likelihoods(server, call, body) if likelihood else _similarities(server, call, body)
    data, num_tokens = await unless_gone(request, work)
    told = {
        "id": call.id,
        "object": "list",
        "created": call.created_s,
        "model": server.model_name,
        "data": [{"index": index, "object": "score", **each} for index, each in enumerate(data)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return answer(told)


def _is_likelihood(body: ScoreRequest) -> bool:
    """Which of the two forms a body has. Raises `ApiError` for half of one, both, or fields of the other."""
    given = [tuple(name for name in form if getattr(body, name) is not None) for form in _FORMS]
    if all(given) or not any(given):
        raise ApiError(400, "prompt with continuations, or text_1 with text_2: give one of the two", param="prompt")
    for form, names in zip(_FORMS, given, strict=True):
        if len(names) == 1:
            (missing,) = set(form) - set(names)
            raise ApiError(400, f"{missing} is missing: it goes with {names[0]}", param=missing)
    likelihood = bool(given[0])
    if likelihood:
        for name in ("pooling", "truncate_prompt_tokens", "add_special_tokens"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} belongs to text_1 and text_2", param=name)
    return likelihood


async def _similarities(server: Server, call: Call, body: ScoreRequest) -> tuple[list[dict[str, Any]], int]:
    sides = []
    for name in _FORMS[1]:
        found = await prompts.each(
            server, getattr(body, name), name, body.add_special_tokens, body.truncate_prompt_tokens
        )
        sides.append([ids for _, ids in found])
    left, right = sides
    if len(left) not in (1, len(right)):
        raise ApiError(
            400, f"text_1 has {len(left)} entries and text_2 {len(right)}: give one, or as many", param="text_1"
        )
    _check_count(len(left) + len(right), "text_2")
    found = await pooling.vectors(server, call, [*left, *right], body.pooling or server.config.pooling)
    ones, others = found[: len(left)], found[len(left) :]
    if len(ones) == 1:
        ones = ones * len(others)
    scores = [{"score": float(one @ other)} for one, other in zip(ones, others, strict=True)]
    return scores, sum(map(len, left)) + sum(map(len, right))


async def _likelihoods(server: Server, call: Call, body: ScoreRequest) -> tuple[list[dict[str, Any]], int]:
    single, groups = _groups(server, body)
    _check_count(sum(len(group) for _, group in groups), "continuations")
    asked: list[tuple[int, list[int], int]] = []  # index of the prompt, tokens, the first that is scored
    for index, (prompt, group) in enumerate(groups):
        for number, continuation in enumerate(group):
            place = f"continuations[{number}]" if single else f"continuations[{index}][{number}]"
            asked.append((index, *await _joined(server, prompt, continuation, place)))
    given = [Prompt(ids, SCORE_PARAMS) for _, ids, _ in asked]
    found: list[ContinuationScore | None] = [None] * len(asked)
    async for place, output in crowd.outputs(server, call, given):
        _, ids, first = asked[place]
        found[place] = score_of(output.prompt_logprobs or [], ids, first)
    told = [
        {
            "prompt_index": index,
            "score": each.logprob,
            "is_greedy": each.is_greedy,
            "token_ids": each.token_ids,
            "token_logprobs": each.token_logprobs,
        }
        for (index, _, _), each in zip(asked, found, strict=True)
        if each is not None
    ]
    return told, sum(len(ids) for _, ids, _ in asked)


async def _joined(
    server: Server, prompt: str | list[int], continuation: str | list[int], place: str
) -> tuple[list[int], int]:
    firsts: list[int] = []

    def encode() -> list[int]:
        ids, first = join(server.tokenizer, prompt, continuation)
        firsts.append(first)
        return ids

    try:
        ids = await server.llm.encode(encode)
    except ValueError as error:
        param = "prompt" if str(error).startswith("prompt") else "continuations"
        raise ApiError(400, f"{place}: {error}", param=param) from None
    if len(ids) > server.max_model_len:
        raise ApiError(
            400,
            f"{place} and its prompt have {len(ids)} tokens and this model's context is {server.max_model_len}; "
            "shorten them",
            param="continuations",
            code="context_length_exceeded",
        )
    return ids, firsts[0]


Content = str | list[int]


def _groups(server: Server, body: ScoreRequest) -> tuple[bool, list[tuple[Content, list[Content]]]]:
    """Whether there is one prompt, and each prompt with its continuations; token ids are checked."""
    given: Any = body.prompt
    single = _is_content(given)
    asked = [given] if single else given
    entries: Any = [body.continuations] if single else body.continuations
    if not asked or isinstance(entries, str) or len(asked) != len(entries):
        many = "a text" if isinstance(entries, str) else f"{len(entries)} entries"
        raise ApiError(
            400, f"continuations is {many} and prompt has {len(asked)}: give one for each", param="continuations"
        )
    groups = []
    for index, (prompt, entry) in enumerate(zip(asked, entries, strict=True)):
        name = "" if single else f"[{index}]"
        group = [entry] if _is_content(entry) else list(entry)
        if not group:
            raise ApiError(400, f"continuations{name} is empty; give at least one", param="continuations")
        groups.append(
            (
                _content(server, prompt, f"prompt{name}"),
                [_content(server, each, f"continuations{name}[{i}]") for i, each in enumerate(group)],
            )
        )
    return single, groups


def _is_content(given: Any) -> bool:
    """Whether this is one text, or the token ids of one."""
    return isinstance(given, str) or (bool(given) and isinstance(given[0], int))


def _content(server: Server, given: Any, name: str) -> Content:
    return given if isinstance(given, str) else plain_ids(name, given, server.llm.vocab_size)


def _check_count(count: int, param: str) -> None:
    if count > MAX_INPUTS:
        raise ApiError(400, f"{count} texts are to be read and {MAX_INPUTS} are the most; split them", param=param)
