"""`gammaray qualify` with clusters: a draft that suits the demo target, and one that cannot be served."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

SMALL = ("--num-prompts", "1", "--tokens", "24", "--gammas", "4", "--temperatures", "0")


def test_candidates_are_measured_and_ranked(tmp_path):
    candidates = ("--draft", str(tmp_path / "none"), "--draft", "demo")
    command = [sys.executable, "-m", "gammaray", "qualify", "--target", "demo", *candidates, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 4), done.stderr  # how fast it is depends on the machine
    assert "same tokens as gamma 0: 1 of 1" in done.stdout
    assert f"UNFIT: draft {tmp_path / 'none'}" in done.stdout
    assert "which does not exist" in done.stdout
    ranking = done.stdout[done.stdout.index("candidate") :]
    assert ranking.index("draft demo") < ranking.index("draft /")
