"""A sampling parameter is written in at most four code files, as docs/architecture.md says."""

import re
from pathlib import Path

import pytest

from gammaray.sampling import SAMPLING_RULES

ROOT = Path(__file__).parents[3]
DECLARED = "gammaray/sampling.py"
ARITHMETIC = {"services/engine/sampling/logits.py", "services/engine/sampling/edits.py"}
DRAFT = "services/speculation/predictor.py"
# The others are also a benchmark's temperature, an attribute of spans or the seed of a session, for example.
PLAIN = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.fixture(scope="module")
def sources():
    """Path -> text of every module that implements sampling parameters or might."""
    paths = [
        path for folder in ("gammaray", "orchestrator", "services") for path in (ROOT / folder).rglob("*.py")
    ]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in paths
        # Generated code, and audits of other servers, which send them and expect their effects.
        if path.parent not in (ROOT / "gammaray" / "v1", ROOT / "gammaray" / "audit")
    }


@pytest.mark.parametrize("name", PLAIN)
def test_parameter_is_written_where_the_architecture_page_says(name, sources):
    assert name in SAMPLING_RULES
    files = {path for path, text in sources.items() if re.search(rf"\b{name}\b", text)}
    assert DECLARED in files
    assert files <= {DECLARED, DRAFT, *ARITHMETIC}
    assert len(files & ARITHMETIC) == 1


def test_architecture_page_lists_these_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## Adding a sampling parameter")[1]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:]
    linked = [set(re.findall(r"\]\((?:\.\./)?([\w/.]+)\)", row)) for row in rows]
    assert linked == [
        {"protos/gammaray/v1/types.proto"},
        {DECLARED},
        ARITHMETIC,
        {DRAFT},
        {"api.md"},
    ]
