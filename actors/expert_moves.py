"""Routed experts that come to cards or leave them, beside the steps that run.

What comes is copied out of RAM where it has a slot there, and keeps that slot meanwhile. What
leaves is copied back to a slot before it is dropped, as far as there are slots that nobody needs:
free ones, or those of experts that live on cards. The others are read when a router chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shadowlane.actors.hosts import Pending, Remote


@dataclass(slots=True)
class ExpertMoves:
    """Of one placement; experts by their numbers, which go on behind those of all blocks."""

    first: int = 0  # number of the expert with key 0
    held: dict[int, int] = field(default_factory=dict)  # they keep their slots: arena offset
    leaving: tuple[int, ...] = ()  # no card holds them afterwards
    room: dict[int, int] = field(default_factory=dict)  # of these, those copied: to which offset

    @staticmethod
    def begin(
        disk: Remote, first: int, coming: Sequence[int], leaving: Mapping[int, tuple[Remote, int]]
    ) -> tuple[ExpertMoves, list[Pending]]:
        """leaving: of each its card's link, and where on the card it is.

        Returns the copies that are on their way. Raises LaneDied.
        """
        moves = ExpertMoves(first, leaving=tuple(leaving))
        pending: list[Pending] = []
        if coming or leaving:
            held = disk.call("hold_experts", moves._keys([*coming, *leaving])).result()
            moves.held = {first + key: at for key, at in held.items()}
        if leaving:
            room = disk.call("make_room", moves._keys(leaving)).result()
            moves.room = {first + key: at for key, at in room.items()}
        by_link: dict[int, tuple[Remote, list[tuple[int, int, int]]]] = {}
        for number, target in moves.room.items():
            link, source = leaving[number]
            by_link.setdefault(id(link), (link, []))[1].append((number, source, target))
        pending += [link.call("move", copies, "d2h") for link, copies in by_link.values()]
        return moves, pending

    def settle(self, disk: Remote, *, is_there: bool) -> list[int]:
        """All copies have ended. is_there: they are wanted; else their slots are given back.

        Returns what has left cards and keeps its slot until `release`, when the placement is in
        force. Raises LaneDied.
        """
        if self.room:
            disk.call("settle_experts", self._keys(self.room), is_there).result()
        kept = [n for n in self.leaving if is_there and (n in self.held or n in self.room)]
        self.release(disk, [number for number in self.held if number not in kept])
        self.held, self.room, self.leaving = {}, {}, ()
        return kept

    def release(self, disk: Remote, numbers: Sequence[int]) -> None:
        if numbers:
            disk.call("release_experts", self._keys(numbers))

    def _keys(self, numbers: Sequence[int] | Mapping[int, object]) -> list[int]:
        return [number - self.first for number in numbers]
