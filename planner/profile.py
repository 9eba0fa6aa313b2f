"""A profile: what was measured of one machine with one model. What was not measured is None.

Kept as JSON under the fingerprints of both; the measuring itself happens elsewhere. GPU lanes and
transfer links (`h2d`, `d2h`, and the pairs that contend for the DRAM port) will add lists here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from shadowlane.planner.catalog import GroupKind

PROFILE_VERSION = 1

Phase = Literal["decode", "prefill"]
LaneKind = Literal["cpu"]  # "gpu" joins with the GPU lanes


@dataclass(frozen=True, slots=True)
class GroupFigure:
    """Seconds of one whole group, from warm instruction start to retirement, on one lane alone."""

    lane_kind: LaneKind
    threads: int  # of the lane
    kind: GroupKind
    layout: str
    units: int  # of the group measured, or of the part of it that was run
    cols: int
    phase: Phase
    rows: int  # activation rows: 1, 2, 4, 8 in decode; a chunk in prefill
    context: int  # tokens attended; 0 for groups other than `attn`
    seconds: float


@dataclass(frozen=True, slots=True)
class DiskFigure:
    """Bandwidth of direct reads of `nbytes` each with `depth` of them in flight."""

    nbytes: int
    depth: int
    bytes_per_s: float  # nothing else running
    contended_bytes_per_s: float | None = None  # while the compute lanes read DRAM


@dataclass(frozen=True, slots=True)
class Profile:
    hardware: str  # fingerprint
    model: str  # fingerprint
    groups: tuple[GroupFigure, ...] = ()
    disk: tuple[DiskFigure, ...] = ()
    dram_bytes_per_s: float | None = None  # all compute threads reading
    dram_contended_bytes_per_s: float | None = None  # the same while the disk lane reads
    instruction_s: float | None = None  # fixed cost of an instruction: waits met, counter written
    step_s: float | None = None  # fixed cost of a step: sampling, filling, waking
    gather_s: float | None = None  # one embedding row that is not resident
    # What a chunk gains per byte of expanded copies, all threads of a lane together: the time of
    # expanding, less what reading the larger copy takes. 0: nothing.
    copies_save_s_per_byte: float | None = None
    # What one expert that is not in RAM adds to a decode step, and to a chunk of a prompt: finding
    # a slot, reading, and what workers and readers take from each other. Of mixtures only.
    miss_s: float | None = None
    chunk_miss_s: float | None = None
    version: int = PROFILE_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises ValueError for another version or for keys that this version does not know."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"a profile must be a JSON object; got {type(data).__name__}")
        if data.get("version") != PROFILE_VERSION:
            raise ValueError(
                f"profile version must be {PROFILE_VERSION}; got {data.get('version')!r}"
            )
        data["groups"] = tuple(_read(GroupFigure, each) for each in data.get("groups", ()))
        data["disk"] = tuple(_read(DiskFigure, each) for each in data.get("disk", ()))
        return _read(Profile, data)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Names of the machine's figures that nobody measured."""
        missing = [
            each.name
            for each in fields(self)
            if each.name not in ("hardware", "model", "version")
            and getattr(self, each.name) in (None, ())
        ]
        if self.disk and all(each.contended_bytes_per_s is None for each in self.disk):
            missing.append("disk.contended_bytes_per_s")
        return tuple(missing)


Figure = TypeVar("Figure")


def _read(kind: type[Figure], data: Mapping[str, Any]) -> Figure:
    try:
        return kind(**data)
    except TypeError as error:
        raise ValueError(f"a profile's {kind.__name__} does not fit: {error}") from None
