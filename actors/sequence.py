"""One request on its way through the engine: its tokens, its text, and who listens."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from shadowlane.actors.spec import FinishReason
from shadowlane.ops.sampling import Sampler, SamplingParams


class ExpertUse(NamedTuple):
    """Of the experts that decode steps chose. What one layer chose for one token is one choice."""

    resident: int  # were in RAM when they were chosen, and not for that token's sake
    early: int  # look-ahead had just brought them, for that very token
    chosen: int  # all but those that live on cards
    read_nbytes: int = 0  # while these steps ran
    on_cards: int = 0  # live on cards, and were computed there


def since(before: ExpertUse, after: ExpertUse) -> ExpertUse:
    return ExpertUse(*(later - earlier for earlier, later in zip(before, after, strict=True)))


NO_EXPERTS = ExpertUse(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What has been done since the engine's start."""

    lanes: dict[str, tuple[int, int]]  # lane -> (busy ns, bytes)
    experts: ExpertUse = NO_EXPERTS
    # of an emulated lane, its seconds that this machine took beyond what was to be emulated
    overrun_s: Mapping[str, float] = field(default_factory=dict)


class DecodeStep(NamedTuple):
    """A step that carried one token of a request; seconds are of the clock here."""

    placement_id: int
    predicted_s: float | None  # of the machine that is planned for; None: not known
    seconds: float


class TextSink(Protocol):
    """Turns ids into text piece by piece; see `ops.tokenizer.TextStream`."""

    is_stopped: bool

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Output:
    """What a listener gets: some text and ids, the end, or the error that ended it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    logits: np.ndarray | None = None  # float32 [rows, vocab]


@dataclass(slots=True)
class Timing:
    """Monotonic seconds of one request."""

    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0  # first step that carried it
    first_token: float = 0.0
    ended: float = 0.0
    cached_tokens: int = 0  # of the prompt, found in the KV cache


class Sequence:
    """State of one running request. `known` are the tokens whose keys are cached."""

    def __init__(
        self,
        request_id: int,
        prompt: Tokens[int],
        params: SamplingParams,
        eos: frozenset[int],
        text: TextSink | None,
        wants_logits: bool = False,
        reuses_cache: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = tuple(prompt)
        self.params = params
        self.eos = frozenset() if params.ignore_eos else eos
        self.sampler = Sampler(params, self.prompt)
        self.text = text
        self.wants_logits = wants_logits
        self.reuses_cache = reuses_cache and not wants_logits
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.timing = Timing()
        self.slot: int | None = None
        self.known: list[int] = []
        self.pending: list[int] = list(self.prompt)  # tokens still to go through a step
        self.generated: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.is_cancelled = False
        self.is_heard = False  # the listener has had the last output
        self.decode_steps: list[DecodeStep] = []
        self._lane_use: Callable[[], LaneUse] = lambda: LaneUse({})
        self.use_before = LaneUse({})
        self.use_at_first = LaneUse({})  # when its first token was there
        self.use_after = LaneUse({})

    @property
    def lane_use(self) -> dict[str, tuple[float, int]]:
        """Per lane, busy seconds and bytes while it ran, others' work too; once it is over."""
        before = self.use_before.lanes
        return {
            name: ((busy - before[name][0]) / 1e9, nbytes - before[name][1])
            for name, (busy, nbytes) in self.use_after.lanes.items()
        }

    @property
    def is_decoding(self) -> bool:
        return bool(self.generated) and len(self.pending) == 1

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def start(self, slot: int, kept: int, lane_use: Callable[[], LaneUse]) -> None:
        """The engine has taken it up in `slot`, whose cache holds its first `kept` tokens.

        lane_use: tells what the lanes have done so far.
        """
        self.slot = slot
        self.known = list(self.prompt[:kept])
        self.pending = [*self.prompt[kept:], *self.generated]
        self.timing.cached_tokens = kept
        self._lane_use = lane_use
        self.use_before = lane_use()
        if not self.generated:
            self.timing.started = time.monotonic()

    def take(self, count: int) -> list[int]:
        """The next tokens of a step; they count as cached from now on."""
        taken, self.pending = self.pending[:count], self.pending[count:]
        self.known.extend(taken)
        return taken

    def give_logits(self, logits: np.ndarray) -> None:
        """Rows of logits for a listener that asked for them all; ends after the prompt."""
        self.outputs.put(Output(logits=logits.copy()))
        if not self.pending:
            self.finish("length")

    def give_token(self, logits: np.ndarray, context: int) -> None:
        """Sample from one row of logits, and tell the listener; float32 [vocab].

        Raises FloatingPointError where the logits are not numbers.
        """
        token = self.sampler.sample(logits)
        now = time.monotonic()
        if not self.generated:
            self.timing.first_token = now
            self.use_at_first = self._lane_use()
        self.generated.append(token)
        self.pending.append(token)
        if token in self.eos:
            self.finish("stop", token)
            return
        piece = self.text.push(token) if self.text else ""
        limit = self.params.max_tokens
        if self.text and self.text.is_stopped:
            self._end("stop")
        elif (limit is not None and len(self.generated) >= limit) or (
            len(self.known) + 1 >= context
        ):
            self._end("length")
        if self.finish_reason == "length" and self.text:
            piece += self.text.finish()
        self.outputs.put(Output(piece, (token,), self.finish_reason))

    def finish(self, reason: FinishReason, token: int | None = None) -> None:
        """End without a further token's text."""
        self._end(reason)
        text = self.text.finish() if self.text else ""
        ids = () if token is None else (token,)
        self.outputs.put(Output(text, ids, reason))

    def fail(self, error: str) -> None:
        self._end("cancelled")
        self.outputs.put(Output(finish_reason="cancelled", error=error))

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.timing.ended = time.monotonic()
        self.use_after = self._lane_use()
