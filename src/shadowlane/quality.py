"""Perplexity: how surprised a model is by a text, and by how much more once its weights are packed.

The method is that of llama.cpp's perplexity tool, so that figures can be held against each other:
the text is cut into windows of `window` tokens, the rest is left out; in each window, which is read
on its own, the tokens of the second half are scored. Where the tokenizer puts a BOS token before a
text, it takes the place of each window's first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from shadowlane.llm import LLM

WINDOW_TOKENS = 512
_LOGITS_NBYTES = 64 << 20  # of scratch for rows of logits, where the model is read for this alone

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Perplexity:
    perplexity: float
    uncertainty: float  # standard error of the perplexity, from the spread of the tokens' scores
    tokens: int  # of the text
    scored_tokens: int
    windows: int
    window_tokens: int

    def as_object(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.4f} +- {self.uncertainty:.4f} "
            f"({self.scored_tokens} of {self.tokens} tokens scored, {self.windows} windows of "
            f"{self.window_tokens})"
        )


def check_window(window: int) -> None:
    """Raise ValueError for a window that has no second half."""
    if window < 4:
        raise ValueError(f"window must be at least 4 for perplexity; got {window}")


def check_text(model: Path, text: str, window: int = WINDOW_TOKENS) -> None:
    """Raise, before an engine is started for it, where the text cannot be measured.

    ModelError for a model without tokenizer, ValueError for a text of less than a window.
    """
    from shadowlane.ops.files import open_model
    from shadowlane.ops.tokenizer import load_tokenizer
    from shadowlane.paths import cache_dir
    from shadowlane.texts import check_reads_text

    check_reads_text(model, "perplexity")
    tokenizer = load_tokenizer(open_model(model), cache_dir())
    assert tokenizer is not None, "its files are there"
    # The beginning of a long text says as much as all of it, and sooner.
    start = text[: 64 * window]
    if start == text or len(tokenizer.encode(start)) < window:
        _check_length(len(tokenizer.encode(text)), window)


def _check_length(num_tokens: int, window: int) -> None:
    if num_tokens < window:
        raise ValueError(
            f"the text must have at least {window} tokens, one window; got {num_tokens}"
        )


def measure_perplexity(
    llm: LLM,
    text: str | Sequence[int],
    window: int = WINDOW_TOKENS,
    progress: Progress = lambda stage, fraction: None,
) -> Perplexity:
    """Perplexity of a text, or of token ids. Raises ValueError for a text of less than a window."""
    check_window(window)
    tokens = llm.encode(text) if isinstance(text, str) else [int(token) for token in text]
    around = llm.encode("") if isinstance(text, str) else []
    windows = cut_windows(tokens, around[:1], window)
    scores: list[float] = []
    for number, part in enumerate(windows):
        progress("measuring perplexity", number / len(windows))
        scores += (-llm.log_probabilities(part, window // 2)).tolist()
    return perplexity_of(scores, len(tokens), len(windows), window)


def cut_windows(
    tokens: Sequence[int], before: Sequence[int], window: int = WINDOW_TOKENS
) -> list[list[int]]:
    """What is read, each on its own. `before`: the token that begins a text, if there is one.

    Raises ValueError for fewer tokens than a window has.
    """
    _check_length(len(tokens), window)
    starts = range(0, len(tokens) - window + 1, window)
    windows = [list(tokens[start : start + window]) for start in starts]
    for part in windows:
        part[:1] = list(before) or part[:1]
    return windows


def perplexity_of(
    scores: Sequence[float], num_tokens: int, num_windows: int, window: int
) -> Perplexity:
    """Perplexity from how unlikely each scored token was: negative natural logarithms."""
    mean = math.fsum(scores) / len(scores)
    spread = math.fsum((score - mean) ** 2 for score in scores) / max(1, len(scores) - 1)
    perplexity = math.exp(mean)
    return Perplexity(
        perplexity=perplexity,
        uncertainty=perplexity * math.sqrt(spread / len(scores)),
        tokens=num_tokens,
        scored_tokens=len(scores),
        windows=num_windows,
        window_tokens=window,
    )


def logit_rows_for(model: Path, window: int = WINDOW_TOKENS) -> int:
    """Rows of logits per step that speed up scoring at a bounded cost of scratch."""
    from shadowlane.ops.files import open_model

    vocabulary = open_model(model).config.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        return 8  # opening the model will say what is wrong with it
    return max(8, min(256, window, _LOGITS_NBYTES // (4 * vocabulary)))
