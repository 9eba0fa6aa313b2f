"""Which requests run, what each step carries of them, and what they get from it.

Knows nothing of lanes: sequences go in, step plans come out, logits come back. A step's shape
depends on the sequences it carries, and on how long a chunk the plan allows; but a prompt's
sub-chunks, which are what is multiplied together, on that prompt alone. So nobody else's requests
change the bits of an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.records import Row, StepPlan
from shadowlane.actors.sequence import DecodeStep, LaneUse, Sequence
from shadowlane.actors.spec import Options
from shadowlane.ops.table import FEW_ROWS


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and the sequences whose rows it has, in the order of their rows."""

    plan: StepPlan
    carried: tuple[Sequence, ...]


class Batch:
    """Sequences that wait and sequences that run. Only `add` and `cancel` are for other threads."""

    def __init__(self, options: Options, few_rows: int = FEW_ROWS) -> None:
        """few_rows: the end of a prompt that is no longer has a step like those of decode rows."""
        self._options = options
        self._few_rows = few_rows
        self.changed = threading.Condition()  # held to touch `waiting`; told when work comes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots: list[list[int]] = [[] for _ in range(options.max_batch)]  # tokens with keys

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def pages_in_use(self, page_tokens: int, max_pages: int) -> list[int]:
        """Pages of the KV cache that hold anything; max_pages: of each slot."""
        return [
            slot * max_pages + page
            for slot, known in enumerate(self._slots)
            for page in range(-(-len(known) // page_tokens))
        ]

    def cancel(self, sequence: Sequence) -> None:
        sequence.is_cancelled = True
        with self.changed:
            self.changed.notify_all()

    def admit(self, lane_use: Callable[[], LaneUse]) -> None:
        """Give free slots to waiting sequences, first come first served."""
        with self.changed:
            for sequence in [each for each in self.waiting if each.is_cancelled]:
                self.waiting.remove(sequence)
                sequence.finish("cancelled")
            used = {sequence.slot for sequence in self.running}
            free = [slot for slot in range(len(self._slots)) if slot not in used]
            while free and self.waiting:
                sequence = self.waiting.pop(0)
                slot, kept = self._choose_slot(free, sequence)
                free.remove(slot)
                sequence.start(slot, kept, lane_use)
                self._slots[slot] = sequence.known
                self.running.append(sequence)

    def _choose_slot(self, free: list[int], sequence: Sequence) -> tuple[int, int]:
        """(slot, tokens of the prompt that its cache holds and that may be used).

        A later turn goes where its conversation is; anything else where the least is lost.
        """
        if not sequence.reuses_cache:
            return min(free, key=lambda each: len(self._slots[each])), 0
        shared = {each: common_prefix(self._slots[each], sequence.prompt) for each in free}
        slot = max(free, key=lambda each: shared[each])
        # the last token must go through a step again: its logits are wanted
        return slot, min(shared[slot], len(sequence.prompt) - 1)

    def form_step(self, alone: int = 1, beside: int = 1) -> Step:
        """One token of each decoding sequence, and the next chunk of one prompt.

        alone: the most sub-chunks of a prompt that has the step to itself; beside: ... of one that
        other sequences' tokens wait for.
        """
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        if prompts:
            sequence = prompts[0]
            limit = self._options.prefill_chunk
            if sequence.wants_logits:
                limit = min(limit, self._options.logit_rows)
            if len(sequence.pending[:limit]) <= self._few_rows:
                rows = _rows(sequence, limit)
                return Step(StepPlan(rows, len(rows), same_sequence=True), (sequence,))
        rows = tuple(row for each in decoding for row in _rows(each, 1))
        if not prompts:
            return Step(StepPlan(rows, len(rows), same_sequence=False), tuple(decoding))
        most = beside if decoding else alone
        if sequence.wants_logits:
            most = max(1, min(most, self._options.logit_rows // limit))
        count = self._chunk_rows(len(sequence.pending), limit, most)
        plan = StepPlan(rows + _rows(sequence, count), len(rows), False, subchunk_rows=limit)
        return Step(plan, (*decoding, sequence))

    def _chunk_rows(self, pending: int, limit: int, most: int) -> int:
        """Rows of the next chunk: up to `most` sub-chunks of `limit`, all but the last whole.

        A rest that goes through the compiled kernels has a step of its own, as it would have after
        a chunk of one.
        """
        rows = min(pending, limit * most)
        rest = rows % limit
        return rows - rest if rows > limit and rest <= self._few_rows else rows

    @staticmethod
    def is_unwanted(step: Step) -> bool:
        """Whether all that a step carries has been cancelled: what it computes is for nobody."""
        return bool(step.carried) and all(each.is_cancelled for each in step.carried)

    def drop(self, step: Step) -> None:
        """End what a step carried that was not finished, and forget what it would have cached."""
        for sequence in step.carried:
            assert sequence.slot is not None
            sequence.known.clear()
        self._reap()

    def give_results(self, step: Step, logits: np.ndarray, context: int, took: DecodeStep) -> None:
        """Sample for each sequence whose turn it is; logits float32 [rows wanted, vocab]."""
        place = 0
        for sequence in step.carried:
            if step.plan.is_decode and not step.plan.same_sequence:
                sequence.decode_steps.append(took)  # before its listener can hear that it is over
            if sequence.wants_logits:
                count = sum(
                    row.wants_logits and row.slot == sequence.slot for row in step.plan.rows
                )
                sequence.give_logits(logits[place : place + count])
                place += count
            elif not sequence.pending:
                try:
                    sequence.give_token(logits[place], context)
                except FloatingPointError as error:
                    sequence.fail(str(error))
                place += 1
        self._reap()

    def _reap(self) -> None:
        """Free the slots of sequences that are over; what they cached may serve a later turn."""
        for sequence in list(self.running):
            if sequence.is_cancelled and not sequence.is_over:
                sequence.finish("cancelled")
            if sequence.is_over:
                assert sequence.slot is not None
                self._slots[sequence.slot] = list(sequence.known)
                self.running.remove(sequence)

    def fail_running(self, reason: str, *, keeps_caches: bool = True) -> None:
        """A step failed: end what it carried, and forget caches that may be half a step's.

        keeps_caches: those of other slots are still there.
        """
        for sequence in self.running:
            assert sequence.slot is not None
            self._slots[sequence.slot] = []
            if not sequence.is_over:
                sequence.fail(reason)
        self.running.clear()
        if not keeps_caches:
            self._slots = [[] for _ in self._slots]

    def begin_anew(self, reason: str) -> None:
        """All caches are gone: what runs goes through them again, with what it has said so far.

        A request for all its logits has had some of them, and so fails.
        """
        again = [each for each in self.running if not (each.is_over or each.wants_logits)]
        self.running = [each for each in self.running if each not in again]
        self.fail_running(reason, keeps_caches=False)
        with self.changed:
            self.waiting[:0] = again

    def fail_all(self, reason: str) -> None:
        with self.changed:
            sequences = [*self.waiting, *self.running]
            self.waiting.clear()
            self.running.clear()
        for sequence in sequences:
            if not sequence.is_over:
                sequence.fail(reason)


def _rows(sequence: Sequence, limit: int) -> tuple[Row, ...]:
    position = len(sequence.known)
    tokens = sequence.take(limit)
    assert sequence.slot is not None
    return tuple(
        Row(
            token,
            position + index,
            sequence.slot,
            sequence.wants_logits or (index == len(tokens) - 1 and not sequence.pending),
        )
        for index, token in enumerate(tokens)
    )


def check_prompt(prompt: Tokens[int], context: int, vocab: int, wants_logits: bool) -> None:
    """Raises ValueError for an empty prompt, an unknown id, or one that leaves no room."""
    if not prompt:
        raise ValueError("prompt must hold at least one token; got none")
    if len(prompt) > (context if wants_logits else context - 1):
        raise ValueError(
            f"prompt must leave room in the context of {context} tokens; "
            f"it has {len(prompt)} tokens"
        )
    for token in prompt:
        if not 0 <= token < vocab:
            raise ValueError(f"token ids must be between 0 and {vocab - 1}; got {token}")


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """Number of leading tokens that are the same."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
