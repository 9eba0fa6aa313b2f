"""Experts on cards follow what routers choose, where choices shift for good."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shadowlane.planner.catalog import Experts
from shadowlane.planner.draft import dealt
from shadowlane.planner.following import Following, Layers, Proposal
from shadowlane.planner.heat import heat_of
from shadowlane.planner.routing import Trace, synthesize
from shadowlane.planner.synthetic import mixture_catalog

LAYERS, EXPERTS, TOP_K, HELD = 4, 32, 4, 8


def trace_of(seed: int, tokens: int = 512) -> Trace:
    return synthesize(
        num_tokens=tokens, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, seed=seed
    )


def known(trace: Trace) -> Experts:
    """Experts whose use was remembered from `trace`."""
    order = np.argsort(-heat_of(trace).counts, axis=1, kind="stable")
    ranks = tuple(tuple(map(int, row)) for row in order)
    return Experts(LAYERS, EXPERTS, TOP_K, 1000, 4096, 4096, ranks=ranks)


def hottest(experts: Experts, cards: int) -> list[Layers]:
    """So many cards share the hottest of each layer."""
    return [
        tuple(experts.ranked(layer)[card:HELD:cards] for layer in range(LAYERS))
        for card in range(cards)
    ]


def told(following: Following, trace: Trace, every: int = 16) -> list[Proposal]:
    """Proposals while a trace is followed."""
    found = []
    for first in range(0, trace.num_tokens, every):
        part = trace.part(first, first + every)
        following.note(part.num_tokens, heat_of(part).counts)
        proposal = following.proposal()
        found += [] if proposal is None else [proposal]
    return found


@pytest.mark.parametrize("cards", [1, 2])
def test_what_shifts_is_followed(cards: int) -> None:
    before, after = trace_of(1), trace_of(2)
    experts = known(before)
    held = hottest(experts, cards)
    newest = told(Following(experts, held), after)[-1]
    assert newest.hits > newest.hits_now + 0.15
    for old, new in zip(held, newest.cards, strict=True):
        assert [len(layer) for layer in new] == [len(layer) for layer in old]
    for layer in range(LAYERS):
        everywhere = [expert for card in newest.cards for expert in card[layer]]
        assert len(set(everywhere)) == HELD, "each expert is on one card"
    later = heat_of(trace_of(2, 1024).part(512, 1024)).counts

    def hits(sets: list[Layers]) -> float:
        return sum(
            later[layer, list(layers[layer])].sum() for layers in sets for layer in range(LAYERS)
        )

    assert hits(list(newest.cards)) > 1.3 * hits(held), "of choices that it has not seen"


def test_who_stays_on_a_card_stays_on_that_card() -> None:
    experts = known(trace_of(1))
    held = hottest(experts, 2)
    newest = told(Following(experts, held), trace_of(2))[-1]
    for number, card in enumerate(newest.cards):
        for layer, chosen in enumerate(card):
            assert not set(chosen) & set(held[1 - number][layer])


def test_chance_is_not_followed() -> None:
    """Nothing has shifted: what is proposed would hardly hit more often."""
    both = trace_of(3, 2048)
    experts = known(both.part(0, 1024))
    proposals = told(Following(experts, hottest(experts, 1)), both.part(1024, 2048))
    assert all(each.hits - each.hits_now < 0.06 for each in proposals)


def test_no_proposal_before_enough_is_scored() -> None:
    experts = known(trace_of(1))
    following = Following(experts, hottest(experts, 1))
    assert not told(following, trace_of(2).part(0, 32))


def test_once_cards_hold_it_nothing_is_left_to_propose() -> None:
    experts = known(trace_of(1))
    following = Following(experts, hottest(experts, 1))
    newest = told(following, trace_of(2))[-1]
    following.held(newest.cards)
    assert following.proposal() is None


@pytest.mark.parametrize("cards", [1, 2, 3])
def test_other_plans_keep_what_cards_hold(cards: int) -> None:
    """Those that want as many of each layer move nothing, and not from card to card either."""
    experts = known(trace_of(1))
    catalog = replace(mixture_catalog(), experts=experts)
    following = Following(experts, hottest(experts, cards))
    newest = told(following, trace_of(2))[-1]
    following.held(newest.cards)
    assert following.ranked(catalog) is catalog
    following.is_exchanged = True
    ranked = following.ranked(catalog).experts
    assert ranked is not None
    for layer in range(LAYERS):
        assert sorted(ranked.ranked(layer)) == list(range(EXPERTS))
        held = [set(card[layer]) for card in newest.cards]
        again = dealt(ranked.ranked(layer), [len(each) for each in held])
        assert [set(each) for each in again] == held
