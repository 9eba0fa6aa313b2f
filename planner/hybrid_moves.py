"""What has to be moved when one plan over cards follows another: bytes on each lane, seconds.

What goes to a card comes out of RAM or, where RAM has no copy, off the disk. What leaves a card and
is to be in RAM from then on is not free: it comes back over the link or is read again. Where RAM
has room beside a plan it holds copies of what is on cards, and those need not come back. Keys and
values have one copy only, so they cross the link either way, before their room is given to others;
of weights the file is always a copy, so that nothing is lost if it is dropped first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shadowlane.planner.hybrid import Load, Plan, Site, demand, held_kv_nbytes, ram_room
from shadowlane.planner.hybrid_layouts import Question


@dataclass(frozen=True, slots=True)
class Migration:
    """Bytes that each lane carries, all at the same time, and how long the busiest of them takes.

    What comes off the disk for a card is counted on both lanes.
    """

    h2d_nbytes: tuple[float, ...]  # per card
    d2h_nbytes: tuple[float, ...]
    disk_nbytes: float
    seconds: float  # where no step uses these lanes

    @property
    def nbytes(self) -> float:
        return sum(self.h2d_nbytes) + sum(self.d2h_nbytes) + self.disk_nbytes

    def lanes(self) -> dict[str, float]:
        """Bytes by the name of the lane."""
        found = {"disk:0": self.disk_nbytes}
        for card, (there, back) in enumerate(zip(self.h2d_nbytes, self.d2h_nbytes, strict=True)):
            found[f"h2d:{card}"], found[f"d2h:{card}"] = there, back
        return found

    def part(self, part: float) -> Migration:
        """So much of all of it."""
        return Migration(
            tuple(each * part for each in self.h2d_nbytes),
            tuple(each * part for each in self.d2h_nbytes),
            self.disk_nbytes * part,
            self.seconds * part,
        )


def moves(question: Question, old: Plan, new: Plan) -> Migration:
    """What is to be moved from `old` to `new`, on the machine as the question has it."""
    machine, state = question.machine, question.state
    total = _Total([0.0] * len(machine.cards), [0.0] * len(machine.cards))
    d2h_rates = [card.d2h_bytes_per_s * state.link for card in machine.cards]
    disk_rate = machine.disk_bytes_per_s * state.disk
    is_faster = [rate >= disk_rate for rate in d2h_rates]  # than reading it again
    copied = copied_part(question, old)
    for load, before, after in zip(question.model.loads, old.sites, new.sites, strict=True):
        if before is not after and before != after:
            kv = held_kv_nbytes(load, question.work)
            total.add(load, before, after, kv, copied, is_faster)
    h2d, d2h, disk = _bytes(total.h2d), _bytes(total.d2h), *_bytes([total.disk])
    seconds = [disk / disk_rate if disk else 0.0]
    for card, nbytes in zip(machine.cards, h2d, strict=True):
        seconds.append(nbytes / (card.h2d_bytes_per_s * state.link))
    seconds += [nbytes / rate for nbytes, rate in zip(d2h, d2h_rates, strict=True)]
    return Migration(h2d, d2h, disk, max(seconds))


def copied_part(question: Question, plan: Plan) -> float:
    """Of the weights on cards, the part that RAM has room to hold as well."""
    need = demand(question.model, plan, question.work, question.machine, question.state)
    spare = ram_room(question.machine, question.state) - need.ram
    on_cards = sum(
        load.whole_nbytes * site.vram
        for load, site in zip(question.model.loads, plan.sites, strict=True)
    )
    return min(1.0, max(0.0, spare) / on_cards) if on_cards else 1.0


def _bytes(totals: Sequence[float]) -> tuple[float, ...]:
    """Less than one is rounding."""
    return tuple(each if each >= 1.0 else 0.0 for each in totals)


@dataclass(slots=True)
class _Total:
    h2d: list[float]
    d2h: list[float]
    disk: float = field(default=0.0)

    def add(
        self,
        load: Load,
        before: Site,
        after: Site,
        kv: float,
        copied: float,
        is_faster: list[bool],
    ) -> None:
        """One load. `kv`: bytes of keys and values it holds by now."""
        cards = range(len(self.h2d))
        changes = [after.vram * after.over[i] - before.vram * before.over[i] for i in cards]
        came = sum(each for each in changes if each > 0.0)
        gone = -sum(each for each in changes if each < 0.0)
        from_ram = min(came, before.ram)
        across = min(gone, came - from_ram)  # from card to card, through RAM
        kept = min(after.ram, before.ram - from_ram)
        back = min(gone - across, after.ram - kept)  # from cards into RAM
        self.disk += load.whole_nbytes * (came - from_ram - across + after.ram - kept - back)
        for card, change in enumerate(changes):
            if change > 0.0:
                self.h2d[card] += change * (load.whole_nbytes + kv)
            elif change < 0.0:
                again = load.whole_nbytes * (across + back) * (1.0 - copied) * -change / gone
                if is_faster[card]:
                    self.d2h[card] += again
                else:
                    self.disk += again
                self.d2h[card] -= change * kv
