"""Decode steps of a card in captured pieces: what lies between two waits is one graph.

Waits and writes of counters stay between the graphs, for the values in a graph are frozen. So do
kernels that the host has to shape anew in each step: those over blocks that are brought, which lie
in another slot each time, attention and experts where Triton does not run (`reads_device_alone`).
A chunk of a prompt is never captured.

A graph is good for one placement and one number of rows. The first step of a kind starts its
kernels one by one, the second is captured while nothing waits, before it begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shadowlane.actors.card_program import CardInstruction
from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.actors.cuda.streams import CardStream

MOST_KINDS = 8  # of one placement: each takes memory of the driver's


@dataclass(frozen=True, slots=True)
class Kind:
    """What a graph depends on, beside device memory."""

    placement_id: int
    num_decode: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured piece of a program: its instructions from where it begins to `end`."""

    end: int
    handle: int


def cut_segments(
    instructions: Sequence[CardInstruction], may_capture: Callable[[CardInstruction], bool]
) -> list[tuple[int, int]]:
    """First instruction and end of each piece without a wait, or an awaited counter, inside."""
    found: list[tuple[int, int]] = []
    first: int | None = None
    for number, each in enumerate(instructions):
        if first is not None and (each.waits or not may_capture(each)):
            found.append((first, number))
            first = None
        if may_capture(each):
            first = number if first is None else first
            if each.is_awaited:
                found.append((first, number + 1))
                first = None
    if first is not None:
        found.append((first, len(instructions)))
    return found


class StepGraphs:
    """The graphs of one lane. All calls come from the lane's thread, but for `close`."""

    def __init__(self, driver: Driver, stream: CardStream) -> None:
        self._driver, self._stream = driver, stream
        self._graphs: dict[Kind, dict[int, Graph]] = {}
        self._seen: Counter[Kind] = Counter()
        self.why_not: str | None = None  # nothing is captured any more

    def of(self, kind: Kind) -> Mapping[int, Graph]:
        """Graphs by the instruction that they begin with; none for a kind that has none."""
        return self._graphs.get(kind, {})

    def is_wanted(self, kind: Kind) -> bool:
        """Whether a step of this kind, which is about to begin, should be captured."""
        self._seen[kind] += 1
        if self.why_not is not None or kind in self._graphs or self._seen[kind] < 2:
            return False
        alike = sum(each.placement_id == kind.placement_id for each in self._graphs)
        return alike < MOST_KINDS and self._stream.is_idle()

    def capture(
        self,
        kind: Kind,
        segments: Sequence[tuple[int, int]],
        compute: Callable[[int, int, int], None],
    ) -> None:
        """Capture each piece. compute: starts the kernels of first..end on a stream's handle.

        NOTE: a driver that refuses costs nothing but the time of its launches, so it is not asked
        again, and kernels are started one by one as before.
        """
        found: dict[int, Graph] = {}
        try:
            for first, end in segments:

                def work(handle: int, first: int = first, end: int = end) -> None:
                    compute(handle, first, end)

                found[first] = Graph(end, self._stream.capture(work))
        except (CudaError, RuntimeError) as error:
            self._driver.clear_error()
            self.why_not = str(error)
            self._destroy(found.values())
            return
        self._graphs[kind] = found

    def keep(self, placement_ids: Collection[int]) -> None:
        """Destroy the graphs of all other placements; none of them may be running."""
        for kind in [each for each in self._seen if each.placement_id not in placement_ids]:
            del self._seen[kind]
            self._destroy(self._graphs.pop(kind, {}).values())

    def close(self) -> None:
        self.keep(())

    def _destroy(self, graphs: Collection[Graph]) -> None:
        for graph in graphs:
            self._driver.destroy_graph(graph.handle)
