"""What is said of a machine to be emulated: cards, layouts by hand, disturbances."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shadowlane.emulate import emulated_machine, sizes_of_cards, strategy_of
from shadowlane.engine_arguments import make_spec
from shadowlane.ops.errors import ModelError
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
        ({"disturb": ["3:cpu=2"]}, "disturb cpu must be the part that is left, .*; got '3:cpu=2'"),
        ({"disturb": ["3:cpu=nan"]}, "disturb cpu must be the part that is left"),
        ({"disturb": ["3:cpu=-0.5"]}, "disturb cpu must be the part that is left"),
        ({"disturb": ["3:cpu=0"]}, "disturb cpu must be the part that is left"),
        (
            {"disturb": ["3:vram=500GiB"]},
            "disturb vram must be at most the 5.80 GiB of .*; got 500",
        ),
        ({"disturb": ["3:ram=33GiB"]}, "disturb ram must be at most the 32.0 GiB of .*; got 33.0"),
        ({"disturb": ["3:vram=-1GiB"]}, "disturb vram must be a size .*; got '-1GiB'"),
        ({"disturb": ["3:cpu=0.4,cpu=0.5"]}, "disturb must name cpu once; got '3:cpu=0.4,cpu"),
        ({"disturb": ["3:cpu=0.4,"]}, "disturb must name cpu, gpu, .*; got '' in '3:cpu=0.4,'"),
        ({"disturb": ["3:cpu=0.4", "3:gpu=1"]}, "disturb must name each token once; got '3:cpu"),
        ({"disturb": ["0:cpu=0.4", "1:"]}, "disturb must name each token once; got '0:cpu"),
        ({"disturb": ["-3:cpu=0.4"]}, "disturb must be TOKENS:WHAT"),
        ({"disturb": [5]}, "disturb must be TOKENS:WHAT.*; got 5"),
        ({"disturb": "3:cpu=0.4"}, "disturb must be a list of texts .*; got '3:cpu=0.4'"),
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
        ({"hardware": None, "fixed_costs": 0.5}, "fixed_costs needs hardware"),
        ({"hardware": "none", "gpu_memory": "1GiB"}, "gpu_memory must be 0: RTX .* has no card"),
        ({"hardware": "none", "disturb": ["3:gpu=0.5"]}, "disturb gpu needs a card; RTX .* none"),
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


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    text = LAPTOP.read_text()
    for name in ("cpu_launch_s", "value"):
        twice = tmp_path / f"{name}.yaml"
        twice.write_text(
            text.replace("cpu_bytes_per_s:\n", f"cpu_bytes_per_s:\n  {name}: 1.0\n", 1)
        )
        twice.write_text(twice.read_text() + f"\n{name}: 1\n" * (name != "value"))
        with pytest.raises(ModelError, match=rf"{name} must be there once; it is in lines \d+ and"):
            load_hardware(twice)
