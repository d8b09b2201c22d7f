"""Bar charts as SVG text: no library, readable on light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle

COLOURS = ("#8a8f98", "#3b8fd9", "#e08a1e", "#2fa37c", "#b765b5", "#d5603a", "#6c7ae0", "#b0a11a")
"""Of the series, in order; mid tones that differ for colour-blind people, too. Grey is the base line."""

_STYLE = """text{font:12px system-ui,sans-serif;fill:#1f2328}
.t{font-size:14px;font-weight:600}.m{fill:#59636e}.g{stroke:#8884;stroke-width:1}.b{stroke:#888;stroke-width:1}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9198a1}}"""
_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 58, 30
_PLOT_W, _PLOT_H = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_MAX_TICKS = 6


def bar_chart(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str = "",
    base: float | None = None,
    colours: Sequence[str] = COLOURS,
) -> str:
    """Return grouped bars, each series with a value in each group and a number above it; None leaves one out.

    A line marks the value `base`, such as 1.0 for ratios.
    """
    values = [value for found in series.values() for value in found if value is not None]
    top, ticks = _scale(max(values, default=1.0))
    group_w = _PLOT_W / max(1, len(groups))
    bar_w = group_w * 0.86 / max(1, len(series))
    parts = _frame(title, unit, dict(zip(series, cycle(colours), strict=False)), ticks, top)
    for i, (name, found) in enumerate(series.items()):
        colour = colours[i % len(colours)]
        for j, value in enumerate(found):
            if value is None:
                continue
            x = _LEFT + group_w * (j + 0.07) + bar_w * i
            y = _TOP + _PLOT_H * (1 - value / top)
            label = escape(f"{name}, {groups[j]}: {_text(value)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar_w * 0.92:.1f}" height="{_TOP + _PLOT_H - y:.1f}" '
                f'fill="{colour}" rx="1.5"><title>{label}</title></rect>'
            )
            if bar_w >= 22:
                at = x + bar_w * 0.46
                parts.append(f'<text x="{at:.1f}" y="{y - 4:.1f}" text-anchor="middle">{_text(value)}</text>')
    for j, group in enumerate(groups):
        at = _LEFT + group_w * (j + 0.5)
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(group)}</text>')
    if base is not None:
        y = _TOP + _PLOT_H * (1 - base / top)
        parts.append(f'<path class="b" stroke-dasharray="4 3" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT + 4}" width="{_WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def _frame(title: str, unit: str, names: Mapping[str, str], ticks: Sequence[float], top: float) -> list[str]:
    parts = [f'<text class="t" x="{_LEFT}" y="18">{escape(title)}</text>']
    x = float(_LEFT)
    for name, colour in names.items():
        parts.append(f'<rect x="{x:.0f}" y="30" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="39">{escape(name)}</text>')
        x += 32 + 6.6 * len(name)
    parts.append(f'<text class="m" x="{_LEFT - 6}" y="{_TOP - 6}" text-anchor="end">{escape(unit)}</text>')
    for tick in ticks:
        y = _TOP + _PLOT_H * (1 - tick / top)
        parts.append(f'<path class="g" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="m" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _scale(largest: float) -> tuple[float, list[float]]:
    """Return the top of the axis and its ticks: multiples of 1, 2 or 5 times a power of ten."""
    largest = max(largest, 1e-9) * 1.08
    power = 10.0 ** math.floor(math.log10(largest / _MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if largest / (power * factor) <= _MAX_TICKS)
    count = math.floor(largest / step)
    return largest, [round(step * i, 10) for i in range(count + 1)]


def _text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
