"""The pages for operators name only existing files, commands, values, settings and alerts."""

import itertools
import json
import re

import pytest
import yaml
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.deploy.serve_config import APPLICATIONS
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
    *("parentbased_traceidratio", "invalid_argument", "deadline_exceeded", "max_tokens"),
}
"""Names of model servers that draft, of OpenTelemetry, of gRPC and of requests."""


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


def test_sizing_command_of_the_page_runs():
    page = (ROOT / "docs" / "sizing.md").read_text()
    line, *_ = re.findall(r"^\$ gammaray (size .*)$", page, re.MULTILINE)
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    assert "Drafters per target" in result.output


def size_table(text):
    """Return the rows of the table of drafters by number, and the number with the mark."""
    rows, best = {}, None
    for line in text.splitlines():
        words = re.sub(r"[│┃|]", " ", line).split()
        if len(words) >= 5 and all(re.fullmatch(r"[\d.]+", word) for word in words[:5]):
            rows.setdefault(int(words[0]), tuple(map(float, words[1:5])))
            best = int(words[0]) if words[5:] == ["<-", "best"] and best is None else best
    return rows, best


SIZED = re.findall(
    r"^\$ gammaray (size .*)\n((?: .*\n)+)\.\.\.$", (ROOT / "docs" / "sizing.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("line", "quoted"), SIZED, ids=[line for line, _ in SIZED])
def test_quoted_output_is_what_the_command_prints(line, quoted):
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    printed, best = size_table(result.output)
    rows, marked = size_table(quoted)
    assert len(rows) >= 2
    assert rows.items() <= printed.items()
    assert marked == best


def test_tables_of_drafters_are_what_the_command_prints():
    """With the figures that the page draws from them."""
    page = (ROOT / "docs" / "drafters.md").read_text()
    (line, quoted), *others = re.findall(r"^\$ gammaray (size .*)\n((?:.*\n)+?)```$", page, re.MULTILINE)
    assert others == []
    result = CliRunner().invoke(main, line.split())
    printed = [row.rstrip() for row in result.output.splitlines()]
    assert result.exit_code == 0
    assert [row for row in quoted.splitlines() if row != "..." and row not in printed] == []
    text = " ".join(page.split())
    large = CliRunner().invoke(main, ["size", "--target", "llama-3.3-70b", "--on", "4xH100"]).output
    least = re.search(r"Alpha from.*?plain llama-3.2-1b bf16 +\S+ +(\S+) +(\S+)", large, re.DOTALL)
    assert f"pay on an A10 from alpha {least[2]} on, but on an L4 still from {least[1]} only" in text
    capacity = result.output.partition("Capacity")[2]
    plain, parallel = (
        re.search(rf"^{name} +{drafters} +\d+ +(\d+) ", capacity, re.MULTILINE)[1]
        for name, drafters in (("plain decoding", 0), ("parallel llama-3.2-1b int8 on RTX-4090", 3))
    )
    assert f"serves {plain} sessions by plain decoding and {parallel} with three parallel drafters" in text


PAYING = [path for path in EXAMPLES if path.stem != "cpu-trial"]


def sized(line, **changed):
    """Return the best row of the table of drafters: drafters, gamma, tokens per second, speedup, value."""
    options = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
    result = CliRunner().invoke(main, [*line.split(), *options])
    assert result.exit_code == 0, result.output
    rows, best = size_table(result.output)
    return (best, *rows[best])


@pytest.mark.parametrize("path", PAYING, ids=lambda path: path.stem)
def test_example_pays_according_to_gammaray_size(path):
    text, page = path.read_text(), (ROOT / "docs" / "sizing.md").read_text()
    (line,) = re.findall(r"^#   gammaray (size .*)$", text, re.MULTILINE)
    assert line in [quoted for quoted, _ in SIZED]
    assert path.stem in page
    best, gamma, _, _, value = sized(line)
    assert best >= 1
    assert gamma >= 1
    assert value > 1.1
    # No more drafters than are worth their price.
    values = yaml.safe_load(text)
    drafters, targets = (int(str(values[role]["workers"]).rpartition(":")[2]) for role in ("draft", "target"))
    assert drafters <= best * targets
    # The command is about the models and devices of the example.
    given = dict(itertools.pairwise(line.split()))
    assert given["--target"] == values["models"]["target"].partition("/")[2].lower()
    assert values["models"]["draft"].lower().endswith(given["--draft"])
    assert ("PARD" in values["models"]["draft"]) == (given["--drafter"] == "parallel")
    for role, option in (("target", "--on"), ("draft", "--card")):
        assert f"-{given[option]}" in f"-{values[role].get('acceleratorType', given[option])}"
    # From which alpha on, as the page says.
    after = page[page.index(f"$ gammaray {line}") :]
    least = float(re.search(r"it pays from alpha ([\d.]+) on", after)[1])
    assert sized(line, alpha=least)[0] >= 1
    assert sized(line, alpha=round(least - 0.01, 2))[0] == 0


def test_examples_contain_no_pair_that_cannot_pay():
    line = next(quoted for quoted, _ in SIZED if "llama-3.1-8b" in quoted)
    assert not any(line in path.read_text() for path in EXAMPLES)
    assert sized(line, alpha=0.9999)[0] == 0


def test_plain_draft_of_the_first_example_costs_more_than_it_gains():
    page = (ROOT / "docs" / "sizing.md").read_text()
    line = SIZED[0][0].replace("--drafter parallel", "--drafter plain")
    assert sized(line)[0] == 0
    result = CliRunner().invoke(main, line.split())
    speedup = size_table(result.output)[0][1][2]
    assert f"sixteen sessions {speedup:.2f} times as fast" in " ".join(page.split())
