"""Published speeds and the planner's model of them: what docs/calibration.md states still holds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "calibration.md"


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts import one another as siblings, as they do when they are run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def stated(split: str, phase: str) -> tuple[float, float]:
    """The range of medians of single halvings, in percent, as the page has it."""
    row = rf"^\| {split} *\| {phase} *\| all *\| \d+ *\| \d+ *\| [\d.]+ % *\| ([\d.]+)-([\d.]+) *\|"
    match = re.search(row, PAGE.read_text(), re.MULTILINE)
    assert match, (split, phase)
    return float(match[1]), float(match[2])


def test_every_point_has_a_source_and_knows_its_machine_and_model() -> None:
    from published import data, read_points

    points = read_points()
    assert len(points) == 215
    for point in points:
        assert point.source.strip()
        assert point.model in data()["models"]
        assert point.machine in data()["machines"]
        assert set(point.cards) <= set(data()["cards"])
        assert point.tok_s > 0
    partial = [point for point in points if point.offload == "partial"]
    assert len(partial) >= 20


def test_models_are_as_large_as_their_files() -> None:
    from published import data, model_named

    for name, entry in data()["models"].items():
        if "gib" in entry:
            model = model_named(name)
            nbytes = model.nbytes + model.fixed_ram_nbytes
            assert nbytes == pytest.approx(entry["gib"] * 2**30, rel=1e-6), name


def test_held_out_errors_are_as_stated() -> None:
    """One halving of each kind: its medians lie in the ranges of the page, give or take 1 %."""
    from calibration import by_machine, by_point, held_out, read_points

    for split, key in (("by points", by_point), ("by machines", by_machine)):
        found = held_out(read_points(), key)
        for phase in ("decode", "prefill"):
            errors = [abs(each.error) * 100 for each in found if each.point.phase == phase]
            least, greatest = stated(split, phase)
            assert least - 1.0 < np.median(errors) < greatest + 1.0, (split, phase)


def test_a_half_never_sees_what_it_is_tried_on() -> None:
    from calibration import by_machine, halves, read_points

    one, two = halves(read_points(), by_machine)
    assert len(one) + len(two) == 215
    assert not {point.machine for point in one} & {point.machine for point in two}


def test_short_models_take_as_long_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are played two or three times and counted as often as there are."""
    import published
    from calibration import start_figures

    points = published.read_points()[::5]
    laws = [published.law_of(point, start_figures()) for point in points]
    short = [published.seconds(*pair) for pair in zip(points, laws, strict=True)]
    monkeypatch.setattr(published, "_shorter", lambda loads, _: ((1.0, tuple(range(len(loads)))),))
    published.layout_of.cache_clear()
    whole = [published.seconds(*pair) for pair in zip(points, laws, strict=True)]
    published.layout_of.cache_clear()
    assert short == pytest.approx(whole, rel=1e-9)


def test_layers_go_to_the_card_in_the_order_of_the_build() -> None:
    """The output layer last, before the end of 2025; first, since then."""
    from published import model_named, parts_on_card, read_points

    for machine, ngl, has_head in (("ik255-4090", 64, False), ("inv-5060ti", 8, True)):
        point = next(p for p in read_points() if p.machine == machine and p.ngl == ngl)
        names = [load.name for load in model_named(point.model).loads]
        parts = dict(zip(names, parts_on_card(point), strict=True))
        assert (parts["lm_head"] == 1.0) is has_head
        layers = sum(part for name, part in parts.items() if name.endswith(".down"))
        assert layers == (ngl - 1 if has_head else ngl)
