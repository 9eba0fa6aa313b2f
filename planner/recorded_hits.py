"""How often the hottest experts were chosen, as recorded: known from one half, scored on the other.

Who is hot is told by the first half of a recording; what its second half then chose is what a plan
meets. What both chose and scored would prove nothing, so the rates that a planner may know are
those that the first half promises (`Heat`), not those that come.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shadowlane.planner.heat import heat_of, remembered
from shadowlane.planner.hit_rate import assumed, interpolate, upper_hull
from shadowlane.planner.hybrid import HitRate, Model
from shadowlane.planner.routing import NOBODY, Trace


class RecordedHits:
    """Two halves of a trace of a mixture: the first chooses, tokens of the second are met."""

    def __init__(self, trace: Trace, model: Model) -> None:
        """Raises ValueError for a trace of another shape, or one that cannot be halved.

        A recording may have been made with fewer or more choices a token than `model` makes.
        """
        layers = [load for load in model.loads if load.experts]
        if not layers:
            raise ValueError(f"routing is of mixtures of experts; {model.name} has none")
        asked = (len(layers), layers[0].experts)
        if asked != (trace.num_layers, trace.num_experts):
            raise ValueError(
                f"routing must be of {asked[0]} layers of {asked[1]} experts, as {model.name} has; "
                f"it is of {trace.num_layers} of {trace.num_experts}"
            )
        known, scored = trace.halves()
        curve = remembered(heat_of(known)) or assumed(layers[0].experts, layers[0].top_k)
        self._promised = curve.points
        self._layers = {load.layer or 0: index for index, load in enumerate(layers)}
        self._experts = trace.num_experts
        self._ranks = _ranks_of(known, scored)
        self.num_tokens = len(self._ranks)
        self._met = self._met_points()

    def hits(self, layer: int, part: float, step: int) -> float:
        """Part of a layer's choices at a token that are among the hottest `part` of its experts.

        step: counts tokens; after the last comes the first.
        """
        ranks = self._ranks[step % self.num_tokens, self._layers[layer]]
        chosen = ranks >= 0
        count = int(chosen.sum())
        if not count:
            return 0.0
        return int((chosen & (ranks < round(part * self._experts))).sum()) / count

    def promised(self, part: float) -> float:
        """How often a planner may expect the hottest to be chosen, by the first half alone."""
        return interpolate(self._promised, part)

    @property
    def met(self) -> HitRate:
        """How often they are chosen in the second half, of all layers, at most.

        Between what whole experts give, and never less than a mixture of two such parts: a plan may
        hold more of one layer than of another.
        """
        points = self._met
        return lambda part: interpolate(points, part)

    def _met_points(self) -> list[tuple[float, float]]:
        ranks = self._ranks[self._ranks >= 0]
        counts = np.bincount(ranks, minlength=self._experts)
        rates = np.concatenate([[0.0], np.cumsum(counts) / max(1, len(ranks))])
        return upper_hull([(i / self._experts, float(rate)) for i, rate in enumerate(rates)])


def _ranks_of(known: Trace, scored: Trace) -> npt.NDArray[np.int16]:
    """[tokens of `scored`, layers, top_k] how hot each chosen expert was in `known`, from 0."""
    order = np.argsort(-heat_of(known).counts, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(order.shape[1])[None, :], 1)
    tokens = np.flatnonzero(~scored.is_prefill)
    choices = scored.choices[tokens if len(tokens) else slice(None)].astype(np.intp)
    found = ranks[np.arange(scored.num_layers)[None, :, None], choices]
    return np.where(choices == NOBODY, -1, found).astype(np.int16)
