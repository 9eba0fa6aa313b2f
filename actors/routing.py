"""What a mixture's routers chose, step by step: written to a file, or taken from one.

Between two steps the engine owns the routes in the arena. To record, it reads what the step just
retired has left there. To drive a model by a recorded trace, it writes the choices of the next step
beforehand, and the walk takes them in place of the router's own: for measurements of speed on
random weights, whose routers choose like nobody's.

Where a card routes a layer of which no processor computes an expert, the engine does then what is
left to be done of the route: for the counts, and for those who watch what is chosen.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np

from shadowlane.actors.arena import Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.lowered_experts import expert_geometry, routes_of_cards
from shadowlane.actors.records import StepPlan
from shadowlane.actors.scratch import route_layout
from shadowlane.actors.spec import EngineSettings
from shadowlane.models import typed_name
from shadowlane.ops import table as t
from shadowlane.ops.routes import mark_all
from shadowlane.ops.warm import warm_routes
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.routing import RoutedModel, Trace
from shadowlane.planner.routing_files import TraceWriter, read_trace


def routed_model(blueprint: Blueprint) -> RoutedModel:
    """What a trace file says of a model. Raises ValueError for a dense one."""
    moe, experts = blueprint.config.moe, blueprint.experts
    if moe is None or experts is None:
        raise ValueError("routing is of mixtures of experts; this model has none")
    catalog = blueprint.catalog
    layer_nbytes: dict[int | None, int] = {}
    for group in catalog.groups:
        if group.kind != "embed":
            nbytes = sum(catalog.blocks[index].nbytes for index in group.blocks)
            layer_nbytes[group.layer] = layer_nbytes.get(group.layer, 0) + nbytes
    sparse = moe.sparse_layers
    typed = typed_name(blueprint.root)
    return RoutedModel(
        name=blueprint.fingerprint,
        title=Path(typed).name if Path(typed).is_absolute() else typed,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        expert_nbytes=tuple(
            experts.sources[number * moe.num_experts].nbytes for number in range(len(sparse))
        ),
        dense_nbytes=tuple(layer_nbytes.pop(layer, 0) for layer in sparse),
        outside_nbytes=sum(layer_nbytes.values()),
    )


def check_routing(blueprint: Blueprint, settings: EngineSettings) -> Trace | None:
    """The trace to be replayed, if any. Raises ValueError and OSError for what cannot be."""
    if settings.trace_routing is None and settings.replay_routing is None:
        return None
    model = routed_model(blueprint)  # says why not, where there are no experts
    if settings.replay_routing is None:
        return None
    trace = read_trace(settings.replay_routing)
    shape = (model.num_layers, model.num_experts, model.top_k)
    if (trace.num_layers, trace.num_experts, trace.top_k) != shape:  # of any model, if it fits
        trace.check(model.name, *shape)
    ranked = np.sort(trace.choices, axis=-1)
    is_whole = (ranked[..., 0] >= 0) & (np.diff(ranked, axis=-1) > 0).all(axis=-1)
    if not is_whole.all():
        token, layer = np.argwhere(~is_whole)[0]
        raise ValueError(
            f"{settings.replay_routing}: each token must choose {model.top_k} different experts in "
            f"each layer; token {token} in layer {layer} has {trace.choices[token, layer].tolist()}"
        )
    return trace


class Routes:
    """The routes of all sparse layers in the arena. For the engine, between two steps."""

    def __init__(self, arena: Arena, layout: ArenaLayout, blueprint: Blueprint) -> None:
        moe = blueprint.config.moe
        assert moe is not None, "a dense model has no routes"
        offsets = route_layout(blueprint.config, layout.step_rows)
        self._ids = [
            arena.view(
                layout.scratch["routes"] + number * layout.route_nbytes + offsets["ids"],
                np.int32,
                layout.step_rows,
                moe.top_k,
            )
            for number in range(len(moe.sparse_layers))
        ]
        self._is_forced = arena.view(layout.route_numbers, np.int64, t.ROUTE_WORDS)

    def read(self, num_rows: int) -> np.ndarray:
        """Experts by rank that the newest step chose: int32 [rows, layers, top_k]."""
        return np.stack([ids[:num_rows] for ids in self._ids], axis=1)

    def force(self, choices: np.ndarray) -> None:
        """What the next step is to choose: [rows, layers, top_k]."""
        for layer, ids in enumerate(self._ids):
            ids[: len(choices)] = choices[:, layer]
        self._is_forced[t.ROUTE_FORCED] = 1


class CardRoutes:
    """Routes of which nobody but cards took part. For the engine, between two steps."""

    def __init__(self, arena: Arena, layout: ArenaLayout, blueprint: Blueprint) -> None:
        warm_routes()
        self._arena, self._layout, self._blueprint = arena, layout, blueprint
        self._geometry = expert_geometry(blueprint, layout)
        self._placement_id: int | None = None
        self._tables: dict[Phase, tuple[np.ndarray, np.ndarray]] = {}

    def after(self, step: int, plan: StepPlan, placement: Placement) -> None:
        """Call it when a step has retired that was not void."""
        if placement.placement_id != self._placement_id:
            self._placement_id = placement.placement_id
            where = self._blueprint, self._layout, placement
            self._tables = {phase: routes_of_cards(*where, phase) for phase in get_args(Phase)}
        rows, items = self._tables[plan.phase]
        if len(rows):
            is_decode = int(plan.is_decode and not plan.same_sequence)
            place = self._arena.base, self._geometry
            mark_all(*place, rows, items, step, len(plan.rows), is_decode)


class RoutingTap:
    """Records the routes of every step, or makes steps choose what a trace says, or both.

    A trace begins again at its end. Raises OSError.
    """

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        blueprint: Blueprint,
        trace: Trace | None,
        record: Path | None,
    ) -> None:
        """trace: what `check_routing` gave; record: the file to be written."""
        self._routes = Routes(arena, layout, blueprint)
        self._choices = None if trace is None else trace.choices  # [tokens, layers, top_k]
        self._next = 0
        self._writer: TraceWriter | None = None
        if record is not None:
            self._writer = TraceWriter(record, routed_model(blueprint))
        self._turn = -1
        self._was_prefill = False

    def before(self, plan: StepPlan) -> None:
        """Call it before a step begins."""
        if self._choices is not None:
            count = len(plan.rows)
            places = np.arange(self._next, self._next + count) % len(self._choices)
            self._routes.force(self._choices[places])
            self._next += count

    def after(self, plan: StepPlan) -> None:
        """Call it when a step has retired. A prompt begins a turn."""
        if self._writer is None:
            return
        is_prefill = not plan.is_decode or plan.same_sequence
        if is_prefill and not self._was_prefill:
            self._turn += 1
        self._was_prefill = is_prefill
        choices = self._routes.read(len(plan.rows))
        self._writer.step(choices, turn=max(0, self._turn), is_prefill=is_prefill)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
