"""Who copies to a card: both ways are timed at the start, and the faster one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cards import OPTIONS, drawn, on_cards
from fake_card import FakeDriver, fake_cards
from inprocess import by_one_thread
from mortal import MortalScripted, end_of, hear
from tiny import tiny_tokens

from shadowlane.actors import transfer_lane
from shadowlane.actors.copier import Copier
from shadowlane.actors.copy_choice import CopyTimes
from shadowlane.actors.copy_ring import RingCopier
from shadowlane.actors.link_statistics import TRIAL

PROMPT = tiny_tokens(41)


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def expected(model: Path, blocks_of_a_page: None) -> list[int]:
    return by_one_thread(model, OPTIONS, PROMPT)


def with_rates(patch: pytest.MonkeyPatch, process: float) -> None:
    """Copies are made as ever, but the process is so many times as fast as the thread."""
    time_copies = transfer_lane.time_copies

    def timed(copier: Copier, *where: Any) -> CopyTimes:
        measured = time_copies(copier, *where)
        assert measured.bytes_per_s > 0
        return CopyTimes(1e9 if isinstance(copier, RingCopier) else process * 1e9, 10.0)

    patch.setattr(transfer_lane, "time_copies", timed)


def copied_by(driver: FakeDriver) -> int:
    return sum(name == "copy" for name, _ in driver.calls)


@pytest.mark.parametrize("has_memops", [True, False])
@pytest.mark.parametrize(("process", "winner"), [(2.0, "process"), (1.0, "thread")])
def test_the_faster_one_copies(
    model: Path,
    expected: list[int],
    process: float,
    winner: str,
    has_memops: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_rates(monkeypatch, process)
    other = FakeDriver(stands_apart=True, has_memops=has_memops)
    with (
        fake_cards(monkeypatch, processes=[other], has_memops=has_memops) as (driver,),
        on_cards(model, drawn(1, 1)) as engine,
    ):
        (note,) = [each for each in engine.engine.notes if "copies to gpu:0" in each]
        assert note.startswith(
            {
                "process": "the process of its transfer lane copies to gpu:0: ",
                "thread": "a thread of its lane copies to gpu:0: ",
            }[winner]
        )
        assert f"at {process:.2f} times the rate of a thread" in note
        before = copied_by(driver), copied_by(other)
        assert all(before), "both have been tried"
        assert engine.generate(PROMPT) == expected
        after = copied_by(driver), copied_by(other)
        grew = [now > then for now, then in zip(after, before, strict=True)]
        assert grew == [winner == "thread", winner == "process"]
        spans = engine.engine.gauges.link_spans(0)
        assert (spans[:, 1] == TRIAL).any()
        assert (spans[:, 1] >= 0).any()


def test_a_process_that_cannot_get_at_the_card_is_not_used(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeDriver(stands_apart=True, has_ipc=False)
    with fake_cards(monkeypatch, processes=[other]), on_cards(model, drawn(1, 1)) as engine:
        (note,) = [each for each in engine.engine.notes if "copies to gpu:0" in each]
        assert "a thread of its lane" in note
        assert "no sharing of the card's memory: import_memory" in note
        assert engine.generate(PROMPT) == expected


@pytest.mark.parametrize("lane", ["gpu:0", "h2d:0"])
def test_after_a_death_the_process_copies_again(
    model: Path, expected: list[int], lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rates(monkeypatch, 2.0)
    other = FakeDriver(stands_apart=True)
    with (
        fake_cards(monkeypatch, base=MortalScripted, processes=[other]),
        on_cards(model, drawn(1, 1)) as engine,
    ):
        request = engine.submit(PROMPT, max_tokens=80)
        hear(request, 3)
        next(each for each in engine.engine.crew.all_lanes if each.name == lane).kill()
        assert end_of(request).error == f"{lane}: its process died"
        before = copied_by(other)
        assert engine.generate(PROMPT) == expected
        assert copied_by(other) > before
