"""What other programs are to take of an emulated machine, from what the user says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shadowlane.arguments import shown
from shadowlane.sizes import format_size, parse_size

if TYPE_CHECKING:
    from shadowlane.planner.hardware import Conditions, Hardware

PARTS = ("cpu", "gpu", "link", "disk")  # of a rate that is left
SIZES = ("vram", "ram")  # that are taken
OF_CARDS = ("gpu", "link", "vram")


def disturbances(value: Any, machine: Hardware) -> tuple[tuple[int, Conditions], ...]:
    """(decode steps, what is left from then on), in the order of the steps.

    value: texts such as "40:cpu=0.4,vram=1GiB", in any order. Raises ValueError, in one line, for
    what is no such list, for what `machine` does not have, and for two that begin together.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(
            f"disturb must be a list of texts such as '40:cpu=0.4'; got {shown(value)}"
        )
    found: dict[int, tuple[str, Conditions]] = {}
    for text in value:
        steps, state = _disturbance(text, machine)
        if steps in found:
            raise ValueError(
                f"disturb must name each token once; got {found[steps][0]!r} and {text!r}"
            )
        found[steps] = text, state
    return tuple((steps, found[steps][1]) for steps in sorted(found))


def _disturbance(text: Any, machine: Hardware) -> tuple[int, Conditions]:
    from shadowlane.planner.hardware import Conditions

    when, colon, what = text.partition(":") if isinstance(text, str) else ("", "", "")
    when = when.strip()
    if not colon or not (when.isascii() and when.isdigit()):
        raise ValueError(f"disturb must be TOKENS:WHAT=PART,...; got {shown(text)}")
    taken: dict[str, Any] = {}
    for entry in what.split(",") if what.strip() else ():
        name, equals, value = (part.strip() for part in entry.partition("="))
        if name not in PARTS + SIZES or not equals:
            known = ", ".join(PARTS + SIZES)
            raise ValueError(f"disturb must name {known} with =; got {entry!r} in {text!r}")
        if name in OF_CARDS and not machine.cards:
            raise ValueError(f"disturb {name} needs a card; {machine.name} has none; got {text!r}")
        key = f"{name}_taken_nbytes" if name in SIZES else name
        if key in taken:
            raise ValueError(f"disturb must name {name} once; got {text!r}")
        taken[key] = _size(name, value, machine) if name in SIZES else _part(name, value, text)
    return max(1, int(when)), Conditions(**taken)  # a step is the least that can be waited for


def _size(name: str, value: str, machine: Hardware) -> float:
    nbytes = parse_size(value, f"disturb {name}")
    most, owner = machine.ram_nbytes, machine.name
    if name == "vram":  # as much is taken of each card
        most, owner = min((card.vram_nbytes, card.name) for card in machine.cards)
    if nbytes > most:
        raise ValueError(
            f"disturb {name} must be at most the {format_size(int(most))} of {owner}; "
            f"got {format_size(nbytes)}"
        )
    return float(nbytes)


def _part(name: str, value: str, text: str) -> float:
    try:
        part = float(value)
    except ValueError:
        raise ValueError(f"disturb must give numbers; got {value!r} in {text!r}") from None
    if not 0.0 < part <= 1.0:
        raise ValueError(
            f"disturb {name} must be the part that is left, above 0 and at most 1; got {text!r}"
        )
    return part
