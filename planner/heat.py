"""Heat: how often each expert was chosen, remembered from run to run beside the profile.

Text of one JSON object: {"format": "shadowlane-heat", "version": 1, "model": fingerprint,
"visits": steps counted, "counts": [one list per layer, one number per expert]}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shadowlane.planner.catalog import Catalog, HitCurve
from shadowlane.planner.routing import NOBODY, Trace

FORMAT, VERSION = "shadowlane-heat", 1
CORRELATED = 2  # tokens in a row that count as one
LEAST_TOKENS = 16  # of those, before rates say anything of the future
CURVE_POINTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Heat:
    """Raises ValueError for counts that cannot be."""

    model: str  # fingerprint of the files
    visits: float  # how often each layer was visited; a fraction once it has been decayed
    counts: npt.NDArray[np.float64]  # [layers, experts]: visits in which it was chosen

    def __post_init__(self) -> None:
        if self.counts.ndim != 2 or not self.counts.size:
            raise ValueError(f"counts must be [layers, experts]; got {self.counts.shape}")
        most = float(self.counts.max())
        if not (np.isfinite(self.counts).all() and self.counts.min() >= 0):
            raise ValueError("counts must be finite and not negative")
        if not np.isfinite(self.visits) or self.visits * (1 + 1e-6) + 1e-3 < most:
            raise ValueError(f"visits must be at least the largest count {most}; got {self.visits}")

    @property
    def rates(self) -> npt.NDArray[np.float64]:
        """[layers, experts] part of the visits in which each was chosen."""
        rates: npt.NDArray[np.float64] = self.counts / max(self.visits, 1e-9)
        return rates

    def check(self, model: str, num_layers: int, num_experts: int) -> None:
        """Raises ValueError unless it is of this model."""
        if (self.model, *self.counts.shape) != (model, num_layers, num_experts):
            raise ValueError(
                f"heat must be of {model} ({num_layers} layers of {num_experts} experts); it is of "
                f"{self.model} ({self.counts.shape[0]} of {self.counts.shape[1]})"
            )

    def to_json(self) -> str:
        said = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "visits": round(self.visits, 3),
            "counts": np.round(self.counts, 3).tolist(),
        }
        return json.dumps(said, separators=(",", ":"))


def heat_from_json(text: str) -> Heat:
    """Raises ValueError for anything that `to_json` would not have written."""
    try:
        said = json.loads(text)
        if (said["format"], said["version"]) != (FORMAT, VERSION):
            raise ValueError(
                f"must be {FORMAT} version {VERSION}; got {said['format']} {said['version']}"
            )
        counts = np.array(said["counts"], np.float64)
        return Heat(str(said["model"]), float(said["visits"]), counts)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"heat must be as it was saved: {what}") from error


def heat_of(trace: Trace) -> Heat:
    """Every token of `trace` is a visit."""
    counts = np.zeros((trace.num_layers, trace.num_experts))
    for layer in range(trace.num_layers):
        ids = trace.choices[:, layer].ravel()
        counts[layer] = np.bincount(ids[ids != NOBODY], minlength=trace.num_experts)
    return Heat(trace.model.name, trace.num_tokens, counts)


def remembered(heat: Heat) -> HitCurve | None:
    """How often the most used experts would be hit by text like that of earlier runs.

    Counts of few tokens flatter whoever is chosen by them: some experts were lucky. So each rate is
    drawn towards the mean, by as much as chance explains of how rates differ (empirical Bayes, one
    beta distribution for all). Neighbouring tokens choose alike: two count as one. None for so few
    tokens that they tell nothing.
    """
    tokens = heat.visits / CORRELATED
    if tokens < LEAST_TOKENS:
        return None
    rates = heat.rates
    mean = rates.mean(axis=1, keepdims=True)
    spread = float(((rates - mean) ** 2).mean()) - float((rates * (1 - rates)).mean()) / tokens
    if spread <= 0:  # nothing but chance
        drawn = np.broadcast_to(mean, rates.shape)
    else:
        strength = max(0.0, float((mean * (1 - mean)).mean()) / spread - 1)
        drawn = (rates * tokens + strength * mean) / (tokens + strength)
    found = np.cumsum(np.sort(drawn.reshape(-1))[::-1])
    if not found[-1] > 0:
        return None
    number = len(found)
    places = sorted({round(at * number / CURVE_POINTS) for at in range(1, CURVE_POINTS)} - {0})
    points = [(at / number, float(found[at - 1] / found[-1])) for at in places]
    return HitCurve(((0.0, 0.0), *points, (1.0, 1.0)), "remembered", round(heat.visits))


def informed(catalog: Catalog, heat: Heat | None) -> Catalog:
    """The same model, with what earlier runs tell of its experts' use."""
    hits = None if heat is None else remembered(heat)
    if catalog.experts is None or heat is None or hits is None:
        return catalog
    ranks = tuple(tuple(map(int, row)) for row in np.argsort(-heat.counts, axis=1, kind="stable"))
    return replace(catalog, experts=replace(catalog.experts, hits=hits, ranks=ranks))


def merged(old: Heat, new: Heat, decay: float = 0.5) -> Heat:
    """The heat after a run: what was known counts `decay` times as much as before it.

    Raises ValueError if they are of different models.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be between 0 and 1; got {decay}")
    old.check(new.model, *new.counts.shape)
    return Heat(new.model, old.visits * decay + new.visits, old.counts * decay + new.counts)
