"""The lanes of one emulated step as an SVG picture: who works on what, and when.

Layouts stand below each other on one axis of time, so that the shorter step is seen to be shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from shadowlane.actors.emulation import Span

WIDTH, LEFT, RIGHT = 1200, 90, 20
HEAD, PANEL_HEAD, LANE, GAP, FOOT = 84, 30, 22, 4, 34
LEAST_PX = 0.4  # between bars of one kind that are drawn as one
COLOURS = {
    "attn": ("attention", "#c8553d"),
    "qkv": ("q, k, v", "#3d6fb6"),
    "o": ("o", "#7aa6d9"),
    "router": ("router", "#8a8a8a"),
    "gate_up": ("gate and up", "#4f9d69"),
    "down": ("down", "#9ccb86"),
    "experts": ("experts", "#d99a2b"),
    "lm_head": ("head", "#7b5ea7"),
}
OTHER = ("other", "#555555")


@dataclass(frozen=True, slots=True)
class Panel:
    """One layout's step."""

    title: str
    spans: Sequence[Span]
    seconds: float


def lanes_svg(title: str, panels: Sequence[Panel], lanes: Sequence[str]) -> str:
    """A row for each of `lanes` in each of `panels`. Raises ValueError where there is no panel."""
    if not panels:
        raise ValueError("panels must be one at least; got none")
    longest_s = max(panel.seconds for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    panel_height = PANEL_HEAD + len(lanes) * (LANE + GAP)
    height = HEAD + len(panels) * panel_height + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}, emulated</title>',
        "<style>text { font: 12px sans-serif; fill: #222 } .head { font-size: 15px; "
        "font-weight: bold } .name { font-weight: bold } .quiet { fill: #666; font-size: 11px } "
        ".page { fill: #fff } .lane { fill: #f3f3f3 } .end { stroke: #222; stroke-width: 1.5 } "
        ".tick { stroke: #ccc }</style>",
        f'<rect class="page" x="0" y="0" width="{WIDTH}" height="{height}"/>',
        _text(16, 26, f"{title}, emulated", "head"),
        _text(
            16,
            44,
            "One step on a virtual clock: nothing was run. What is brought or read ahead may be "
            "for the step after this one.",
            "quiet",
        ),
        *_legend(panels),
        *_axis(longest_s, scale, height - FOOT),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, lanes, HEAD + number * panel_height, scale)
    return "\n".join([*parts, "</svg>", ""])


def _legend(panels: Sequence[Panel]) -> Iterator[str]:
    there = {span.kind for panel in panels for span in panel.spans}
    at = 16.0
    for name, colour in [look for kind, look in COLOURS.items() if kind in there] + (
        [OTHER] if there - set(COLOURS) else []
    ):
        yield f'<rect x="{at:g}" y="56" width="12" height="12" fill="{colour}"/>'
        yield _text(at + 17, 66, name, "quiet")
        at += 40 + 6.2 * len(name)


def _axis(longest_s: float, scale: float, bottom: float) -> Iterator[str]:
    step_s = _nice(longest_s / 8)
    for count in range(floor(longest_s / step_s) + 1):
        at = LEFT + count * step_s * scale
        yield f'<line class="tick" x1="{at:.1f}" y1="{HEAD}" x2="{at:.1f}" y2="{bottom:g}"/>'
        yield _text(at, bottom + 16, f"{count * step_s * 1e3:g} ms", "quiet", "middle")


def _nice(least: float) -> float:
    """1, 2 or 5 times a power of ten, `least` or more."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _panel(panel: Panel, lanes: Sequence[str], top: float, scale: float) -> Iterator[str]:
    yield _text(16, top + 20, panel.title, "name")
    end = LEFT + panel.seconds * scale
    for row, lane in enumerate(lanes):
        above = top + PANEL_HEAD + row * (LANE + GAP)
        yield (
            f'<rect class="lane" x="{LEFT}" y="{above:g}" width="{panel.seconds * scale:.1f}" '
            f'height="{LANE}"/>'
        )
        yield _text(16, above + 15, lane)
        for kind, start, stop in _bars(panel.spans, lane, scale, panel.seconds):
            colour = COLOURS.get(kind, OTHER)[1]
            yield (
                f'<rect x="{LEFT + start:.2f}" y="{above + 2:g}" width="{stop - start:.2f}" '
                f'height="{LANE - 4}" fill="{colour}"/>'
            )
    bottom = top + PANEL_HEAD + len(lanes) * (LANE + GAP)
    yield (
        f'<line class="end" x1="{end:.1f}" y1="{top + PANEL_HEAD:g}" x2="{end:.1f}" '
        f'y2="{bottom:g}"/>'
    )


def _bars(
    spans: Sequence[Span], lane: str, scale: float, seconds: float
) -> Iterator[tuple[str, float, float]]:
    """(kind, start, end) in pixels, within the step; neighbours of one kind are one."""
    kind, start, stop = "", 0.0, 0.0
    for span in sorted((each for each in spans if each.lane == lane), key=lambda each: each[3]):
        begin, end = (max(0.0, min(each, seconds)) * scale for each in (span.start_s, span.end_s))
        if kind == span.kind and begin - stop < LEAST_PX:
            stop = max(stop, end)
            continue
        if kind:
            yield kind, start, stop
        kind, start, stop = span.kind, begin, end
    if kind:
        yield kind, start, stop


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    of = f' class="{style}"' if style else ""
    return f'<text{of} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
