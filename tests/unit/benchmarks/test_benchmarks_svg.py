"""Charts as SVG: well-formed, with the figures that they are given."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.svg import bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> dict[str, float]:
    """Height of each bar of a chart, by the text that a mouse shows."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if (title := rect.find(f"{SVG}title")) is not None:
            found[str(title.text)] = float(rect.attrib["height"])
    return found


def test_bar_chart_heights_are_proportional_to_the_values() -> None:
    svg = bar_chart("Speed", ["a & b", "c"], {"one": [1.0, 2.0], "<two>": [None, 4.0]}, base=1.0)
    found = bars(svg)
    assert list(found) == ["one, a & b: 1.00", "one, c: 2.00", "<two>, c: 4.00"]
    assert found["one, c: 2.00"] == pytest.approx(2 * found["one, a & b: 1.00"], abs=0.2)
    assert found["<two>, c: 4.00"] == pytest.approx(4 * found["one, a & b: 1.00"], abs=0.3)
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("largest", [0.0, 0.003, 0.99, 1.0, 7.3, 1234.5])
def test_bars_stay_in_the_picture_at_every_scale(largest: float) -> None:
    root = ElementTree.fromstring(bar_chart("t", ["g"], {"s": [largest]}))
    (bar,) = (rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None)
    assert float(bar.attrib["y"]) >= 58 - 0.1
    assert 2 <= sum(path.attrib.get("class") == "g" for path in root.iter(f"{SVG}path")) <= 8
