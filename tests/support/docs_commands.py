"""The console commands of the documentation, and for each how it is tested or why it is not run.

A command is a line that begins with `$ ` in a block marked `console`, with the lines that belong to it, or a
line of a block without a language that begins with `gammaray ` or `python -m `.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "helm" / "gammaray" / "README.md"]

FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
HERE = r"gammaray keys\b"
"""Run as they stand, in a folder of their own."""
RENDERED = r"helm (install|upgrade|diff upgrade|template) "
"""Rendered with the chart and the values that they name, by Helm's own code."""
WITH_KUBECTL = r"kubectl -n gammaray create secret "
"""Compared with the Secrets that the chart's values name."""
ON_A_CLUSTER = r"(gammaray (status|generate|chat|trace)|curl -s localhost:8000)\b(?!.*--(ca-file|receipt))"
"""Run by tests/e2e/test_documented_commands.py against a running cluster."""

WITHOUT_A_CLUSTER: Mapping[str, str] = {
    r"kubectl -n gammaray (get|wait|patch|delete) |CLUSTER=\$\(kubectl": "needs a Kubernetes cluster",
    r"helm (history|rollback|uninstall) ": "needs a Kubernetes cluster",
    r"gammaray (generate|chat) .*--ca-file": "needs TLS in front: tests/unit/gammaray/cli/test_cli_tls.py",
    r"openssl |mkdir |for role in ": "tests/integration/test_trust_tls.py runs them and uses what they make",
    r"docker (build|push|run) ": "needs Docker, a registry, or the network",
    r"((OTEL|GAMMARAY)_\w+=\S+ )*gammaray up\b": "tests/e2e start clusters by it; each takes a minute",
    r"pip install gammaray-vllm|GAMMARAY_VLLM_COUPLED=1 vllm serve ": "needs vLLM: tests/vllm/test_plugin.py",
    r"gammaray qualify ": "takes minutes, see tests/e2e/test_qualify.py",
    r"gammaray audit ": "takes minutes, see tests/integration/test_audit_faults.py",
    r"gammaray (check|generate .*--receipt) ": "needs keys, see tests/integration/test_receipts_served.py",
    r"gammaray drafters ": "needs a folder that a worker learns in, see test_learning_folder.py",
    r"gammaray train ": "takes an hour, see tests/unit/services/train/test_train_run.py",
    r"export OTEL_EXPORTER_OTLP_ENDPOINT=": "only sets a variable for the next line",
    r"\. \.venv/bin/activate": "only changes the shell",
    r"python -m services\.engine\.convert ": "see tests/unit/services/engine/test_gguf_convert.py",
    r"make( (demo|smollm2|test|lint|bench|chaos|fuzz|soak))?( |$)": "installs into .venv, or takes minutes",
}
"""Why the rest is not run, by a pattern of how such commands begin."""


@dataclass(frozen=True)
class Block:
    page: str  # file, from the root of the repository
    commands: tuple[str, ...]  # its commands in order, comments at their ends left out


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for language, text in FENCED.findall(page.read_text()):
            if language == "console":
                lines = _joined(text)
            elif not language:
                lines = [line for line in text.splitlines() if line.startswith(("gammaray ", "python -m "))]
            else:
                continue
            cleaned = [re.sub(r"\s{2,}# .*$", "", line).rstrip() for line in lines]
            if cleaned:
                found.append(Block(str(page.relative_to(ROOT)), tuple(cleaned)))
    return found


def environment() -> dict[str, str]:
    """Return the variables for commands: the programs of this environment, and no setting of gammaray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GAMMARAY_")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def commands() -> list[tuple[str, str]]:
    return [(block.page, command) for block in blocks() for command in block.commands]


def _joined(text: str) -> list[str]:
    """Return the commands of a console block, each with its continuation lines."""
    found: list[str] = []
    goes_on = False
    for line in text.splitlines():
        if goes_on:
            found[-1] += "\n" + line
        elif line.startswith("$ "):
            found.append(line[2:])
        else:
            continue  # what a command prints
        goes_on = found[-1].endswith("\\") or not _is_closed(found[-1])
    return found


def _is_closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True
