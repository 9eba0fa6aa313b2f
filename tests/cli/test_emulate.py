"""What is said of a machine to be emulated: cards, layouts by hand, disturbances."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shadowlane.emulate import emulated_machine, sizes_of_cards, strategy_of
from shadowlane.engine_arguments import make_spec
from shadowlane.planner.hardware import CALM, Conditions
from shadowlane.shapes import load_hardware
from shadowlane.what_if import with_budgets

HARDWARE = Path(__file__).parents[2] / "examples" / "hardware"
LAPTOP = HARDWARE / "rtx-3060-laptop-6gb.yaml"
TWO = HARDWARE / "rtx-4090-rtx-3060.yaml"


def test_layouts_by_hand_by_their_flags() -> None:
    assert strategy_of(None, None, False, None) == ("auto", None)
    assert strategy_of("layer-stream", None, False, None) == ("layer-stream", None)
    assert strategy_of(None, 12, False, None) == ("layer-split", 12)
    assert strategy_of(None, None, False, 3) == ("cpu-moe", 3)
    name, layers = strategy_of(None, None, True, None)
    assert name == "cpu-moe"
    assert layers is not None
    assert layers > 1000, "all there are"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("cpu", 3, False, None), "strategy must be without gpu_layers"),
        ((None, 3, True, None), "gpu_layers must be without cpu_moe"),
        ((None, None, True, 2), "cpu_moe must be without n_cpu_moe"),
        (("sideways", None, False, None), "strategy must be one of auto, layer-split"),
    ],
)
def test_layouts_that_contradict_each_other(given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_of(*given)


def test_each_card_gets_its_own_size_or_all_the_same() -> None:
    cards, emulated = emulated_machine(TWO, "6GiB,4GiB")
    assert [card.memory for card in cards] == [6 << 30, 4 << 30]
    cards, _ = emulated_machine(TWO, "2GiB")
    assert [card.memory for card in cards] == [2 << 30, 2 << 30]
    cards, _ = emulated_machine(TWO)
    rooms = [each.vram_nbytes - each.reserved_nbytes for each in emulated.hardware.cards]
    assert [card.memory for card in cards] == [int(room) for room in rooms]


def test_disturbances_come_in_the_order_of_their_tokens() -> None:
    _, emulated = emulated_machine(LAPTOP, disturb=["80:", "40:cpu=0.4,vram=1GiB"])
    assert emulated.script == (
        (40, Conditions(cpu=0.4, vram_taken_nbytes=float(1 << 30))),
        (80, CALM),
    )


def test_fixed_costs_shrink_together() -> None:
    _, whole = emulated_machine(LAPTOP)
    _, tenth = emulated_machine(LAPTOP, fixed_costs=0.1)
    assert tenth.small_nbytes == pytest.approx(0.1 * whole.small_nbytes)
    for attribute in ("launch_s", "crossing_s"):
        one, other = (getattr(each.hardware.cards[0], attribute) for each in (whole, tenth))
        assert other == pytest.approx(0.1 * one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu_memory": "7GiB"}, "gpu_memory must be at most the"),
        ({"gpu_memory": "1GiB,1GiB"}, "one for each of 1 cards"),
        ({"gpu_memory": "auto"}, "gpu_memory must be sizes where a hardware file .*; got auto"),
        ({"slowed": 0.5}, "slowed must be from 1"),
        ({"fixed_costs": 2.0}, "fixed_costs must be from 0 to 1"),
        ({"disturb": ["cpu=0.4"]}, "disturb must be TOKENS:WHAT"),
        ({"disturb": ["3:moon=0.4"]}, "disturb must name cpu, gpu, link, disk, vram, ram"),
        ({"disturb": ["3:cpu=much"]}, "disturb must give numbers"),
        ({"disturb": ["3:cpu=2"]}, "disturb '3:cpu=2': cpu must be in"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emulated_machine(LAPTOP, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ram": "33GiB"}, "ram must be at most the 32.0 GiB of RTX 3060 .*; got 33.0 GiB"),
        ({"hardware": "none", "strategy": "layer-split"}, "strategy needs a card to use; on RTX"),
        ({"hardware": "none", "gpu_layers": 3}, "gpu_layers needs a card to use; on RTX"),
        ({"hardware": None, "strategy": "cpu"}, "strategy needs hardware"),
    ],
)
def test_what_the_machine_does_not_have_is_refused(
    arguments: dict, message: str, tmp_path: Path
) -> None:
    if arguments.get("hardware") == "none":
        bare = yaml.safe_load(LAPTOP.read_text()) | {"cards": []}
        (tmp_path / "none.yaml").write_text(yaml.safe_dump(bare))
        arguments = arguments | {"hardware": tmp_path / "none.yaml"}
    with pytest.raises(ValueError, match=message):
        make_spec(tmp_path, **({"hardware": LAPTOP} | arguments))


def test_each_card_may_have_a_size_of_its_own() -> None:
    machine = load_hardware(TWO)
    sizes = sizes_of_cards("6GiB,4GiB", machine)
    cards = with_budgets(machine, None, sizes).cards
    assert [card.vram_nbytes for card in cards] == [6 << 30, 4 << 30]
    assert with_budgets(machine, None, sizes_of_cards("0,0", machine)).cards == ()
