"""Text from token ids one by one: no broken characters, and no stop text, not even its beginning.

Tokens are pieces of bytes, so a character may need several, and a token's text can depend on its
neighbours. So text is released only once later tokens cannot change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what incomplete or invalid UTF-8 decodes to


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""

    def is_special(self, token_id: int) -> bool: ...

    def is_byte_piece(self, token_id: int) -> bool:
        """Whether the token is one raw byte whose text depends on the byte tokens after it."""


class TextStream:
    """The text of one growing sequence.

    All pieces joined are `decode` of all ids, cut before the stop text that was complete first.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._filter = StopFilter(stop)
        self._window: list[int] = []  # ids still needed to decode what comes
        self._context_length = 0  # of the window: ids whose text is released, kept as context
        self._released = 0  # characters of the window's other ids that are released already

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text was met; everything after it is left out."""
        return self._filter.is_stopped

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain, often empty or that of earlier tokens."""
        if self.is_stopped or self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_byte_piece(token_id):
            return ""
        text = self._pending_text()
        # A trailing replacement may be a character's first bytes; those before it will not change.
        is_complete = not text.endswith(REPLACEMENT)
        certain = text[self._released :] if is_complete else text[self._released : -1]
        if is_complete and text:
            self._window = self._window[self._context_length :]
            self._context_length, self._released = len(self._window), 0
        else:
            self._released += len(certain)
        return self._filter.push(certain)

    def finish(self) -> str:
        """What was held back, once no more tokens come. Push nothing after it."""
        rest = self._pending_text()[self._released :]
        self._window = []
        return self._filter.push(rest) + self._filter.finish()

    def _pending_text(self) -> str:
        context = self._tokenizer.decode(self._window[: self._context_length])
        return self._tokenizer.decode(self._window)[len(context) :]


class StopFilter:
    """Passes text on up to the first stop text, holding back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to come before any stop text."""
        if self.is_stopped:
            return ""
        self._held += text
        # The stop text that is complete first counts, so how the text is cut makes no difference.
        found = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            self.is_stopped = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - max(map(self._overlap, self._stop), default=0))

    def finish(self) -> str:
        """The text that was held back and did not become a stop text."""
        return "" if self.is_stopped else self._release(len(self._held))

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the held text that may be the beginning of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        return released
