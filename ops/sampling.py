"""From logits to the next token, in numpy: the lane that has the logits draws from them.

The order and the arithmetic (float32) are those of transformers' logits processors: repetition
penalty over prompt and output, temperature, top_k, top_p, min_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    The defaults take the likeliest token each time. A `seed` makes draws repeat, whatever else the
    engine is doing. Raises ValueError naming the parameter, the rule and the value.
    """

    temperature: float = 0.0  # 0: always the likeliest token; the next three then do nothing
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # drop tokens below this fraction of the likeliest one's probability
    repeat_penalty: float = 1.0  # above 1: tokens of the prompt and the output become less likely
    seed: int | None = None  # None: a different one each time
    stop: tuple[str, ...] = ()  # texts that end the output, left out of it; also a str or a list
    max_tokens: int | None = 256  # None: until the context is full
    ignore_eos: bool = False  # go on after the model's end-of-sequence token

    def __post_init__(self) -> None:
        temperature = _number("temperature", self.temperature)
        if temperature < 0:
            raise ValueError(f"temperature must not be negative; got {temperature}")
        if _integer("top_k", self.top_k) < 0:
            raise ValueError(f"top_k must not be negative; got {self.top_k}")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise ValueError(f"min_p must be between 0 and 1; got {self.min_p}")
        if _number("repeat_penalty", self.repeat_penalty) <= 0:
            raise ValueError(f"repeat_penalty must be positive; got {self.repeat_penalty}")
        if self.seed is not None and _integer("seed", self.seed) < 0:
            raise ValueError(f"seed must not be negative; got {self.seed}")
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise ValueError(f"max_tokens must be positive; got {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false; got {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _stop_texts(self.stop))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value!r}")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer; got {value!r}")
    return int(value)


def _stop_texts(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"stop must be a text or a list of texts; got {stop!r}")
    if "" in stop:
        raise ValueError(f"stop must not hold an empty text; got {list(stop)}")
    return tuple(stop)


class Sampler:
    """Chooses the tokens of one sequence, and remembers them where a penalty asks for it."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._penalized = set(prompt_ids) if params.repeat_penalty != 1.0 else None

    def sample(self, logits: np.ndarray) -> int:
        """The next token for `logits`, float32 [vocab], which are left as they are.

        Ties of the likeliest token go to the lowest id. Raises FloatingPointError where the logits
        hold a NaN or their largest value is infinite.
        """
        if self._params.is_greedy:
            token_id = self._likeliest(self._penalize(logits))
        else:
            token_ids, probabilities = self.distribution(logits)
            cumulative = np.cumsum(probabilities, dtype=np.float64)
            drawn = self._random.random() * cumulative[-1]
            place = int(np.searchsorted(cumulative, drawn, side="right"))
            # A draw may round up to the sum itself, past the last token.
            token_id = int(token_ids[min(place, len(token_ids) - 1)])
        if self._penalized is not None:
            self._penalized.add(token_id)
        return token_id

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [n], ascending, that may be drawn now, and their probabilities, float32 [n].

        For a greedy sampler that is one token. Drawing nothing, it changes nothing.
        """
        params = self._params
        scores = self._penalize(logits)
        likeliest = self._likeliest(scores)
        if params.is_greedy:
            return np.array([likeliest]), np.ones(1, dtype=np.float32)
        token_ids = np.arange(len(scores))
        if params.temperature != 1.0:
            scores = scores / np.float32(params.temperature)
            self._likeliest(scores)  # a tiny temperature may overflow
        for is_kept in (_is_in_top_k, _is_in_top_p, _is_above_min_p):
            kept = is_kept(params, scores)
            if kept is not None:
                token_ids, scores = token_ids[kept], scores[kept]
        return token_ids, _softmax(scores)

    def _penalize(self, logits: np.ndarray) -> np.ndarray:
        if not self._penalized:
            return logits
        penalty = np.float32(self._params.repeat_penalty)
        # A vocabulary may be larger than the head's output; what cannot be drawn needs no penalty.
        ids = [token_id for token_id in self._penalized if token_id < len(logits)]
        scores = logits.copy()
        chosen = scores[ids]
        scores[ids] = np.where(chosen < 0, chosen * penalty, chosen / penalty)
        return scores

    @staticmethod
    def _likeliest(scores: np.ndarray) -> int:
        token_id = int(scores.argmax())  # of equal ones the first; a NaN counts as the largest
        if not math.isfinite(scores[token_id]):
            raise FloatingPointError(
                f"logits must be finite; got {scores[token_id]} for token {token_id}"
            )
        return token_id


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def _is_in_top_k(params: SamplingParams, scores: np.ndarray) -> np.ndarray | None:
    """Tokens as likely as the k-th are all kept."""
    if params.top_k == 0 or params.top_k >= len(scores):
        return None
    threshold = np.partition(scores, -params.top_k)[-params.top_k]
    return scores >= threshold


def _is_in_top_p(params: SamplingParams, scores: np.ndarray) -> np.ndarray | None:
    if params.top_p == 1.0:
        return None
    probabilities = _softmax(scores)
    most_dropped = np.float32(1 - params.top_p)
    # Tokens this unlikely cannot reach the limit together; they need no place in the order.
    is_unlikely = probabilities < most_dropped / len(scores)
    candidates = np.flatnonzero(~is_unlikely)
    order = candidates[np.argsort(probabilities[candidates], kind="stable")]
    cumulative = np.cumsum(probabilities[order], dtype=np.float64)
    cumulative += probabilities.sum(where=is_unlikely, dtype=np.float64)
    is_dropped = cumulative.astype(np.float32) <= most_dropped
    is_dropped[-1] = False
    kept = np.zeros(len(scores), dtype=bool)
    kept[order] = ~is_dropped
    return kept


def _is_above_min_p(params: SamplingParams, scores: np.ndarray) -> np.ndarray | None:
    if params.min_p == 0.0:
        return None
    probabilities = _softmax(scores)
    return probabilities >= np.float32(params.min_p) * probabilities.max()
