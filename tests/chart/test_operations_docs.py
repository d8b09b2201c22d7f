"""The pages for operators name only what there is: files, commands, values, settings, alerts."""

import json
import re

import pytest
import yaml
from chart_helpers import CHART, ROOT, cluster
from click import Group
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.serving import APPLICATIONS

NAMES = ("install", "sizing", "upgrade", "troubleshooting", "security", "slo")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_chart_readme_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", (CHART / "README.md").read_text()):
        assert link.startswith("https://") or (CHART / link).exists(), link


@pages
def test_commands_exist(page):
    assert isinstance(main, Group)
    used = set(re.findall(r"(?:^|[`|] |`|\$ )gammaray ([a-z]+)", page.read_text(), re.MULTILINE))
    known = set(main.list_commands(None))
    assert used - {"helm"} <= known


def test_pages_name_some_commands():
    text = "".join(page.read_text() for page in PAGES)
    assert {"config", "size", "status"} <= set(re.findall(r"gammaray ([a-z]+)", text))


@pages
def test_values_exist(page):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(r"`([a-z]\w*(?:\.[a-zA-Z]\w*)+)(?:[:=][^`]*)?`", page.read_text()):
        first, *rest = path.split(".")
        if first not in values or first in ("scaling",) or "settings" in rest:
            continue  # an attribute, a file, or a setting
        entry = values[first]
        if first in ("head", "orchestrator", "draft", "target"):
            entry = {**values["pods"], **entry}
        for key in rest:
            assert key in entry, path
            entry = entry[key]


@pages
def test_settings_exist(page):
    fields = {name for application in APPLICATIONS.values() for name in application.settings.model_fields}
    values = (CHART / "values.yaml").read_text()
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)(?::[^`]*)?`", page.read_text()):
        known = name in fields or name in values or name.startswith(("gammaray_", "target_", "deadline_"))
        assert known, name


def test_alerts_are_all_explained():
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    names = {rule["alert"] for group in rules for rule in group["rules"]}
    page = (ROOT / "docs" / "slo.md").read_text()
    assert set(re.findall(r"`(Gammaray\w+)`", page)) == names


def test_patch_for_other_numbers_of_pods_fits_the_cluster():
    (text,) = re.findall(r"--patch '(\[.*?\])'", (ROOT / "docs" / "upgrade.md").read_text(), re.DOTALL)
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
    (line,) = re.findall(r"^\$ gammaray (size .*)$", (ROOT / "docs" / "sizing.md").read_text(), re.MULTILINE)
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    assert "Drafters per target" in result.output
