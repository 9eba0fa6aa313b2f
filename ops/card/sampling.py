"""Choosing the next token where the logits are: one number crosses to the host, not a vocabulary.

The order and the arithmetic are those of `ops/sampling.py`, and so are the draws of a seed, as
long as rounding does not move the border between two tokens over the number that was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shadowlane.ops.sampling import SamplingParams


class CardSampler:
    """Chooses the tokens of one sequence, and remembers them where a penalty asks for it."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))
        self._penalized: torch.Tensor | None = None
        if params.repeat_penalty != 1.0:
            # A vocabulary may be larger than the head's output; what cannot be drawn needs none.
            seen = np.zeros(vocab_size, np.bool_)
            seen[[token for token in prompt_ids if token < vocab_size]] = True
            self._penalized = torch.from_numpy(seen).to(device)

    def sample(self, logits: torch.Tensor) -> int:
        """The next token for `logits`, float32 [vocab] on the device, left as they are.

        Waits for the device. Raises FloatingPointError where the logits hold a NaN or their largest
        value is infinite.
        """
        scores = self._penalize(logits)
        largest, token = scores.max(dim=0)
        if not self._params.is_greedy:
            if self._params.temperature != 1.0:
                scores = scores / self._params.temperature
                largest = scores.max()  # a tiny temperature may overflow
            token = draw(keep_likely(scores, self._params), self._random.random())
        # in float64, which holds either number exactly
        chosen, value = torch.stack((token.double(), largest.double())).tolist()
        if not math.isfinite(value):
            raise FloatingPointError(f"logits must be finite; got {value} as the largest")
        if self._penalized is not None:
            self._penalized[int(chosen)] = True
        return int(chosen)

    def _penalize(self, logits: torch.Tensor) -> torch.Tensor:
        if self._penalized is None:
            return logits
        penalty = self._params.repeat_penalty
        changed = torch.where(logits < 0, logits * penalty, logits / penalty)
        return torch.where(self._penalized, changed, logits)


def keep_likely(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores with -inf for what top_k, top_p and min_p leave out; float32 [vocab]."""
    if 0 < params.top_k < len(scores):
        least = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p < 1.0:
        probabilities, order = scores.softmax(-1).sort(stable=True)
        is_dropped = probabilities.double().cumsum(0).float() <= np.float32(1 - params.top_p)
        is_dropped[-1] = False
        is_dropped = torch.empty_like(is_dropped).scatter(0, order, is_dropped)
        scores = scores.masked_fill(is_dropped, -torch.inf)
    if params.min_p > 0.0:
        probabilities = scores.softmax(-1)
        is_dropped = probabilities < float(np.float32(params.min_p)) * probabilities.max()
        scores = scores.masked_fill(is_dropped, -torch.inf)
    return scores


def draw(scores: torch.Tensor, drawn: float) -> torch.Tensor:
    """The token, int64 [], at which the probabilities, added up, pass `drawn`, in [0, 1)."""
    cumulative = scores.softmax(-1).double().cumsum(0)
    place = torch.searchsorted(cumulative, (cumulative[-1] * drawn)[None], right=True)[0]
    # a draw may round up to the sum itself, past the last token that can be drawn
    last = torch.searchsorted(cumulative, cumulative[-1:])[0]
    return torch.minimum(place, last)
