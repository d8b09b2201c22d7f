"""Models, drafts and heads with a wrong number or tensor compute or are refused; no kernel crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
COPIES = 60  # of each kind


@pytest.mark.slow
def test_changed_numbers_and_tensors_are_computed_with_or_refused_in_one_line(tmp_path):
    command = [sys.executable, "-m", "tests.support.mutated_models", str(tmp_path), str(COPIES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-1000:]  # negative: a signal, such as that of a division by zero
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    counts = report["counts"]
    assert counts["invalid"] + counts["refused"] + counts["computed"] == counts["kinds"] * COPIES
    assert min(counts[name] for name in ("invalid", "refused", "computed")) > 10
