"""How much of a prompt one step carries: the longer a chunk, the less often weights are read.

What is multiplied together, and so every bit, is a *sub-chunk* of fixed height. A chunk is one or
more of them, and whatever streams or is missing is read once for all. A long chunk takes RAM for
its activations, which weights or experts could have, and makes tokens of other requests wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.placement import InfeasiblePlan, Placement, Request
from shadowlane.planner.simulate import simulate

# The request that a chunk is chosen for: a prompt of this part of the context, and an answer.
PROMPT_PART = 2
ANSWER_TOKENS = 128
LEAST_GAIN = 0.005  # of that request's time, for which RAM goes to longer chunks
# What a step with a chunk may take, as predicted, where tokens of other requests wait for it. One
# sub-chunk may take longer: it cannot be less.
HELD_UP_S = 2.0


def choose_chunk(
    catalog: Catalog, first: Placement, cost: CostModel, place_with: Callable[[int], Placement]
) -> Placement:
    """`first`, whose chunks are one sub-chunk, or a plan with longer ones that serves better.

    Where nothing is read while steps run there is nothing to win.
    """
    experts = catalog.experts
    is_whole = experts is None or first.expert_slots == experts.total
    if is_whole and not first.sweep:
        return first
    best, best_s = first, request_s(catalog, first, cost)
    for subchunks, _ in catalog.chunk_scratch:
        if subchunks // 2 * catalog.subchunk_rows >= _prompt_tokens(first):
            break  # half as many hold the whole prompt
        try:
            placement = place_with(subchunks)
        except InfeasiblePlan:
            break
        if placement.context_tokens < first.context_tokens:
            break
        seconds = request_s(catalog, placement, cost)
        if seconds < best_s * (1 - LEAST_GAIN):
            best, best_s = placement, seconds
    return best


def with_beside(
    catalog: Catalog, request: Request, placement: Placement, cost: CostModel
) -> Placement:
    """`placement` with the chunks that other sequences' tokens may have to wait for."""
    count = placement.subchunks
    while request.max_batch > 1 and count > 1:
        if chunk_s(catalog, placement, cost, count * catalog.subchunk_rows) <= HELD_UP_S:
            break
        count //= 2
    return replace(placement, beside_subchunks=count)


def request_s(catalog: Catalog, placement: Placement, cost: CostModel) -> float:
    """Seconds, predicted, of the prompt and the answer that chunks are chosen for."""
    whole = placement.subchunks * catalog.subchunk_rows
    count, rest = divmod(_prompt_tokens(placement), whole)
    seconds = ANSWER_TOKENS * placement.predicted_step_s
    if count:
        seconds += count * chunk_s(catalog, placement, cost, whole)
    if rest:
        seconds += chunk_s(catalog, placement, cost, rest)
    return seconds


def chunk_s(catalog: Catalog, placement: Placement, cost: CostModel, rows: int) -> float:
    """Seconds, predicted, of a step with a chunk of so many rows.

    A second sub-chunk may cost less than the first, since what is packed is expanded once for both:
    both are measured, and further ones taken to cost as much as the second.
    """
    attended = max(1, _prompt_tokens(placement) // 2)  # of a row, on average
    workload = Workload("prefill", rows, attended)
    return simulate(catalog, placement, cost, workload=workload).step_s


def _prompt_tokens(placement: Placement) -> int:
    return max(1, placement.context_tokens // PROMPT_PART)
