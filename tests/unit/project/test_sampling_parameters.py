"""A sampling parameter is written in at most four code files, as docs/architecture.md says."""

import re
from pathlib import Path

from gammaray.sampling import SAMPLING_RULES

ROOT = Path(__file__).parents[3]
DECLARED = "gammaray/sampling.py"
ARITHMETIC = {"services/engine/sampling/logits.py", "services/engine/sampling/edits.py"}
DRAFT = "services/speculation/predictor.py"
# The others are also a benchmark's temperature, an attribute of spans or the seed of a session, for example.
PLAIN = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def test_parameters_are_written_where_the_architecture_page_says():
    # Left out: generated code, audits of other servers, and a plug-in, in which parameters are vLLM's own.
    others = (ROOT / "gammaray" / "v1", ROOT / "gammaray" / "audit", ROOT / "services" / "vllm" / "plugin")
    paths = [
        path for room in ("gammaray", "orchestrator", "services") for path in (ROOT / room).rglob("*.py")
    ]
    sources = {path: path.read_text() for path in paths if path.parent not in others}
    for name in PLAIN:
        assert name in SAMPLING_RULES
        using = (path for path, text in sources.items() if re.search(rf"\b{name}\b", text))
        files = {path.relative_to(ROOT).as_posix() for path in using}
        assert DECLARED in files
        assert files <= {DECLARED, DRAFT, *ARITHMETIC}
        assert len(files & ARITHMETIC) == 1
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## Adding a sampling parameter")[1]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:]
    linked = [set(re.findall(r"\]\((?:\.\./)?([\w/.]+)\)", row)) for row in rows]
    assert linked == [{"protos/gammaray/v1/types.proto"}, {DECLARED}, ARITHMETIC, {DRAFT}, {"api.md"}]
