"""A computer as the planner sees it: cards, links, processor, memory, disk; rates and capacities.

Read from a hardware file, in which every figure stands beside its source:

    vram_bytes_per_s: {value: 448e9, source: "maker's table, GDDR6 256 bit at 14 Gbit/s"}

`Conditions` say what a machine has left while other programs use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Card:
    """One graphics card and its link. Rates are what it reaches, as far as the sources say."""

    name: str
    vram_nbytes: float
    reserved_nbytes: float  # driver, context and desktop: no plan may use it
    vram_bytes_per_s: float  # read by matrix-vector products of large matrices
    flops: float  # of matrix products of many rows, dense, per second
    h2d_bytes_per_s: float  # from pinned memory, large copies
    d2h_bytes_per_s: float
    launch_s: float  # what each group costs beside its bytes and operations
    crossing_s: float  # handing one small activation to or from the processor
    # of an engine that runs, see `rings.py`: the ring, whatever plans bring; None: no engine
    # runs, and a plan that brings anything has room for it
    ring_nbytes: float | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    cards: tuple[Card, ...]
    cpu_bytes_per_s: float  # all cores together, in matrix-vector products
    cpu_flops: float  # all cores together, in matrix products of many rows
    cpu_launch_s: float  # what each group costs beside its bytes and operations
    dram_bytes_per_s: float  # the port that cores, links and disk share
    ram_nbytes: float
    reserved_nbytes: float  # system, interpreter, desktop
    disk_bytes_per_s: float  # large direct reads
    # of an engine that runs, see `rings.py`; None: none does
    ring_nbytes: float | None = None  # for what is read, where anything is
    experts_nbytes: float | None = None  # slots for routed experts, whatever is in them


def with_small_matrices(machine: Hardware, nbytes: float) -> Hardware:
    """The machine with what groups lose because a matrix of `nbytes` reaches half of a rate.

    That is as long as reading so many bytes takes, whatever a matrix has itself: a fixed cost of
    each group, as launches are.
    """
    cards = tuple(
        replace(card, launch_s=card.launch_s + nbytes / card.vram_bytes_per_s)
        for card in machine.cards
    )
    launch_s = machine.cpu_launch_s + nbytes / machine.cpu_bytes_per_s
    return replace(machine, cards=cards, cpu_launch_s=launch_s)


LAID_OUT = frozenset({"ring_nbytes", "experts_nbytes"})  # in no file

RATES = frozenset(
    field.name
    for kind in (Card, Hardware)
    for field in fields(kind)
    if field.name.endswith(("_per_s", "flops"))
)


# (least, most, unit) of figures: one outside is in other units, or of no machine there is.
_TIMES = (0.0, 0.1, "seconds")
_RATES = (1e6, 1e14, "bytes per second")
_OPERATIONS = (1e8, 1e18, "operations per second")
_SIZES = (1e6, 1e15, "bytes")
PLAUSIBLE: Mapping[str, tuple[float, float, str]] = {
    name: next(
        limits
        for end, limits in (
            ("bytes_per_s", _RATES),
            ("flops", _OPERATIONS),
            ("_nbytes", _SIZES),
            ("_s", _TIMES),
        )
        if name.endswith(end)
    )
    for kind in (Card, Hardware)
    for name in (field.name for field in fields(kind))
    if name not in ("name", "cards")
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """What other programs leave: parts of rates (1.0: all of it) and bytes they hold."""

    cpu: float = 1.0
    gpu: float = 1.0
    link: float = 1.0
    disk: float = 1.0
    vram_taken_nbytes: float = 0.0  # of each card
    ram_taken_nbytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cpu", "gpu", "link", "disk"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in (0, 1]; got {getattr(self, name)}")


CALM = Conditions()


def read_hardware(data: Any) -> Hardware:
    """From the contents of a hardware file. Raises ValueError naming the key, rule and value."""
    if data is None:
        raise ValueError("a hardware file must hold keys and values; it is empty")
    if not isinstance(data, Mapping):
        raise ValueError(f"a hardware file must hold keys and values; got {type(data).__name__}")
    cards = data.get("cards")
    if not isinstance(cards, Sequence) or isinstance(cards, str):
        raise ValueError(f"cards must be a list, one entry for each card; got {cards!r}")
    machine = {key: value for key, value in data.items() if key != "cards"}
    read = tuple(
        Card(**_figures(Card, card, f"cards[{index}]")) for index, card in enumerate(cards)
    )
    for index, card in enumerate(read):
        if card.reserved_nbytes >= card.vram_nbytes:
            raise ValueError(
                f"reserved_nbytes of cards[{index}] must be less than its vram_nbytes, "
                f"{card.vram_nbytes:g}; got {card.reserved_nbytes:g}"
            )
    return Hardware(**_figures(Hardware, machine, "the file", without=("cards",)), cards=read)


def _figures(
    kind: type[Card] | type[Hardware], data: Any, where: str, without: Sequence[str] = ()
) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must hold keys and values; got {data!r}")
    wanted = [field.name for field in fields(kind) if field.name not in LAID_OUT.union(without)]
    unknown = [str(key) for key in data if key not in wanted]
    missing = [name for name in wanted if name not in data]
    if unknown:
        raise ValueError(f"{where} must have only {', '.join(wanted)}; got {', '.join(unknown)}")
    if missing:
        raise ValueError(f"{where} must have {', '.join(wanted)}; {', '.join(missing)} is missing")
    found: dict[str, Any] = {}
    for name in wanted:
        if name == "name":
            if not isinstance(data[name], str) or not data[name]:
                raise ValueError(f"name of {where} must be a text; got {data[name]!r}")
            found[name] = data[name]
        else:
            found[name] = _figure(data[name], f"{name} of {where}", is_rate=name in RATES)
            _check_unit(name, found[name], where)
    return found


def _check_unit(name: str, value: float, where: str) -> None:
    least, most, unit = PLAUSIBLE[name]
    if value and not least <= value <= most:
        raise ValueError(
            f"{name} of {where} must be in {unit}, which is {least:g} to {most:g} of any machine; "
            f"got {value:g}"
        )


def _figure(entry: Any, where: str, is_rate: bool) -> float:
    """YAML reads 448e9 as a text: a number is whatever float() takes. Times divide by rates."""
    if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
        raise ValueError(f"{where} must be {{value: ..., source: ...}}; got {entry!r}")
    if not isinstance(entry["source"], str) or not entry["source"].strip():
        raise ValueError(f"source of {where} must say where the figure is from; it is empty")
    try:
        value = float(entry["value"])
    except (TypeError, ValueError):
        value = -1.0
    is_allowed = 0.0 < value < float("inf") or (value == 0.0 and not is_rate)
    if isinstance(entry["value"], bool) or not is_allowed:
        rule = "a number above 0" if is_rate else "a number, 0 or more"
        raise ValueError(f"{where} must be {rule}; got {entry['value']!r}")
    return value
