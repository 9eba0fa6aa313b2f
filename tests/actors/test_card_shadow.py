"""The planner itself over a recorded driver's card: it learns from what was timed, and re-plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import inprocess
import pytest
from cards import machine_with
from fake_card import fake_cards
from inprocess import AMPLE, ONE_THREAD, cut, running, weights_nbytes
from tiny import tiny_tokens

from shadowlane.actors.blueprint import Options
from shadowlane.actors.spec import CardSettings

OPTIONS = Options(context=128, prefill_chunk=24)
PROMPT = tiny_tokens(41)
TOKENS = 30


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


@pytest.fixture(scope="module")
def model(biased_llama: Path) -> Path:
    return biased_llama


def test_what_was_timed_makes_the_planner_think_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels take far longer than the machine's description has it."""
    with running(model, options=OPTIONS, cores=ONE_THREAD) as engine:
        expected = engine.generate(PROMPT, max_tokens=TOKENS)
    memory = weights_nbytes(cut(model, OPTIONS, ONE_THREAD))
    machine = replace(machine_with(1), cpu_bytes_per_s=20e9)
    with (
        fake_cards(monkeypatch, base=inprocess.ThreadHost) as (driver,),
        running(
            model,
            ram=AMPLE,
            options=OPTIONS,
            cores=ONE_THREAD,
            cards=(CardSettings(memory),),
            machine=machine,
        ) as engine,
    ):
        now = engine.engine
        first = now.placement
        assert first.cards[0].resident
        driver.delays["kernel"] = 1e-3
        for _ in range(40):
            assert engine.generate(PROMPT, max_tokens=TOKENS) == expected
            if now.shadow.decisions:
                break
        assert now.shadow.is_open, now.shadow.notes
        # What it makes of that depends on how fast this machine is; that it hears does not.
        assert "measured" in " | ".join(now.shadow.decisions)
