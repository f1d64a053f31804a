"""Small inline SVG plots. Colours come from the page's CSS classes, so they follow dark mode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_WIDTH, _HEIGHT, _TOP, _BOTTOM = 640, 150, 6, 32
_BINS_PER_OCTAVE = 4


def log_histogram(values: Sequence[float], name: str, css: str, low: float, high: float) -> str:
    """SVG histogram of positive `values` on a log2 axis from `low` to `high`, with a line at 1x.

    Values outside fall into the first or last bin. `css` is the class of the bars.
    """
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    last = max(last, first + 1)
    bins = (last - first) * _BINS_PER_OCTAVE
    counts = Counter(
        min(bins - 1, max(0, math.floor((math.log2(v) - first) * _BINS_PER_OCTAVE))) for v in values
    )
    tallest = max(counts.values(), default=1)
    step, floor = _WIDTH / bins, _HEIGHT - _BOTTOM
    bars = []
    for i in sorted(counts):
        height = (floor - _TOP) * counts[i] / tallest
        left, right = (2 ** (first + j / _BINS_PER_OCTAVE) for j in (i, i + 1))
        bars.append(
            f'<rect class="{css}" x="{i * step + 1:.1f}" y="{floor - height:.1f}" '
            f'width="{step - 2:.1f}" height="{height:.1f}" rx="2">'
            f"<title>{left:.2f}x to {right:.2f}x: {counts[i]}</title></rect>"
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        f"{''.join(bars)}{_axis(first, last, floor)}</svg>"
    )


def _axis(first: int, last: int, floor: float) -> str:
    scale = _WIDTH / (last - first)
    every = max(1, math.ceil((last - first) / 8))
    parts = [f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{floor}" y2="{floor}"/>']
    for power in range(first, last + 1):
        x = (power - first) * scale
        if power == 0:
            parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{floor}"/>')
        if power % every == 0:
            anchor = "start" if power == first else "end" if power == last else "middle"
            label = f"{2**power}x" if power >= 0 else f"1/{2**-power}x"
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">'
                f"{label}</text>"
            )
    return "".join(parts)
