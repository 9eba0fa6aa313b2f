"""Which sequences a step carries, and where their caches are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shadowlane.actors.batch import Batch, Step, common_prefix
from shadowlane.actors.sequence import DecodeStep, Sequence
from shadowlane.actors.spec import Options
from shadowlane.ops.sampling import SamplingParams

VOCAB = 32
STEP = DecodeStep(1, 0.1, 0.1)


def sequence(prompt: list[int], reuses_cache: bool = False, max_tokens: int = 2) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(1, prompt, params, frozenset(), None, reuses_cache=reuses_cache)


def admit(batch: Batch, *sequences: Sequence) -> None:
    batch.waiting.extend(sequences)
    batch.admit(dict)


def run(batch: Batch) -> Step:
    step = batch.form_step()
    rows = len(step.plan.logit_rows)
    batch.give_results(step, np.zeros((max(1, rows), VOCAB), np.float32), 1000, STEP)
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


def cuts(batch: Batch, of: Sequence, alone: int, beside: int) -> list[int]:
    """How the prompt of `of` is cut into what is multiplied together, until it has a token."""
    found: list[int] = []
    while not of.generated and not of.is_over:
        step = batch.form_step(alone, beside)
        rows = sum(row.slot == of.slot for row in step.plan.rows)
        if not step.plan.is_decode:
            each = step.plan.subchunk_rows
            assert each is not None
            assert rows <= each * max(alone, beside)
            found += [each] * (rows // each) + [rows % each] * (rows % each > 0)
        elif rows:
            found.append(rows)
        logits = np.zeros((max(1, len(step.plan.logit_rows)), VOCAB), np.float32)
        batch.give_results(step, logits, 1000, STEP)
    return found


@given(
    length=st.integers(1, 200),
    subchunk=st.integers(1, 30),
    alone=st.sampled_from([1, 2, 4, 8]),
    beside=st.sampled_from([1, 2, 4]),
    has_other=st.booleans(),
    few_rows=st.sampled_from([8, 16]),
    logit_rows=st.sampled_from([None, 1, 10, 40, 300]),
)
def test_what_is_multiplied_together_does_not_depend_on_how_long_chunks_are(
    length: int,
    subchunk: int,
    alone: int,
    beside: int,
    has_other: bool,
    few_rows: int,
    logit_rows: int | None,
) -> None:
    options = Options(max_batch=2, prefill_chunk=subchunk, logit_rows=logit_rows or 8)
    found = []
    for counts in ((1, 1), (alone, beside)):
        batch = Batch(options, few_rows)
        if has_other:
            admit(batch, sequence([1, 2, 3], max_tokens=500))
            run(batch)
        params = SamplingParams(max_tokens=2)
        prompt = [1] * length
        wants = logit_rows is not None
        asked = Sequence(1, prompt, params, frozenset(), None, wants_logits=wants)
        admit(batch, asked)
        found.append(cuts(batch, asked, *counts))
    assert found[0] == found[1]
    assert sum(found[0]) == length


def test_a_chunk_is_as_long_as_the_plan_allows_and_shorter_beside_others() -> None:
    batch = Batch(Options(max_batch=2, prefill_chunk=25))
    first = sequence([1] * 120)
    admit(batch, first)
    assert len(batch.form_step(4, 2).plan.rows) == 100
    other = Batch(Options(max_batch=2, prefill_chunk=25))
    admit(other, sequence([1, 2, 3], max_tokens=50))
    run(other)
    admit(other, sequence([1] * 120))
    plan = other.form_step(4, 2).plan
    assert (plan.num_decode, plan.num_prefill, plan.subchunk_rows) == (1, 50, 25)


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
