"""Which sequences a step carries, and where their caches are."""

from __future__ import annotations

import numpy as np

from shadowlane.actors.batch import Batch, Step, common_prefix
from shadowlane.actors.sequence import Sequence
from shadowlane.actors.spec import Options
from shadowlane.ops.sampling import SamplingParams

VOCAB = 32


def sequence(prompt: list[int], reuses_cache: bool = False, max_tokens: int = 2) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(1, prompt, params, frozenset(), None, reuses_cache=reuses_cache)


def admit(batch: Batch, *sequences: Sequence) -> None:
    batch.waiting.extend(sequences)
    batch.admit(dict)


def run(batch: Batch) -> Step:
    step = batch.form_step()
    rows = len(step.plan.logit_rows)
    batch.give_results(step, np.zeros((max(1, rows), VOCAB), np.float32), 1000, 0.1)
    return step


def run_out(batch: Batch) -> None:
    while batch.running:
        run(batch)


def shapes(batch: Batch, of: Sequence) -> list[int]:
    """Rows of `of` in each step until it has its first token."""
    found = []
    while not of.generated:
        step = run(batch)
        found.append(sum(row.slot == of.slot for row in step.plan.rows))
    return found


def test_chunks_of_a_prompt_do_not_depend_on_other_requests() -> None:
    prompt = list(range(1, 31)) * 2
    alone = Batch(Options(max_batch=3, prefill_chunk=25))
    first = sequence(prompt)
    admit(alone, first)
    assert shapes(alone, first) == [25, 25, 10]
    together = Batch(Options(max_batch=3, prefill_chunk=25))
    others = [sequence([1, 2, 3], max_tokens=50), sequence([4] * 9, max_tokens=50)]
    admit(together, *others)
    for _ in range(4):
        run(together)
    second = sequence(prompt)
    admit(together, second)
    assert shapes(together, second) == [25, 25, 10]


def test_a_short_rest_goes_alone_and_in_order() -> None:
    batch = Batch(Options(max_batch=2, prefill_chunk=25))
    other = sequence([1, 2, 3], max_tokens=50)
    admit(batch, other)
    run(batch)
    late = sequence(list(range(29)))
    admit(batch, late)
    steps = [run(batch), run(batch)]
    assert [len(step.carried) for step in steps] == [2, 1]
    assert steps[1].plan.same_sequence
    assert [row.position for row in steps[1].plan.rows] == [25, 26, 27, 28]


def test_a_later_turn_finds_its_conversation_and_others_leave_it_alone() -> None:
    batch = Batch(Options(max_batch=2))
    talk = sequence([1, 2, 3, 4, 5, 6])
    admit(batch, talk)
    run_out(batch)
    single = sequence([1, 2, 3, 9])  # shares a beginning, and is no later turn
    admit(batch, single)
    assert single.slot != talk.slot
    assert single.timing.cached_tokens == 0
    run_out(batch)
    later = sequence([*talk.prompt, *talk.generated, 7, 8], reuses_cache=True)
    admit(batch, later)
    assert later.slot == talk.slot
    assert later.timing.cached_tokens == len(talk.known) == 7


def test_what_is_cancelled_frees_its_slot() -> None:
    batch = Batch(Options(max_batch=1))
    running, waiting = sequence([1] * 20, max_tokens=50), sequence([2])
    admit(batch, running, waiting)
    run(batch)
    batch.cancel(running)
    batch.cancel(waiting)
    run(batch)
    batch.admit(dict)
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert not batch.has_work


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0
