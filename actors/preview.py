"""A plan without an engine: from headers and cached measurements alone."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shadowlane.actors.blueprint import Blueprint, read_blueprint
from shadowlane.actors.machine import hardware_fingerprint
from shadowlane.actors.requests import described_profile, num_workers, request_of
from shadowlane.actors.routing import check_routing, routed_model
from shadowlane.actors.service import profile_path, read_heat, read_profile
from shadowlane.actors.spec import ServiceSpec
from shadowlane.ops.files import open_model
from shadowlane.ops.tokenizer import load_tokenizer
from shadowlane.paths import cache_dir
from shadowlane.planner.card_planner import check_over_cards, first_over_cards
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.explain_cards import card_report
from shadowlane.planner.heat import informed
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Profile
from shadowlane.planner.routing import RoutedModel
from shadowlane.planner.search import place


def preview(spec: ServiceSpec) -> dict[str, Any]:
    """The plan an engine would start with; see `planner/explain.py`. Reads no weights.

    Raises InfeasiblePlan, ModelError, ValueError.
    """
    blueprint, profile = _read(spec)
    check_routing(blueprint, spec.settings)
    cost = CostModel(profile)
    placement = first_placement(spec, blueprint, cost)
    emulated = spec.settings.emulated
    if placement.cards:
        request = request_of(spec.options, spec.settings)
        is_emulated = emulated is not None
        report = card_report(blueprint.catalog, placement, request, is_emulated=is_emulated)
    else:
        machine = None if emulated is None else emulated.hardware.name
        report = plan_report(blueprint.catalog, placement, cost, emulated=machine)
    report["notes"] = [*spec.notes, *blueprint.notes, *report["notes"]]
    report["model"] = str(spec.root)
    report["dtype"] = blueprint.dtype
    return report


def check_plan(spec: ServiceSpec) -> None:
    """Raise what `preview` would, sooner: the best plan over cards is for the engine to find."""
    blueprint, profile = _read(spec)
    check_routing(blueprint, spec.settings)
    request = request_of(spec.options, spec.settings)
    if request.cards:
        check_over_cards(blueprint.catalog, request)
    else:
        place(blueprint.catalog, request, CostModel(profile))


def routed_plan(spec: ServiceSpec) -> tuple[RoutedModel, Placement, CostModel]:
    """A mixture as a trace names it, what an engine would start with, and what was measured of it.

    Raises like `preview`, and ValueError for a dense model.
    """
    blueprint, profile = _read(spec)
    model, cost = routed_model(blueprint), CostModel(profile)
    return model, first_placement(spec, blueprint, cost), cost


def check_tokenizer(spec: ServiceSpec) -> None:
    """Raises ModelError for files of a tokenizer that cannot be read."""
    load_tokenizer(open_model(spec.root), cache_dir())


def first_placement(spec: ServiceSpec, blueprint: Blueprint, cost: CostModel) -> Placement:
    request = request_of(spec.options, spec.settings)
    if request.cards:
        return first_over_cards(blueprint.catalog, request)
    return place(blueprint.catalog, request, cost)


def cached_profile(spec: ServiceSpec) -> Profile | None:
    """What was measured earlier of this machine with this model, if anything."""
    return _read(spec)[1]


def forget_profile(spec: ServiceSpec) -> None:
    blueprint, _ = _read(spec)
    _path(spec, blueprint).unlink(missing_ok=True)


def profile_report(spec: ServiceSpec) -> dict[str, Any]:
    """The cached profile as plain data, with where it is kept."""
    blueprint, profile = _read(spec)
    if profile is None:
        raise ValueError(f"the profile could not be kept in {_path(spec, blueprint).parent}")
    return {"path": str(_path(spec, blueprint)), **asdict(profile)}


def _path(spec: ServiceSpec, blueprint: Blueprint) -> Path:
    threads = [len(cores) for cores in spec.settings.cores]
    return profile_path(hardware_fingerprint(threads, spec.root), blueprint)


def _read(spec: ServiceSpec) -> tuple[Blueprint, Profile | None]:
    workers, are_cards = num_workers(spec.settings), bool(spec.settings.cards)
    is_elsewhere = spec.settings.emulated is not None
    blueprint, _ = read_blueprint(
        spec.root, spec.options, workers, are_cards=are_cards, is_elsewhere=is_elsewhere
    )
    catalog = informed(blueprint.catalog, read_heat(blueprint))
    profile = described_profile(spec.settings, catalog)
    if profile is None:
        profile = read_profile(_path(spec, blueprint))
    return replace(blueprint, catalog=catalog), profile
