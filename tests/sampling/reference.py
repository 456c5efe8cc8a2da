"""Sampling in float64 NumPy, one row at a time, written from the definitions with explicit sorts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Options:
    """One request's options, and what its sequence has seen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def adjusted_logits(logits: np.ndarray, options: Options) -> np.ndarray:
    """Logits after bias, mask and penalties."""
    x = logits.astype(np.float64).copy()
    for token, value in options.bias.items():
        x[token] += value
    if options.allowed is not None:
        masked = np.full_like(x, -np.inf)
        masked[options.allowed] = x[options.allowed]
        x = masked
    for token in set(options.prompt) | set(options.output):
        x[token] = x[token] / options.repetition_penalty if x[token] > 0 else x[token] * options.repetition_penalty
    for token in set(options.output):
        x[token] -= options.frequency_penalty * options.output.count(token) + options.presence_penalty
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits: np.ndarray, options: Options) -> np.ndarray:
    """Probability of each token, float64 [V], after all options; zero for tokens that are not kept."""
    x = adjusted_logits(logits, options)
    if options.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    p = softmax(x / options.temperature)
    order = np.argsort(-x, kind="stable")  # by falling logit, then by rising id
    if options.min_p > 0:
        p = _keep(p, order[p[order] >= options.min_p * p.max()])
    if options.top_k > 0:
        p = _keep(p, order[p[order] > 0][: options.top_k])
    if options.top_p < 1:
        p = _keep(p, _shortest_prefix(p, order[p[order] > 0], options.top_p))
    if options.typical_p < 1:
        kept = np.flatnonzero(p > 0)
        entropy = -np.sum(p[kept] * np.log(p[kept]))
        by_distance = kept[np.argsort(np.abs(-np.log(p[kept]) - entropy), kind="stable")]
        p = _keep(p, _shortest_prefix(p, by_distance, options.typical_p))
    return p


def token_at(p: np.ndarray, u: float) -> int:
    """The first token, in order of ids, whose cumulative probability exceeds u."""
    return int(np.searchsorted(np.cumsum(p), u, side="right"))


def boundary_distance(p: np.ndarray, u: float) -> float:
    """How far u is from the nearest step of the cumulative distribution: below rounding, either token is right."""
    return float(np.abs(np.cumsum(p) - u).min())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    peak = x.max(axis=-1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(axis=-1, keepdims=True))


def _shortest_prefix(p: np.ndarray, order: np.ndarray, mass: float) -> np.ndarray:
    reached = np.cumsum(p[order]) >= mass
    return order[: int(np.argmax(reached)) + 1] if reached.any() else order


def _keep(p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(p)
    kept[tokens] = p[tokens]
    return kept / kept.sum()
