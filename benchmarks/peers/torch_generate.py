"""One timed `generate` of a transformers model, for the peers that are built on it."""

from __future__ import annotations

import time
from typing import Any

from report import Marks


class TokenClock:
    """A streamer that only looks at the clock; `generate` hands it the prompt first."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self._saw_prompt = marks, False

    def put(self, _value: Any) -> None:
        if self._saw_prompt:
            self._marks.token()
        self._saw_prompt = True

    def end(self) -> None:
        pass


def timed_generate(
    model: Any, ids: list[int], num_new: int, **options: object
) -> tuple[Marks, list[int]]:
    """Greedy, exactly `num_new` tokens, end of sequence ignored; returns marks and new ids."""
    import torch

    prompt = torch.tensor([ids])
    if model.device.type == "cuda":
        prompt = prompt.to(model.device)
    marks = Marks(began=time.monotonic())
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            # No token ends the sequence; without this, min_new_tokens would mask one.
            eos_token_id=None,
            pad_token_id=0,
            streamer=TokenClock(marks),
            **options,
        )
    tokens = output[0, len(ids) :].tolist()
    if len(marks.tokens) != len(tokens):
        raise RuntimeError(f"marks must match tokens; got {len(marks.tokens)} and {len(tokens)}")
    return marks, tokens
