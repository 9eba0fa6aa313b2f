"""The competition of cache policies, on line: every one runs as a ghost on the same routes.

A ghost keeps the books of a cache without a byte in it. Some layers stand for all: a ghost has a
part of the slots and sees that part of the layers, which keeps a decode step within a few
milliseconds. What layers have in common, a cliff too, the sample has as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shadowlane.planner.experts import (
    MIXTURE,
    POLICIES,
    ExpertCache,
    Ids,
    Keys,
    Policy,
    Scores,
    is_on_cliff,
    serve,
)
from shadowlane.planner.heat import Heat


@dataclass(frozen=True, slots=True)
class ChooserSettings:
    """Every threshold of the competition, with its reason."""

    window: float = 64.0  # steps after which a hit counts half: long enough to tell a point apart
    margin: float = 0.03  # part of its misses that another policy must save to be worth a switch
    patience: int = 24  # steps in a row for which that must hold: a burst is over before
    min_steps: int = 32  # before the first switch: ghosts start with what heat says, or nothing
    sampled_layers: int = 12  # at most


class Chooser:
    """Told every route; `policy` is what the cache should use now.

    current: what is in force at the start; never one that would hit nothing.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        slots: int,
        *,
        policies: Sequence[Policy] = POLICIES,
        current: Policy = MIXTURE,
        heat: Heat | None = None,
        settings: ChooserSettings | None = None,
    ) -> None:
        if current not in policies:
            raise ValueError(f"current must be one of the policies; got {current.name}")
        self.settings = settings or ChooserSettings()
        self.num_switches = 0
        number = min(num_layers, self.settings.sampled_layers)
        layers = [(2 * each + 1) * num_layers // (2 * number) for each in range(number)]
        self._place = {layer: at for at, layer in enumerate(layers)}
        if heat is not None:
            heat = Heat(heat.model, heat.visits, heat.counts[layers])
        self._scores = Scores(number, num_experts, policies, heat)
        sampled_slots = max(1, min(round(slots * number / num_layers), number * num_experts))
        self._ghosts = tuple(
            ExpertCache(number, num_experts, sampled_slots, policy, scores=self._scores)
            for policy in policies
        )
        for ghost in self._ghosts:
            for key in ghost.wanted().tolist():
                ghost.insert(key)
        self._misses = np.zeros(len(policies))  # decayed sums
        self._choices = 0.0
        self._step_experts = float(number * top_k)  # what a step chooses, of the sample
        self._now = np.zeros(len(policies))  # misses of this step
        self._now_choices = 0
        self._last_layer = -1
        self._num_steps = 0
        self._streak = 0
        self.policy = current
        self._leave_cliff()

    @property
    def hit_rates(self) -> Mapping[str, float]:
        """Recent hit rate of each policy by name, of the sampled layers; 0 before the first."""
        rates = 1 - self._misses / max(self._choices, 1e-9) if self._choices else 0 * self._misses
        return {
            ghost.policy.name: float(rate) for ghost, rate in zip(self._ghosts, rates, strict=True)
        }

    def touch(self, layer: int, ids: Ids, *, is_decode: bool = True) -> None:
        """The newest route. One of prefill changes what ghosts hold, and is not scored."""
        if layer <= self._last_layer:
            self._end_step()
        self._last_layer = layer
        place = self._place.get(layer)
        if place is None:
            return
        chosen: Keys = np.asarray(ids, np.intp)
        self._scores.touch(place, chosen)
        for at, ghost in enumerate(self._ghosts):
            num_missing = int(np.count_nonzero(serve(ghost, place, chosen)))
            if is_decode:
                self._now[at] += num_missing
        if is_decode:
            self._now_choices += len(chosen)

    def _end_step(self) -> None:
        if not self._now_choices:
            return
        keep = 0.5 ** (1 / self.settings.window)
        self._misses = keep * self._misses + self._now
        self._choices = keep * self._choices + self._now_choices
        self._step_experts += 0.1 * (self._now_choices - self._step_experts)
        self._now[:] = 0
        self._now_choices = 0
        self._num_steps += 1
        self._leave_cliff()
        misses = np.where(self._on_cliff(), np.inf, self._misses)
        best = int(misses.argmin())
        mine = self._misses[[ghost.policy for ghost in self._ghosts].index(self.policy)]
        is_better = misses[best] < (1 - self.settings.margin) * mine
        self._streak = self._streak + 1 if is_better else 0
        is_known = self._num_steps >= self.settings.min_steps
        if is_known and self._streak >= self.settings.patience:
            self._switch(self._ghosts[best].policy)

    def _on_cliff(self) -> list[bool]:
        return [is_on_cliff(each.policy, each.slots, self._step_experts) for each in self._ghosts]

    def _leave_cliff(self) -> None:
        """At once, and for whatever has missed least; at the start, for the mixture if it runs."""
        on_cliff = self._on_cliff()
        policies = [ghost.policy for ghost in self._ghosts]
        if on_cliff[policies.index(self.policy)] and not all(on_cliff):
            misses = np.where(on_cliff, np.inf, self._misses)
            is_safe_start = not self._choices and MIXTURE in policies
            self._switch(MIXTURE if is_safe_start else policies[int(misses.argmin())])

    def _switch(self, policy: Policy) -> None:
        self.policy = policy
        self.num_switches += 1
        self._streak = 0
