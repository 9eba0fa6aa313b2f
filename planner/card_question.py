"""What an engine over cards asks: for decode, and a part of a chunk of a prompt for every token.

A chunk is one or more sub-chunks (`chunks.py`): the longer, the less often weights are brought for
a prompt, and the less room for them, since activations of its rows take RAM and as much of a card.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.chunks import ANSWER_TOKENS, HELD_UP_S, LEAST_GAIN, PROMPT_PART
from shadowlane.planner.context import DEFAULT_CONTEXT
from shadowlane.planner.hand_placement import plan_by_hand
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import Plan, Prompts, Work, known_hits, model_of
from shadowlane.planner.hybrid_changes import bring, shrunk
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    TooLarge,
    best_of,
    brought_of,
    in_micro_batches,
    settle,
)
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.pins import catalog_homes, check_pins_fit, pinned
from shadowlane.planner.placement import Request
from shadowlane.planner.rings import takes_experts, with_rings, without_unused
from shadowlane.planner.search import TIE
from shadowlane.planner.shortage import what_is_short

PROMPT_TOKENS = 2.0  # of a prompt, for each token of an answer
MOST_UNUSED = 0.03  # of a step: as much as a new plan must win
OURS = "auto"  # the strategy that is searched for, not one of those by hand


def question_over_cards(catalog: Catalog, request: Request) -> Question:
    """With chunks of as many sub-chunks as `request` says; None: one."""
    assert request.machine is not None, "cards are planned for on a machine that is described"
    subchunks = request.subchunks or 1
    longer = catalog.with_subchunks(subchunks)
    taken = longer.scratch_nbytes - catalog.scratch_nbytes
    machine = within_budgets(request.machine, request, taken)
    model = pinned(
        # NOTE: a catalog calls its model by a fingerprint, which tells nobody anything.
        model_of(
            longer,
            "the model",
            is_ours=True,
            brings_experts=all(takes_experts(catalog, card) for card in machine.cards),
            cards_here=request.cards_here,
        ),
        catalog_homes(catalog, request.pins, len(request.cards)),
    )
    context = min(request.context or DEFAULT_CONTEXT, model.max_context)
    work = Work(
        sequences=request.max_batch,
        rows=request.max_batch,
        context=min(512, context),
        max_context=context,
    )
    rows = min(subchunks * catalog.subchunk_rows, context)
    attended = max(1, _prompt_tokens(catalog, request) // 2)  # of a row, on average
    prompt = Work("prefill", rows=rows, context=attended, max_context=context)
    check_pins_fit(model, work, machine)
    hits = known_hits(catalog, model)
    prompts = Prompts(prompt, PROMPT_TOKENS / rows)
    return Question(model, machine, work, hit_rate=hits, prompts=prompts)


def within_budgets(machine: Hardware, request: Request, taken: int = 0) -> Hardware:
    """The machine with as much memory as the request gives: nothing else of it is anybody's.

    taken: bytes of each card's, by activations of a longer chunk.
    """
    cards = tuple(
        replace(card, vram_nbytes=max(0.0, float(budget - taken)), reserved_nbytes=0.0)
        for card, budget in zip(machine.cards, request.cards, strict=True)
    )
    return replace(machine, cards=cards, ram_nbytes=float(request.ram), reserved_nbytes=0.0)


def plan_over_cards(catalog: Catalog, request: Request) -> tuple[Plan, Request]:
    """The plan to begin with, and `request` with the number of sub-chunks that it is for.

    Searched for the shortest chunk; for longer ones it is changed a little, which on shipped shapes
    has been as good as another search to half a percent.

    Raises TooLarge, ValueError.
    """
    if request.strategy != OURS:
        return _by_hand(catalog, request)
    counts = _counts(catalog, request)
    question = _question(catalog, request, counts[0])
    try:
        plan = search(question).plan
    except TooLarge as error:
        raise TooLarge(f"{error}: {what_is_short(question)}") from None
    if len(request.cards) < 2 and not _is_carried(question.answer(plan)):
        return plan, replace(request, subchunks=counts[0])
    near: dict[int, Answer] = {}

    def seconds(count: int) -> float | None:
        found = _near(_question(catalog, request, count), plan)
        if found is None:
            return None
        near[count] = found
        return request_s(catalog, request, count, found)

    best = _best_count(counts, seconds)
    return (plan if best == counts[0] else near[best].plan), replace(request, subchunks=best)


def beside_rings(catalog: Catalog, question: Question, plan: Plan) -> tuple[Question, Plan]:
    """The question with a ring on each card, for an engine whose plans may change, and its plan.

    A ring to which nothing comes yet is left out where it would slow steps down by `MOST_UNUSED`.
    """
    asked = with_rings(catalog, question, plan)
    seconds = question.answer(plan).seconds
    found: list[tuple[float, Question, Plan]] = []
    if asked.fits(plan):
        found.append((asked.answer(plan).seconds, asked, plan))
        if found[0][0] <= seconds * (1.0 + TIE):
            return asked, plan
    for each in (asked, with_rings(catalog, question, plan, is_least=True)):
        near = _near(each, plan)  # layouts by hand have been asked for `plan`
        with suppress(TooLarge):
            answer = search(each, rivals=None if near is None else {"near": near})
            found.append((answer.seconds, each, answer.plan))
    if not found or min(s for s, _, _ in found) > seconds * (1.0 + MOST_UNUSED):
        fewer = without_unused(asked, plan)
        if fewer.fits(plan) or not found:
            found.append((fewer.answer(plan).seconds, fewer, plan))
    _, question, plan = min(found, key=lambda each: each[0])
    return question, plan


def request_s(catalog: Catalog, request: Request, count: int, answer: Answer) -> float:
    """Seconds of the prompt and the answer that chunks are chosen for, as on processors alone."""
    assert answer.prompt_times is not None, "engines plan for prompts, too"
    chunks = max(1.0, _prompt_tokens(catalog, request) / (count * catalog.subchunk_rows))
    return ANSWER_TOKENS * answer.times.step_s + chunks * answer.prompt_times.step_s


def _prompt_tokens(catalog: Catalog, request: Request) -> int:
    return min(request.context or DEFAULT_CONTEXT, catalog.max_context) // PROMPT_PART


def beside_subchunks(catalog: Catalog, request: Request, plan: Plan) -> int:
    """Of a chunk for which tokens of other sequences wait; see `HELD_UP_S`."""
    count = request.subchunks or 1
    while request.max_batch > 1 and count > 1:
        question = _question(catalog, request, count)
        assert question.prompts is not None
        if question.times(plan, work=question.prompts.work).step_s <= HELD_UP_S:
            break
        count //= 2
    return count


def _by_hand(catalog: Catalog, request: Request) -> tuple[Plan, Request]:
    """A layout by hand has the chunk that is best for it, too. Raises TooLarge, ValueError."""
    plans: dict[int, Plan] = {}

    def seconds(count: int) -> float:
        question = _question(catalog, request, count)
        plans[count] = plan_by_hand(question, request.strategy, request.strategy_layers)
        return request_s(catalog, request, count, question.answer(plans[count]))

    best = _best_count(_counts(catalog, request), seconds)
    return plans[best], replace(request, subchunks=best)


def _question(catalog: Catalog, request: Request, count: int) -> Question:
    return question_over_cards(catalog, replace(request, subchunks=count))


def _counts(catalog: Catalog, request: Request) -> list[int]:
    """Sub-chunks that a chunk may have: until half as many hold the prompts that are thought of."""
    if request.subchunks is not None:
        return [request.subchunks]
    longer = [count for count, _ in catalog.chunk_scratch]
    most = _prompt_tokens(catalog, request)
    return [1, *(count for count in longer if count // 2 * catalog.subchunk_rows < most)]


def _best_count(counts: list[int], seconds_of: Callable[[int], float | None]) -> int:
    """The count whose plan is fastest; a longer chunk only where that gains `LEAST_GAIN`.

    seconds_of: None, or ValueError for any but the first, where plan or pins are too large.
    """
    best, best_s = counts[0], float("inf")
    for count in counts:
        try:
            seconds = seconds_of(count)
        except ValueError:
            if count == counts[0]:
                raise
            break  # nor will more fit
        if seconds is None:
            break
        if seconds < best_s * (1.0 - LEAST_GAIN):
            best, best_s = count, seconds
    return best


def _is_carried(answer: Answer) -> bool:
    """Whether anything comes for prompts that a longer chunk would need less often."""
    assert answer.prompt_times is not None, "engines plan for prompts, too"
    return answer.prompt_times.busy_of("h2d", "disk") > 0.0


def _near(question: Question, plan: Plan) -> Answer | None:
    """What is near a plan that was made for chunks of another length. None: too large."""
    spread = shrunk(question, Spread.of(plan), brings=False)
    near = settle(question, plan.name, spread, brought_of(plan))
    if near is None or not question.fits(near):
        near = settle(question, plan.name, shrunk(question, Spread.of(plan)), brought_of(plan))
    if near is None or not question.fits(near):
        return None
    cut = in_micro_batches(question, near)
    answer = best_of(question, [near, cut] if cut.micro_batches > 1 else [near])
    return bring(question, answer, answer)
