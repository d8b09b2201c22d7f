"""Every console command of the documentation runs, or there is a reason why it is not run here."""

import itertools
import json
import re
import shlex
import subprocess

import pytest
import yaml

from tests.support.chart.chart_helpers import CHART, REGISTRY, chart, render
from tests.support.docs_commands import (
    HERE,
    ON_A_CLUSTER,
    PAGES,
    RENDERED,
    ROOT,
    WITH_KUBECTL,
    WITHOUT_A_CLUSTER,
    blocks,
    commands,
    environment,
)

pytestmark = pytest.mark.integration

KINDS = {"here": HERE, "rendered": RENDERED, "kubectl": WITH_KUBECTL, "cluster": ON_A_CLUSTER}
ALL = commands()


def kinds(command):
    """Return what is to be done with a command: names of KINDS, or the reason why nothing is."""
    found = [name for name, pattern in KINDS.items() if re.match(pattern, command)]
    return found + [reason for pattern, reason in WITHOUT_A_CLUSTER.items() if re.match(pattern, command)]


def of_kind(kind):
    chosen = [(page, command) for page, command in ALL if kind in kinds(command)]
    return pytest.mark.parametrize(("page", "command"), chosen, ids=[f"{p}: {c[:60]}" for p, c in chosen])


def test_documented_commands_are_run_or_have_a_reason_not_to():
    assert [(page, command) for page, command in ALL if len(kinds(command)) != 1] == []


def test_every_pattern_matches_a_command():
    for pattern in [*KINDS.values(), *WITHOUT_A_CLUSTER]:
        assert any(re.match(pattern, command) for _, command in ALL), pattern


def test_no_command_pipes_a_file_into_serve_run():
    """`serve run` takes what is no regular file for the import path of a module."""
    assert not [page for page in PAGES if "/dev/stdin" in page.read_text()]


@pytest.fixture
def shell(tmp_path):
    """Runs commands in a folder of their own, with the tools of this environment."""
    own = {**environment(), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}

    def run(command):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=own,
            capture_output=True,
            text=True,
            timeout=280,
        )

    return run


LOCAL = [block for block in blocks() if any("here" in kinds(command) for command in block.commands)]


@pytest.mark.slow
@pytest.mark.parametrize("block", LOCAL, ids=[f"{block.page}: {block.commands[0][:60]}" for block in LOCAL])
def test_commands_of_a_block_run_in_their_order(block, shell):
    for command in block.commands:
        if "here" not in kinds(command):
            continue
        if command.startswith("gammaray keys revoke"):
            listed = json.loads(shell("gammaray keys list --file keys.json --json").stdout)
            command = re.sub(r"\b[0-9a-f]{8}\b", listed["keys"][0]["id"], command)
        ended = shell(command)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"


@of_kind("rendered")
def test_chart_renders_with_the_values_of_a_command(page, command):
    words = shlex.split(command.replace("\\\n", " "))
    values = {}
    assert "helm/gammaray" in words
    for name, value in itertools.pairwise(words):
        if name == "--values":
            path = ROOT / value
            # Values that a reader writes begin with those of an example.
            given = path if path.is_file() else CHART / "examples" / "cpu-trial.yaml"
            assert path.is_file() or value in ("my-values.yaml", "model-b.yaml"), value
            values = {**values, **yaml.safe_load(given.read_text())}
        elif name == "--set":
            key, _, text = value.partition("=")
            assert key == "image.registry"
            values["image"] = {"registry": text}
    values = {**REGISTRY, **values}  # of the reader's own values
    chart().validate_schema(values)
    assert "rayservice.yaml" in render(values)


@of_kind("kubectl")
def test_secret_of_a_command_has_the_key_that_the_chart_reads(page, command):
    name, key = re.search(r" generic (\S+) --from-(?:file|literal)=([\w.]+)", command).groups()
    values = yaml.safe_load((CHART / "examples" / "l4-drafters-h100-targets.yaml").read_text())
    named = [value for value in [*values.values(), values["redis"]["urlSecret"]] if isinstance(value, dict)]
    by_name = {value["name"]: value["key"] for value in named if value.keys() == {"name", "key"}}
    assert key == by_name.get(name, "password")
