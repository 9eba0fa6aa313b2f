"""Hardware files: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shadowlane.planner.hardware import Conditions, read_hardware

FILES = sorted((Path(__file__).parents[2] / "examples" / "hardware").glob("*.yaml"))

CARD = {
    "vram_nbytes": 8e9,
    "reserved_nbytes": 1e9,
    "vram_bytes_per_s": 400e9,
    "flops": 40e12,
    "h2d_bytes_per_s": 20e9,
    "d2h_bytes_per_s": 21e9,
    "launch_s": 5e-6,
    "crossing_s": 20e-6,
}
MACHINE = {
    "cpu_bytes_per_s": 40e9,
    "cpu_flops": 1e12,
    "cpu_launch_s": 2e-6,
    "dram_bytes_per_s": 60e9,
    "ram_nbytes": 64e9,
    "reserved_nbytes": 4e9,
    "disk_bytes_per_s": 5e9,
}


def with_sources(figures: dict[str, float]) -> dict[str, Any]:
    return {key: {"value": value, "source": "made up"} for key, value in figures.items()}


def contents() -> dict[str, Any]:
    """Of a sound file."""
    cards = [{"name": "card", **with_sources(CARD)}]
    return {"name": "machine", "cards": cards, **with_sources(MACHINE)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_that_is_shipped_can_be_read(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    machine = read_hardware(data)
    assert len(machine.cards) == len(data["cards"])
    for card in machine.cards:
        # A reader that mixes keys up would not keep these orders.
        assert card.reserved_nbytes < card.vram_nbytes < machine.ram_nbytes
        assert card.h2d_bytes_per_s < machine.cpu_bytes_per_s < card.vram_bytes_per_s
        assert card.launch_s < card.crossing_s < 1e-3
    assert machine.disk_bytes_per_s < machine.cpu_bytes_per_s < machine.cpu_flops
    assert machine.reserved_nbytes < machine.ram_nbytes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_figure_that_is_shipped_says_where_it_is_from(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    parts = [data, *data["cards"]]
    figures = [part[key] for part in parts for key in part if key not in ("name", "cards")]
    assert len(figures) == len(MACHINE) + len(CARD) * len(data["cards"])
    assert all(len(figure["source"].split()) >= 2 for figure in figures)


def test_figures_are_read_from_where_they_stand() -> None:
    machine = read_hardware(contents())
    assert machine.name == "machine"
    assert {key: getattr(machine, key) for key in MACHINE} == MACHINE
    (card,) = machine.cards
    assert {key: getattr(card, key) for key in CARD} == CARD


def test_a_number_may_be_a_text_as_yaml_has_448e9() -> None:
    data = contents()
    data["cards"][0]["vram_bytes_per_s"]["value"] = "448e9"
    assert read_hardware(data).cards[0].vram_bytes_per_s == 448e9


def test_a_machine_may_have_no_card() -> None:
    assert read_hardware({**contents(), "cards": []}).cards == ()


def put(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A sound file with one thing replaced."""
    data = contents()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


def without(*path: Any) -> dict[str, Any]:
    data = contents()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return data


SAID = {"source": "somewhere"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "a hardware file must hold keys and values; it is empty"),
        ([1], "a hardware file must hold keys and values; got list"),
        (without("cards"), "cards must be a list, one entry for each card; got None"),
        (put(("cards",), "RTX 4090"), "cards must be a list"),
        (put(("cards", 0), "RTX 4090"), r"cards\[0\] must hold keys and values; got 'RTX 4090'"),
        (put(("colour",), {"value": 1, **SAID}), "the file must have only .*; got colour$"),
        (put(("cards", 0, "fans"), {"value": 2, **SAID}), r"cards\[0\] must have only .*; got fan"),
        (without("ram_nbytes"), "the file must have .*; ram_nbytes is missing"),
        (without("cards", 0, "flops"), r"cards\[0\] must have .*; flops is missing"),
        (put(("name",), 4090), "name of the file must be a text; got 4090"),
        (put(("cards", 0, "name"), ""), r"name of cards\[0\] must be a text; got ''"),
        (put(("ram_nbytes",), 64e9), "ram_nbytes of the file must be {value: ..., source: ...}"),
        (put(("ram_nbytes",), {"value": 64e9}), "ram_nbytes of the file must be {value"),
        (
            put(("ram_nbytes",), {"value": 64e9, "source": " "}),
            "source of ram_nbytes of the file must say where the figure is from; it is empty",
        ),
        (put(("ram_nbytes",), {"value": 64e9, "source": 7}), "source of ram_nbytes of the file"),
        (put(("ram_nbytes",), {"value": "64 GB", **SAID}), "a number, 0 or more; got '64 GB'"),
        (put(("ram_nbytes",), {"value": -1, **SAID}), "a number, 0 or more; got -1"),
        (put(("cpu_bytes_per_s",), {"value": 0, **SAID}), "a number above 0; got 0"),
        (put(("cards", 0, "flops"), {"value": 0, **SAID}), "a number above 0; got 0"),
        (
            put(("cards", 0, "reserved_nbytes"), {"value": 8e9, **SAID}),
            r"must be less than its vram_nbytes, 8e\+09; got 8e\+09",
        ),
        (put(("ram_nbytes",), {"value": True, **SAID}), "a number, 0 or more; got True"),
        (put(("ram_nbytes",), {"value": "inf", **SAID}), "a number, 0 or more; got 'inf'"),
        (put(("ram_nbytes",), {"value": "nan", **SAID}), "a number, 0 or more; got 'nan'"),
        (put(("ram_nbytes",), {"value": None, **SAID}), "a number, 0 or more; got None"),
        (
            put(("cards", 0, "vram_bytes_per_s"), {"value": 900, **SAID}),
            r"vram_bytes_per_s of cards\[0\] must be in bytes per second, .*; got 900",
        ),
        (put(("ram_nbytes",), {"value": 64, **SAID}), "ram_nbytes of the file must be in bytes,"),
        (put(("cpu_flops",), {"value": 900, **SAID}), "must be in operations per second, .*; got"),
        (put(("cpu_launch_s",), {"value": 3.0, **SAID}), "must be in seconds, which is 0 to 0.1 "),
    ],
)
def test_what_is_wrong_is_named(data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        read_hardware(data)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5])
def test_conditions_are_parts(value: float) -> None:
    with pytest.raises(ValueError, match=rf"link must be in \(0, 1\]; got {value}"):
        Conditions(link=value)
