"""How long a context the budget can hold, and the sum that is named when it cannot.

A context that was asked for is kept, or the plan is infeasible. The default is min(what the model
allows, 4096 tokens) and may shrink, by whole pages, in this order:

1. If the weights fit beside it, it stays.
2. If they fit beside a context of at least a quarter of it (and 512 tokens), it shrinks just that
   far: reading nothing from disk is worth more than the tail of a default.
3. Otherwise weights will stream. KV may then take a quarter of the budget, but 512 tokens at least.
4. If not even 512 tokens fit beside the smallest ring, whatever does: at least a page per sequence.
   A note then says so, and how much RAM is missing.

Of a mixture whose experts do not all fit, rule 3 is another: what every token needs is fixed, and
what is *left* beside it is shared by KV and experts. KV may take a quarter of that. Each expert
more saves reads at every token, a longer context only helps who uses it. But a chat of a few
hundred tokens is over soon, so up to 2048 tokens it may be half. Where a short context would hold
notably more experts, a note says how many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import InfeasiblePlan, Request, show_nbytes, whole_pages

DEFAULT_CONTEXT = 4096
LEAST_DEFAULT = 512
USEFUL_CONTEXT = 2048  # of a mixture: up to here, KV may take half of what experts could have
KV_PART = 4
NOTABLE_PART = 8  # of all experts: what a short context must hold more to be worth a note


@dataclass(frozen=True, slots=True)
class Context:
    tokens: int  # per sequence
    pages: int  # over all sequences
    kv_nbytes: int
    notes: tuple[str, ...]


def choose_context(
    catalog: Catalog, request: Request, least_weights: tuple[int, int, int]
) -> Context:
    """least_weights: bytes of all weights in RAM, of the pinned ones, of the smallest ring.

    Raises InfeasiblePlan; ValueError if more context is asked for than the model allows.
    """
    everything, pinned, ring = least_weights
    constants, scratch = whole_pages(catalog.constants_nbytes), whole_pages(catalog.scratch_nbytes)
    room = request.ram - constants - scratch
    smallest = min(everything, pinned + ring)
    asked = request.context
    if asked is not None:
        if asked > catalog.max_context:
            raise ValueError(
                f"context must be at most {catalog.max_context} tokens for this model; got {asked}"
            )
        context = _context(catalog, request, asked, ())
        if context.kv_nbytes + smallest > room:
            raise _infeasible(catalog, request, context, least_weights)
        return context
    default = min(catalog.max_context, DEFAULT_CONTEXT)
    whole = _context(catalog, request, default, ())
    if everything + whole.kv_nbytes <= room:
        return whole
    fitting = min(default, _tokens_in(catalog, request, room - everything))
    if fitting >= min(default, max(LEAST_DEFAULT, default // KV_PART)):
        return _shorter(catalog, request, fitting, default, "so that all weights stay in RAM")
    possible = _tokens_in(catalog, request, room - smallest)
    if possible < min(default, catalog.page_tokens):
        page = _context(catalog, request, min(default, catalog.page_tokens), ())
        raise _infeasible(catalog, request, page, least_weights)
    if catalog.experts is None:
        fair, whom = _tokens_in(catalog, request, request.ram // KV_PART), "weights"
    else:
        left = room - pinned
        half = _tokens_in(catalog, request, left // 2)
        fair = max(_tokens_in(catalog, request, left // KV_PART), min(half, USEFUL_CONTEXT))
        whom = "experts"
    wanted = min(default, max(fair, LEAST_DEFAULT))
    chosen = _shorter(catalog, request, min(wanted, possible), default, f"to leave RAM to {whom}")
    if possible < wanted and possible < min(default, LEAST_DEFAULT):
        useful = min(default, LEAST_DEFAULT)
        missing = _context(catalog, request, useful, ()).kv_nbytes + smallest - room
        note = (
            f"context is only {possible} of the usual {default} tokens, all that the RAM budget "
            f"holds: {show_nbytes(missing)} more would hold {useful}"
        )
        return replace(chosen, notes=(note,))
    return replace(
        chosen, notes=chosen.notes + _for_experts(catalog, request, chosen, room - pinned)
    )


def _shorter(catalog: Catalog, request: Request, tokens: int, default: int, why: str) -> Context:
    if tokens >= default:
        return _context(catalog, request, default, ())
    note = f"context is {tokens} tokens instead of {default}, {why}; ask for a context to have more"
    return _context(catalog, request, tokens, (note,))


def _for_experts(catalog: Catalog, request: Request, chosen: Context, left: int) -> tuple[str, ...]:
    """What a short context would do for the experts of a mixture, where that is much.

    left: bytes that KV and experts share.
    """
    experts = catalog.experts
    if experts is None or chosen.tokens <= LEAST_DEFAULT:
        return ()
    short = _context(catalog, request, LEAST_DEFAULT, ())
    now, then = (
        min(experts.total, (left - each.kv_nbytes) // experts.slot_nbytes)
        for each in (chosen, short)
    )
    if (then - now) * NOTABLE_PART < experts.total:
        return ()
    return (
        f"{now} of {experts.total} experts fit beside a context of {chosen.tokens} tokens; "
        f"ctx_size {LEAST_DEFAULT} would hold at least {then}, and read less for each token",
    )


def _context(catalog: Catalog, request: Request, tokens: int, notes: tuple[str, ...]) -> Context:
    pages = -(-tokens // catalog.page_tokens) * request.max_batch
    return Context(tokens, pages, whole_pages(pages * catalog.page_nbytes), notes)


def _tokens_in(catalog: Catalog, request: Request, nbytes: int) -> int:
    """Tokens per sequence, whole pages, whose KV takes at most `nbytes` (itself whole pages)."""
    usable = max(0, nbytes) // 4096 * 4096
    pages = usable // max(1, catalog.page_nbytes) // request.max_batch
    return pages * catalog.page_tokens


def _infeasible(
    catalog: Catalog, request: Request, context: Context, least_weights: tuple[int, int, int]
) -> InfeasiblePlan:
    everything, pinned, ring = least_weights
    sequences = f" of {request.max_batch} sequences" if request.max_batch > 1 else ""
    parts = {
        "constants": whole_pages(catalog.constants_nbytes),
        f"KV for {context.tokens} tokens{sequences}": context.kv_nbytes,
        "scratch": whole_pages(catalog.scratch_nbytes),
    }
    if everything < pinned + ring:
        parts["pinned weights" if pinned == everything else "weights"] = everything
    else:
        if pinned:
            name = "pinned weights" if catalog.experts is None else "weights of every token"
            parts[name] = pinned
        if catalog.experts is not None:
            parts[f"{ring // catalog.experts.slot_nbytes} experts"] = ring
        else:
            parts[f"{ring // max(1, catalog.slot_nbytes)} slots"] = ring
    return InfeasiblePlan("the model does not fit", parts, request.ram)
