"""How long a card and its link were busy, as events on a recorded driver's streams tell it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cards import drawn, on_cards
from fake_card import fake_cards
from recording_driver import RecordingDriver
from tiny import tiny_tokens

from shadowlane.actors.card_clock import StreamClock
from shadowlane.actors.timeline import make_timeline
from shadowlane.planner import events as ev

PROMPT = tiny_tokens(41)
KERNEL_S = 3e-4
COPY_S = 2e-4


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.mark.parametrize("has_memops", [True, False])
def test_every_instruction_and_every_copy_has_its_time(
    model: Path, has_memops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[ev.StepRetired] = []
    with fake_cards(monkeypatch, has_memops=has_memops) as (driver,):
        with on_cards(model, drawn(1, 1)) as engine:
            driver.delays |= {"kernel": KERNEL_S, "copy": COPY_S}
            planner, now = engine.planner, engine.engine
            assert planner is not None
            handle = planner.handle

            def listen(events: list[ev.Event]) -> list[ev.Command]:
                heard.extend(each for each in events if isinstance(each, ev.StepRetired))
                return handle(events)

            monkeypatch.setattr(planner, "handle", listen)
            engine.generate(PROMPT)
            engine.generate(PROMPT)
            catalog, (part,) = now.blueprint.catalog, now.placement.cards
            per_step = now.crew.lengths("decode")[now.placement.number_of("gpu:0")]
            number, swept = now.placement.number_of("gpu:0"), part.decode_sweep
        # all threads have ended: what they wrote stays to be read
        spans = now.gauges.worker_spans(number, 0)
        link = now.gauges.link_spans(0)
        use = now.gauges.busy_ns()
        timeline = make_timeline(catalog, [("gpu:0", 0, spans)], {"h2d:0": link})
    assert len(spans) > 20 * per_step
    took = spans[:, 3] - spans[:, 2]
    assert (took >= 0).all()
    assert np.median(took) >= KERNEL_S * 1e9
    assert (spans[1:, 2] >= spans[:-1, 3]).all(), "instructions of one stream follow each other"
    steps = [spans[spans[:, 0] == step] for step in np.unique(spans[:, 0])]
    assert all(len(each) == per_step for each in steps[-9:-1])
    decode = [each for each in heard if each.phase == "decode"]
    assert len(decode) > 10
    for event in decode:
        assert per_step * KERNEL_S <= event.busy_s["gpu:0"] <= event.seconds
    assert use["gpu:0"][0] == took.sum()
    copied = link[:, 3] - link[:, 2]
    assert use["h2d:0"][0] == copied.sum()
    assert (copied[len(copied) // 2 :] >= COPY_S * 1e9).all(), "the first came before the delays"
    for block in swept:
        assert catalog.blocks[block].held_nbytes in link[link[:, 1] == block][:, 4]
    names = {each["name"] for each in timeline["traceEvents"]}
    assert {f"copy {catalog.blocks[block].group}" for block in swept} <= names


class _Stream:
    """Passes work straight on."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def submit(self, work: Callable[[int], None]) -> None:
        work(self.handle)


def test_a_clock_that_drifts_is_held_to_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's clock says that an hour has passed; it cannot have, and a mark is no later than
    when it was read."""
    driver = RecordingDriver()
    driver.set_device(0)
    clock = StreamClock(driver, _Stream(driver.create_stream()))  # type: ignore[arg-type]
    clock.mark(1, is_idle=True)
    clock.mark(2)
    driver.settle()
    ((first, began),) = clock.read()[:1]
    assert first == (1,)
    clock.mark(3)
    driver.settle()
    monkeypatch.setattr(driver, "elapsed_ms", lambda start, end: 3.6e6)
    ((about, ended),) = clock.read()
    assert about == (3,)
    assert 0 <= ended - began < 60e9
    assert clock.num_pending == 0
    clock.close()
    assert driver.left()["events"] == 0
    driver.shut_down()
