"""Routing traces: which experts the routers of a mixture chose, token by token.

A cache policy is judged on what real routers did, never on uniform choices: those make every cache
look like its size. Where nothing was recorded, `synthesize` imitates what is common to recorded
ones: how uneven the choices are, and how much of them stays from token to token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from shadowlane.planner.hit_rate import SKEW

NOBODY = -1  # in `Trace.choices`, where a token chose fewer than top_k experts of a layer


@dataclass(frozen=True, slots=True)
class RoutedModel:
    """What a trace says of the model it was recorded with. Raises ValueError if it cannot be."""

    name: str  # fingerprint of the files, or what the recorder called them
    num_experts: int  # of each layer
    top_k: int
    expert_nbytes: tuple[int, ...]  # of one expert of each layer that has experts
    dense_nbytes: tuple[int, ...]  # what a token reads of each such layer besides experts
    outside_nbytes: int = 0  # what a token reads outside these layers
    title: str = ""  # what people call it; empty where the recorder did not say

    def __post_init__(self) -> None:
        if not self.expert_nbytes or min(self.expert_nbytes) < 1:
            raise ValueError(f"expert_nbytes must be positive, one per layer; got {_few(self)}")
        if len(self.dense_nbytes) != self.num_layers or min(self.dense_nbytes) < 0:
            raise ValueError(
                f"dense_nbytes must be {self.num_layers} sizes, one per layer; "
                f"got {len(self.dense_nbytes)}"
            )
        if not 1 <= self.num_experts <= np.iinfo(np.int16).max:
            raise ValueError(f"experts must be between 1 and 32767; got {self.num_experts}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be between 1 and the {self.num_experts} experts; got {self.top_k}"
            )
        if self.outside_nbytes < 0:
            raise ValueError(f"outside_nbytes must not be negative; got {self.outside_nbytes}")

    @property
    def num_layers(self) -> int:
        return len(self.expert_nbytes)

    @property
    def label(self) -> str:
        """What to call it where people read: never a fingerprint in full."""
        is_fingerprint = len(self.name) >= 32 and not set(self.name) - set("0123456789abcdef")
        return self.title or (f"unnamed model {self.name[:8]}" if is_fingerprint else self.name)

    @property
    def all_dense_nbytes(self) -> int:
        """What every token reads, whatever its routers choose."""
        return sum(self.dense_nbytes) + self.outside_nbytes


def _few(model: RoutedModel) -> str:
    return str(list(model.expert_nbytes[:4]))


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one step asked of the experts."""

    num_rows: int
    is_prefill: bool
    routes: tuple[tuple[int, npt.NDArray[np.intp]], ...]  # (layer, distinct ids), if any


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What the routers chose for each token, in the order in which the tokens were computed."""

    model: RoutedModel
    choices: npt.NDArray[np.int16]  # [tokens, layers, top_k], best first, NOBODY at the end
    steps: npt.NDArray[np.int32]  # [tokens] rising: tokens of one forward pass have the same
    is_prefill: npt.NDArray[np.bool_]  # [tokens]
    turn_starts: tuple[int, ...]  # first token of each turn; (0,) where turns are not known

    @property
    def num_tokens(self) -> int:
        return len(self.choices)

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def num_experts(self) -> int:
        return self.model.num_experts

    @property
    def top_k(self) -> int:
        return self.model.top_k

    def part(self, first: int, last: int) -> Trace:
        """The tokens [first, last)."""
        starts = {0} | {start - first for start in self.turn_starts if first < start < last}
        return replace(
            self,
            choices=self.choices[first:last],
            steps=self.steps[first:last],
            is_prefill=self.is_prefill[first:last],
            turn_starts=tuple(sorted(starts)),
        )

    def turns(self) -> tuple[Trace, ...]:
        ends = (*self.turn_starts[1:], self.num_tokens)
        return tuple(
            self.part(start, end) for start, end in zip(self.turn_starts, ends, strict=True)
        )

    def halves(self) -> tuple[Trace, Trace]:
        """One part to choose with and one to score on: what did both would prove nothing.

        Cut where a turn begins, if one does in the middle half; else in the middle, between steps.
        Raises ValueError for fewer than two steps.
        """
        middle = self.num_tokens // 2
        cuts = [each for each in self.turn_starts if abs(each - middle) <= self.num_tokens // 4]
        cuts = [each for each in cuts if each > 0]
        if not cuts:
            cuts = [int(each) + 1 for each in np.flatnonzero(np.diff(self.steps))]
        if not cuts:
            raise ValueError("a trace must have at least two steps to be cut in halves; got one")
        cut = min(cuts, key=lambda each: abs(each - middle))
        return self.part(0, cut), self.part(cut, self.num_tokens)

    def passes(self) -> Iterator[Pass]:
        """The forward passes, in order. In a pass of several rows the ids of a route rise."""
        bounds = np.flatnonzero(np.diff(self.steps)) + 1
        for rows in np.split(np.arange(self.num_tokens), bounds):
            routes = []
            for layer in range(self.num_layers):
                ids = self.choices[rows, layer].ravel()
                ids = ids[ids != NOBODY].astype(np.intp)
                if len(rows) > 1:
                    ids = np.unique(ids)
                if len(ids):
                    routes.append((layer, ids))
            yield Pass(len(rows), bool(self.is_prefill[rows[0]]), tuple(routes))

    def check(self, name: str, num_layers: int, num_experts: int, top_k: int) -> None:
        """Raises ValueError unless it was recorded with this model."""
        mine = (self.model.name, self.num_layers, self.num_experts, self.top_k)
        if mine != (name, num_layers, num_experts, top_k):
            raise ValueError(
                f"the routing trace must be of {name} ({num_layers} layers, {num_experts} experts, "
                f"top {top_k}); it is of {mine[0]} ({mine[1]}, {mine[2]}, top {mine[3]})"
            )


def synthesize(
    *,
    num_tokens: int,
    num_layers: int = 48,
    num_experts: int = 128,
    top_k: int = 8,
    skew: Sequence[tuple[float, float]] = SKEW,
    locality: float = 0.45,
    seed: int = 0,
    expert_nbytes: int = 3 << 20,
    dense_nbytes: int = 12 << 20,
) -> Trace:
    """A trace of random decode tokens; which experts are hot is drawn anew for each layer.

    skew: (part of the experts, part of the choices that the hottest of them take), both rising.
    locality: correlation of a router's noise between one token and the next, 0 to below 1. How much
    of a token's choices were also the last one's follows from both; 0.45 gives what was recorded
    of two models (three in ten, of 128).

    Each router adds noise to fixed biases and takes the top k, as real ones do; the biases are
    fitted so that the shares come out. Raises ValueError.
    """
    if not 0 <= locality < 1:
        raise ValueError(f"locality must be from 0 to below 1; got {locality}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be positive; got {num_tokens}")
    model = RoutedModel(
        name=f"synthetic-{num_layers}x{num_experts}-top{top_k}-seed{seed}",
        title="synthetic routing",
        num_experts=num_experts,
        top_k=top_k,
        expert_nbytes=(expert_nbytes,) * num_layers,
        dense_nbytes=(dense_nbytes,) * num_layers,
    )
    random = np.random.default_rng(seed)
    ranked = _fit_biases(num_experts, top_k, tuple(skew))
    biases = np.stack([random.permutation(ranked) for _ in range(num_layers)])
    noise = random.standard_normal(biases.shape)
    choices = np.empty((num_tokens, num_layers, top_k), np.int16)
    for token in range(num_tokens):
        logits = biases + noise
        top = np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]
        order = np.argsort(-np.take_along_axis(logits, top, 1), axis=1)
        choices[token] = np.take_along_axis(top, order, 1)
        fresh = random.standard_normal(biases.shape)
        noise = locality * noise + np.sqrt(1 - locality**2) * fresh
    steps = np.arange(num_tokens, dtype=np.int32)
    return Trace(model, choices, steps, np.zeros(num_tokens, np.bool_), (0,))


def _use_by_rank(
    num_experts: int, top_k: int, skew: Sequence[tuple[float, float]]
) -> npt.NDArray[np.float64]:
    """[experts] how often a token chooses the hottest expert, the second, ..., by the shares."""
    parts = np.array([0.0, *(part for part, _ in skew), 1.0])
    shares = np.array([0.0, *(share for _, share in skew), 1.0])
    slopes = np.diff(shares) / np.diff(parts)
    if (np.diff(parts) <= 0).any() or (np.diff(slopes) > 1e-9).any() or slopes[-1] < 0:
        raise ValueError(f"skew must be rising shares that rise ever less; got {list(skew)}")
    edges = np.interp(np.arange(num_experts + 1) / num_experts, parts, shares)
    use: npt.NDArray[np.float64] = np.diff(edges) * top_k
    # None is chosen more than once per token: what is over goes to the next ones.
    for rank in range(num_experts - 1):
        use[rank + 1 :] += max(0.0, use[rank] - 0.98) / (num_experts - rank - 1)
        use[rank] = min(use[rank], 0.98)
    return use


@cache
def _fit_biases(
    num_experts: int, top_k: int, skew: tuple[tuple[float, float], ...]
) -> npt.NDArray[np.float64]:
    """[experts] biases under which the top k of (bias + normal noise) are used as `skew` says."""
    use = _use_by_rank(num_experts, top_k, skew)
    samples = 1_000_000 // num_experts
    noise = np.random.default_rng(0).standard_normal((samples, num_experts))
    wanted = np.log(np.maximum(use, 1e-4))
    biases: npt.NDArray[np.float64] = 0.4 * wanted
    for _ in range(25):
        top = np.argpartition(-(noise + biases), top_k - 1, axis=1)[:, :top_k]
        found = np.bincount(top.ravel(), minlength=num_experts) / samples
        biases += 0.4 * (wanted - np.log(np.maximum(found, 1e-4)))
    biases.flags.writeable = False
    return biases
