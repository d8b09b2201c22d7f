"""The pages for operators name only existing files, commands, values, settings and alerts."""

import json
import re

import pytest
import yaml

from gammaray.deploy.serve_config import APPLICATIONS
from tests.support import theory
from tests.support.chart.chart_helpers import CHART, EXAMPLES, ROOT, cluster

NAMES = ("install", "sizing", "drafters", "troubleshooting", "security", "observability")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_chart_readme_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", (CHART / "README.md").read_text()):
        assert link.startswith("https://") or (CHART / link).exists(), link


@pages
def test_values_exist(page):
    values = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for path in re.findall(r"`([a-z]\w*(?:\.[a-zA-Z]\w*)+)(?:[:=][^`]*)?`", page.read_text()):
        first, *rest = path.split(".")
        if first not in values or first in ("scaling",) or "settings" in rest:
            continue  # an attribute, a file, or a setting
        entry = values[first]
        for key in rest:
            if "properties" not in entry:
                break  # a map in the form of Kubernetes or of an operator
            assert key in entry["properties"], path
            entry = entry["properties"][key]


FOREIGN = {
    *("cache_prompt", "id_slot", "return_token_ids", "cache_salt", "owned_by"),
    *(
        "parentbased_traceidratio",
        "invalid_argument",
        "deadline_exceeded",
        "max_tokens",
        "http_proxy",
        "no_proxy",
    ),
}
"""Names of model servers that draft, of OpenTelemetry, of gRPC, of requests and of proxies."""


@pages
def test_settings_exist(page):
    fields = {name for application in APPLICATIONS.values() for name in application.settings.model_fields}
    values = (CHART / "values.yaml").read_text()
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)(?::[^`]*)?`", page.read_text()):
        known = (
            name in fields | FOREIGN
            or name in values
            or name.startswith(("gammaray_", "target_", "deadline_"))
        )
        assert known, name


def test_alerts_are_all_explained():
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    names = {rule["alert"] for group in rules for rule in group["rules"]}
    page = (ROOT / "docs" / "observability.md").read_text()
    assert set(re.findall(r"`(Gammaray\w+)`", page)) == names


def test_patch_for_the_number_of_pods_fits_the_cluster():
    (text,) = re.findall(r"--patch '(\[.*?\])'", (ROOT / "docs" / "install.md").read_text(), re.DOTALL)
    first, *others = json.loads(text)
    *_, number, name = first["path"].split("/")
    group = cluster()["workerGroupSpecs"][int(number)]
    assert first["op"] == "test"
    assert group[name] == first["value"]
    for operation in others:
        assert operation["op"] == "replace"
        assert operation["path"].rpartition("/")[0] == first["path"].rpartition("/")[0]
        assert operation["path"].rpartition("/")[2] in group


def cells(page, heading):
    """Return the cells of the table whose first header cell is `heading`, by row."""
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def test_table_of_speedups_is_the_formula():
    (_, *costs), *rows = cells("sizing.md", "α")
    costs = [float(cost.rpartition(" ")[2]) for cost in costs]
    assert len(rows) == 5
    for alpha, *shown in rows:
        for cost, cell in zip(costs, shown, strict=True):
            gamma = max(range(1, 17), key=lambda gamma: theory.speedup(float(alpha), gamma, cost))
            assert cell == f"{theory.speedup(float(alpha), gamma, cost):.2f} (γ {gamma})", (alpha, cost)


def pass_ms(gigabytes, bandwidth):
    return 1e3 * gigabytes / (0.8 * bandwidth)


def test_table_of_cards_is_bytes_by_bandwidth():
    (_, _, *cards), *rows = cells("drafters.md", "weights read")
    bandwidths = [float(card.rpartition(", ")[2].removesuffix(" GB/s").replace(",", "")) for card in cards]
    for _, gigabytes, *shown in rows:
        for bandwidth, cell in zip(bandwidths, shown, strict=True):
            assert float(cell) == pytest.approx(pass_ms(float(gigabytes), bandwidth), abs=0.06)


PAYING = [path for path in EXAMPLES if path.stem != "cpu-trial"]


@pytest.mark.parametrize("path", PAYING, ids=lambda path: path.stem)
def test_example_pays_by_the_formula(path):
    (row,) = (row for row in cells("sizing.md", "example") if path.name in row[0])
    _, pair, *figures = row
    target_ms, draft_ms, network_ms, gain, least = map(float, figures)
    values = yaml.safe_load(path.read_text())
    assert values["models"]["target"].endswith(pair.partition(",")[0])
    assert values["models"]["draft"].endswith("PARD-Qwen3-0.6B")  # one pass for all gamma tokens
    gigabytes, bandwidth = re.match(r".*?, ([\d.]+) GB on an? \S+ \(([\d,]+) GB/s\)", pair).groups()
    assert target_ms == pytest.approx(pass_ms(float(gigabytes), float(bandwidth.replace(",", ""))), abs=0.06)
    cycle = 1 + (draft_ms + network_ms) / target_ms
    assert gain == pytest.approx(theory.expected_tokens(0.7, 8) / cycle, abs=0.006)
    assert theory.expected_tokens(least, 8) > cycle > theory.expected_tokens(least - 0.011, 8)
