"""Charts as SVG and the page of a result: well-formed, self-contained, with the figures of the result."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from gammaray.bench.page import page
from gammaray.bench.svg import bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> dict[str, float]:
    """Height of each bar of a chart, by the text that a mouse shows."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if (title := rect.find(f"{SVG}title")) is not None:
            found[str(title.text)] = float(rect.attrib["height"])
    return found


def test_bar_chart_heights_are_proportional_to_the_values():
    svg = bar_chart("Speed", ["a & b", "c"], {"one": [1.0, 2.0], "<two>": [None, 4.0]}, base=1.0)
    found = bars(svg)
    assert list(found) == ["one, a & b: 1.00", "one, c: 2.00", "<two>, c: 4.00"]
    assert found["one, c: 2.00"] == pytest.approx(2 * found["one, a & b: 1.00"], abs=0.2)
    assert found["<two>, c: 4.00"] == pytest.approx(4 * found["one, a & b: 1.00"], abs=0.3)
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("largest", [0.0, 0.003, 0.99, 1.0, 7.3, 1234.5])
def test_bars_stay_in_the_picture_at_every_scale(largest):
    root = ElementTree.fromstring(bar_chart("t", ["g"], {"s": [largest]}))
    (bar,) = (rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None)
    assert float(bar.attrib["y"]) >= 58 - 0.1
    assert 2 <= sum(path.attrib.get("class") == "g" for path in root.iter(f"{SVG}path")) <= 8


def row(name: str, over_plain: float) -> dict[str, Any]:
    return {
        "system": f"gammaray-{name}",
        "tokens_per_s": {"median": 50 * over_plain, "values": [50 * over_plain]},
        "over_plain": {"median": over_plain, "values": [over_plain]},
        "speculation": {
            "tokens_per_cycle": 2.0, "alpha": 0.5, "acceptance_rate": 0.4, "gamma_mean": 3.0,
            "accepted_lengths": [10] if name == "0" else [5, 3, 2],
        },
        "first_token_ms": {"p50": 12.5, "p99": 40.0},
        "between_tokens": {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0},
    }  # fmt: skip


def test_page_has_every_chart_of_every_point_and_asks_nothing_of_the_network():
    result = {
        "provenance": {
            "date_utc": "2026-01-31T00:00:00Z",
            "command": "gammaray bench --prompt <b>",
            "hardware": {"cpu": "CPU & co", "cores": 2, "gpu": None},
            "versions": {"gammaray": "1.0"},
        },
        "models": {"target": "big", "draft": "small"},
        "points": [
            {
                "temperature": 0.7,
                "rows": [row("0", 1.0), row("4", 1.5), row("adaptive", 1.25)],
                "equality": {"compared": 8, "equal": 8, "different": []},
                "loops": {"repeated_share": [[0.9], [0.1]], "num_loops": 1, "kept": [1]},
                "categories": {
                    "code": {"gammaray-0": 1.0, "gammaray-4": 2.5},
                    "prose": {"gammaray-0": 1.0, "gammaray-4": 1.1},
                },
            }
        ],
    }
    text = page(result)
    speed, depth, latency = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert bars(speed).keys() >= {"gamma 4, all: 1.50", "gamma 4, code: 2.50", "adaptive, all: 1.25"}
    assert "draft tokens" in depth
    assert "gamma 4" in depth
    assert "gamma 0" not in depth
    assert bars(latency)["gamma 0, gap p95: 2.00"] > 0
    assert "8 of 8 completions" in text
    assert "1 of 2 completions repeat themselves" in text
    assert "--prompt &lt;b&gt;" in text
    assert "CPU &amp; co" in text
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
