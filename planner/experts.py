"""Which experts stay in RAM: a cache of equal slots, and the policies that compete for it.

A policy is a *score*, whose lowest goes first, within a *scope*, whose experts compete for the same
slots. Scores do not depend on what is resident, so caches may share them, and a running cache can
take another policy at any time.

static     rate of use that earlier runs remembered
lru        the last use
frequency  rate of use, decayed: half of it forgotten after `half_life` visits of the layer
mixture    rates over a short and a long time, and how many visits ago the last use was

Rates are per visit of a layer, which makes them comparable between layers: over one global pool the
mixture gives each layer as many slots as pay there, and needs no quotas. The last use is not:
layers come round in a cycle, and a global LRU with fewer slots than one step chooses experts
throws each one out just before its turn (`is_on_cliff`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shadowlane.planner.heat import Heat

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.intp]
Ids = npt.ArrayLike  # whole numbers, one dimension

ScoreKind = Literal["static", "lru", "frequency", "mixture"]
Scope = Literal["global", "layer"]

# Fitted to the routing of Qwen3-30B-A3B and Gemma-4-26B with 10 to 50 % of the experts in RAM, and
# to synthetic routing. Half or twice the times costs half a point of hit rate at most, half the
# recency a whole one.
SHORT_KEEP = 0.5 ** (1 / 32)  # half forgotten after 32 visits
LONG_KEEP = 0.5 ** (1 / 256)
RECENCY = 0.4  # what the visit just now is worth; 1 / (1 + age) of it later

LEAST_RATE = 1e-12  # keeps rates that decay for long away from denormal numbers, which are slow
EVEN = 1e-9  # prefers low ids where nothing else tells experts apart: spreads over the layers
COLD_VISITS = 4.0  # what not to know an expert counts, in visits without it
WARM_VISITS = 32.0  # most that remembered heat counts


@dataclass(frozen=True, slots=True)
class Policy:
    score: ScoreKind
    scope: Scope
    half_life: float = 32.0  # of frequency, in visits of a layer (decode steps)

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise ValueError(f"half_life must be positive; got {self.half_life}")

    @property
    def name(self) -> str:
        return f"{self.score}/{self.scope}"

    @property
    def words(self) -> str:
        """What it keeps, for people: "the last used, over all layers"."""
        return f"{_WORDS[self.score]}, {_WORDS[self.scope]}"


_WORDS: dict[str, str] = {
    "static": "the most used in earlier runs",
    "lru": "the last used",
    "frequency": "the most used lately",
    "mixture": "the most used lately and for long",
    "global": "over all layers",
    "layer": "so many of each layer",
}

MIXTURE = Policy("mixture", "global")
POLICIES = (
    Policy("static", "global"),
    Policy("static", "layer"),
    Policy("lru", "global"),
    Policy("lru", "layer"),
    Policy("frequency", "global"),
    Policy("frequency", "layer"),
    MIXTURE,
)


def policy_named(name: str) -> Policy:
    """Raises ValueError for a name that none has."""
    for policy in POLICIES:
        if policy.name == name:
            return policy
    known = ", ".join(policy.name for policy in POLICIES)
    raise ValueError(f"expert_policy must be one of {known}; got {name!r}")


def is_on_cliff(policy: Policy, slots: int, step_experts: float) -> bool:
    """Whether it hits nothing because one step chooses more experts than there are slots.

    step_experts: distinct experts that a step chooses over all layers, layers * top_k for one row.
    """
    return policy.score == "lru" and policy.scope == "global" and slots < step_experts


class Scores:
    """What each policy thinks each expert is worth, from the routes and from remembered heat.

    rows(policy): [layers, experts], kept up to date in place for the policies given here.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        policies: Iterable[Policy] = POLICIES,
        heat: Heat | None = None,
    ) -> None:
        shape = (num_layers, num_experts)
        if heat is not None and heat.counts.shape != shape:
            raise ValueError(f"heat must be {shape}; got {heat.counts.shape}")
        rates = np.zeros(shape) if heat is None else heat.rates.copy()
        self.expected: Floats = rates - EVEN * np.arange(num_experts)
        self._visits = [0] * num_layers
        known = COLD_VISITS if heat is None else min(max(heat.visits, COLD_VISITS), WARM_VISITS)
        self._known_visits = known
        self._num_routes = 0
        self._rows: dict[tuple[ScoreKind, float], Floats] = {}
        for policy in policies:
            self._rows.setdefault(_key(policy), self.expected.copy())
        self._lru = self._rows.get(("lru", 0.0))
        if self._lru is not None:
            self._lru -= self.expected.max() + 1  # before the first route, by expectation
        self._frequencies = [
            (list(rows), 0.5 ** (1 / half_life))
            for (score, half_life), rows in self._rows.items()
            if score == "frequency"
        ]
        self._mixture = self._rows.get(("mixture", 0.0))
        if self._mixture is not None:
            self._short, self._long = list(self.expected.copy()), list(self.expected.copy())
            self._last = list(np.full(shape, -1e6))

    @property
    def num_visits(self) -> int:
        """Of the layer that was visited most."""
        return max(self._visits)

    def rows(self, policy: Policy) -> Floats:
        return self._rows[_key(policy)]

    def touch(self, layer: int, ids: Keys) -> None:
        """A route of `layer` chose these experts (distinct, or counted once)."""
        self._num_routes += 1
        self._visits[layer] += 1
        if self._lru is not None:
            self._lru[layer, ids] = self._num_routes
        for rows, keep in self._frequencies:
            _decay(rows[layer], ids, keep)
        if self._mixture is not None:
            visits = self._visits[layer]
            short, long, last = self._short[layer], self._long[layer], self._last[layer]
            _decay(short, ids, SHORT_KEEP)
            # A plain mean until it has seen enough to forget.
            _decay(long, ids, min(LONG_KEEP, 1 - 1 / (self._known_visits + visits)))
            last[ids] = visits
            row = self._mixture[layer]
            np.subtract(visits + 1, last, out=row)  # 1 for what was chosen just now
            np.divide(RECENCY, row, out=row)
            row += short
            row += long


def _key(policy: Policy) -> tuple[ScoreKind, float]:
    return policy.score, policy.half_life if policy.score == "frequency" else 0.0


def _decay(rates: Floats, ids: Keys, keep: float) -> None:
    rates *= keep
    rates += LEAST_RATE
    rates[ids] += 1 - keep


class ExpertCache:
    """Residency of `slots` experts among num_layers * num_experts keys.

    key = layer * num_experts + expert, layers counted among those with experts. What the newest
    route chose is a victim only when nothing else is left and the caller says that it is done with.
    The order of calls for a route: `touch`, then for each miss `victim` and `remove` unless there
    is a free slot, and `insert` when its read is queued or has arrived.

    policy may be changed by `use` to any of `POLICIES`, or to the one given here. scores: shared
    with other caches; whoever made them touches them.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        slots: int,
        policy: Policy = MIXTURE,
        heat: Heat | None = None,
        *,
        scores: Scores | None = None,
    ) -> None:
        num_keys = num_layers * num_experts
        if not 1 <= slots <= num_keys:
            raise ValueError(f"slots must be between 1 and {num_keys}, all experts; got {slots}")
        self.num_layers, self.num_experts, self.slots = num_layers, num_experts, slots
        self.hits = 0  # choices that were resident when their route came
        self.misses = 0
        self._owns_scores = scores is None
        self._scores = scores or Scores(num_layers, num_experts, (*POLICIES, policy), heat)
        self._counts = np.zeros(num_keys)
        self._resident = np.zeros(num_keys, np.bool_)
        self._held = np.zeros(num_layers, np.intp)  # slots that each layer has
        self._num_held = 0
        share, over = divmod(slots, num_layers)
        self._quotas = share + (np.arange(num_layers) < over)  # fair shares, for scope "layer"
        self._is_newest = np.zeros(num_keys, np.bool_)  # chosen by the newest route
        self._newest: Keys = np.zeros(0, np.intp)
        self._priority = np.full(num_keys, np.inf)  # score of what may go, inf of the rest
        self.use(policy)

    def use(self, policy: Policy) -> None:
        """Evict by `policy` from now on. Raises KeyError if its scores are not kept."""
        self._score = self._scores.rows(policy).reshape(-1)
        self.policy = policy
        may_go = self._resident & ~self._is_newest
        self._priority = np.where(may_go, self._score, np.inf)

    def touch(self, layer: int, ids: Ids) -> Bools:
        """The newest route: [len(ids)] whether each was resident.

        ids: the distinct experts that it chose; given twice, one counts twice as hit or miss, and
        once in all else.
        """
        chosen: Keys = np.asarray(ids, np.intp)
        if self._owns_scores:
            self._scores.touch(layer, chosen)
        first = layer * self.num_experts
        keys = chosen + first
        self._counts[keys] += 1
        self._is_newest[self._newest] = False
        before = self._newest
        self._priority[before] = np.where(self._resident[before], self._score[before], np.inf)
        row = slice(first, first + self.num_experts)
        np.copyto(self._priority[row], self._score[row], where=self._resident[row])
        self._priority[keys] = np.inf
        self._is_newest[keys] = True
        self._newest = keys
        is_hit = self._resident[keys]
        num_hits = int(np.count_nonzero(is_hit))
        self.hits += num_hits
        self.misses += len(keys) - num_hits
        return is_hit

    def victim(self, layer: int, is_evictable: Bools | None = None) -> int | None:
        """The key to remove so that an expert of `layer` can come in; None if there is none.

        is_evictable: [keys] False where a read or a reader is in the way; None: nowhere.
        """
        for row in self._rows_by_claim(layer):
            pool = self._priority[row]
            place = int(pool.argmin())
            if pool[place] == np.inf:
                continue
            key: int = row.start + place
            if is_evictable is None or is_evictable[key]:
                return key
            pool = np.where(is_evictable[row], pool, np.inf)
            place = int(pool.argmin())
            if pool[place] < np.inf:
                return int(row.start + place)
        if is_evictable is not None:  # a step of so many experts that they come in waves
            done = self._newest[(self._resident & is_evictable)[self._newest]]
            if len(done):
                return int(done[self._score[done].argmin()])
        return None

    def victims(
        self, count: int, may_go: Bools, is_useless: Bools | None = None
    ) -> tuple[Keys, Keys]:
        """Up to `count` victims beforehand: (keys [lists, n], the list of each layer [layers]).

        Keys of a list rise by what they are worth; -1 where it has no more. may_go: [keys] of what
        is resident. Over one pool there is one list; by layers a list of each, and those that have
        fewer slots than their part take from the layer that has most over it. is_useless: [keys]
        what goes before all others; None: nothing.
        """
        pools = np.where(may_go, self._priority, np.inf)
        if is_useless is not None:
            pools[is_useless & may_go] = -np.inf
        if self.policy.scope == "global":
            pools, lists = pools[None], np.zeros(self.num_layers, np.intp)
        else:
            pools, lists = pools.reshape(self.num_layers, -1), np.arange(self.num_layers)
            over = self._held - self._quotas
            lists = np.where(over < 0, over.argmax(), lists)
        count = min(count, pools.shape[1])
        keys = np.sort(np.argpartition(pools, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(np.take_along_axis(pools, keys, 1), axis=1, kind="stable")
        keys = np.take_along_axis(keys, order, 1)
        is_none = np.take_along_axis(pools, keys, 1) == np.inf
        keys += pools.shape[1] * np.arange(len(pools))[:, None]
        keys[is_none] = -1
        return keys, lists

    def hold(self, resident: Bools) -> None:
        """What has a slot now, in place of all that was known. Raises ValueError beyond `slots`."""
        num_held = int(np.count_nonzero(resident))
        if num_held > self.slots:
            raise ValueError(f"{self.slots} slots must hold what is resident; got {num_held}")
        self._resident[:] = resident
        self._held[:] = resident.reshape(self.num_layers, -1).sum(1)
        self._num_held = num_held
        self.use(self.policy)

    def insert(self, key: int) -> None:
        """`key` has a slot now. Raises ValueError if it had one, or if there is none."""
        if self._resident[key]:
            raise ValueError(f"key must not be resident; got {key}")
        if self._num_held == self.slots:
            raise ValueError(f"one of {self.slots} slots must be free for key {key}; none is")
        self._resident[key] = True
        self._held[key // self.num_experts] += 1
        self._num_held += 1
        self._priority[key] = np.inf if self._is_newest[key] else self._score[key]

    def remove(self, key: int) -> None:
        """Its slot is free. Raises ValueError if it had none."""
        if not self._resident[key]:
            raise ValueError(f"key must be resident; got {key}")
        self._resident[key] = False
        self._held[key // self.num_experts] -= 1
        self._num_held -= 1
        self._priority[key] = np.inf

    def __contains__(self, key: int) -> bool:
        return bool(self._resident[key])

    def __len__(self) -> int:
        return self._num_held

    def resident(self) -> Keys:
        """Keys that have a slot, rising."""
        return np.flatnonzero(self._resident)

    def wanted(self, is_useless: Bools | None = None) -> Keys:
        """[slots] keys to fill the slots with at the start, most wanted first.

        By remembered heat; without, as many of each layer. is_useless: [keys] never wanted; where
        there are such, slots may be left over.
        """
        expected = self._scores.expected
        if is_useless is not None and is_useless.any():
            expected = np.where(is_useless.reshape(expected.shape), -np.inf, expected)
            by_heat = self._most_wanted(expected)
            return by_heat[~is_useless[by_heat]]
        return self._most_wanted(expected)

    def _most_wanted(self, expected: Floats) -> Keys:
        by_heat = np.argsort(-expected.reshape(-1), kind="stable")
        if self.policy.scope == "global":
            return by_heat[: self.slots]
        rank = np.argsort(np.argsort(-expected, axis=1, kind="stable"), axis=1)
        is_wanted = (rank < self._quotas[:, None]).reshape(-1)
        return by_heat[is_wanted[by_heat]]

    def heat(self, model: str) -> Heat:
        """What this run has seen, without what was remembered from earlier ones."""
        counts = self._counts.reshape(self.num_layers, self.num_experts)
        visits = float(self._scores.num_visits)
        return Heat(model, visits, counts.copy())

    def _rows_by_claim(self, layer: int) -> Iterator[slice]:
        """Ranges of keys, in the order in which they should give a slot to `layer`."""
        size = self.num_experts
        if self.policy.scope == "global":
            yield slice(0, len(self._priority))
            return
        if self._held[layer] < self._quotas[layer]:
            over = int((self._held - self._quotas).argmax())
            yield slice(over * size, over * size + size)
        # The layer that ran last is the one whose turn is furthest away.
        for back in range(self.num_layers):
            at = (layer - back) % self.num_layers
            yield slice(at * size, at * size + size)


def serve(cache: ExpertCache, layer: int, ids: Ids) -> Bools:
    """A route from beginning to end, as a disk lane would: what is missing is read and stays.

    Returns which of `ids` had to be read. Where there is no slot for one, it passes through.
    """
    chosen: Keys = np.asarray(ids, np.intp)
    is_missing = ~cache.touch(layer, chosen)
    for each in chosen[is_missing].tolist():
        key = layer * cache.num_experts + each
        if key in cache:
            continue
        if len(cache) == cache.slots:
            victim = cache.victim(layer)
            if victim is None:
                continue
            cache.remove(victim)
        cache.insert(key)
    return is_missing
