"""The planner itself over a recorded driver's card: it learns from what was timed, and re-plans."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import inprocess
import pytest
from cards import OPTIONS, machine_with
from fake_card import fake_cards
from inprocess import AMPLE, ONE_THREAD, by_one_thread, cut, running, weights_nbytes
from tiny import tiny_tokens

from shadowlane.actors.spec import CardSettings
from shadowlane.engine_arguments import make_spec
from shadowlane.models import KNOWN
from shadowlane.planner.placement import MIN_SLOTS

PROMPT = tiny_tokens(41)
TOKENS = 30


pytestmark = pytest.mark.usefixtures("blocks_of_a_page")


def test_what_was_timed_makes_the_planner_think_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels take far longer than the machine's description has it."""
    expected = by_one_thread(model, OPTIONS, PROMPT, max_tokens=TOKENS)
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


MEMORY = "memory that is left has changed"  # as plans say that are made for that
RTX_3060 = Path(__file__).parents[2] / "examples/hardware/rtx-3060-laptop-6gb.yaml"


def smollm2() -> Path:
    path = KNOWN["smollm2"].path
    if not path.exists():
        pytest.skip(f"smollm2 has not been fetched to {path}")
    return path


@pytest.mark.parametrize("is_tiny", [True, False])
def test_no_plan_is_refused_that_the_example_of_the_readme_thinks_of(
    model: Path, is_tiny: bool
) -> None:
    """A card that holds all but little; cores are lost, then a part of the card.

    Of a tiny model in its place launches and crossings are as cheap beside its matrices.
    """
    path = model if is_tiny else smollm2()
    cores = ONE_THREAD
    memory = weights_nbytes(cut(path, OPTIONS, cores)) if is_tiny else 100 << 20
    spec = make_spec(
        path,
        hardware=str(RTX_3060),
        gpu_memory=memory,
        fixed_costs=1e-3 if is_tiny else 1.0,
        disturb=["10:cpu=0.2", f"40:vram={memory // 2}B"],
        ctx_size=128,
    )
    asked = replace(spec.settings, cores=tuple(map(tuple, cores)))
    named = {each.name: getattr(asked, each.name) for each in fields(asked)}
    with running(path, options=spec.options, **named) as engine:
        now = engine.engine
        assert now.placement.cards[0].num_slots >= MIN_SLOTS
        for _ in range(20):
            engine.generate(PROMPT, max_tokens=TOKENS)
            if any(MEMORY in each for each in now.shadow.decisions):
                break
        told = [*now.shadow.decisions, *now.shadow.notes]
        assert now.shadow.is_open, told
        assert any(MEMORY in each for each in told), told
        assert not [each for each in told if "cannot be" in each]
        for part, there in zip(now.placement.cards, now.layout.cards, strict=True):
            assert (part.num_slots, part.slot_nbytes) == (there.num_slots, there.slot_nbytes)
