"""The plug-in in vLLM's V2 model runner, which works whole on CPUs where Triton's kernels are interpreted."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gammaray_vllm
import pytest

from tests.vllm import test_plugin

target, drafters = test_plugin.target, test_plugin.drafters

TRITON = Path(sys.prefix) / "triton"
"""Beside the other packages: with Triton among them, vLLM's CPU build and torch would behave differently."""

TIMEOUT_S = 1200
VARIABLES = {
    **{gammaray_vllm.VARIABLE: "1", gammaray_vllm.RUNNER_VARIABLE: "1"},
    **{"VLLM_CONFIGURE_LOGGING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "methods", [["draft_model"], pytest.param(["ngram", "eagle3"], marks=pytest.mark.nightly)], ids=str
)
def test_completions_of_the_second_runner_with_speculation_equal_the_plain_ones(methods, target, drafters):
    assert TRITON.is_dir(), "make test-vllm installs it"
    assert find_spec("triton") is None
    given = {method: str(drafters.get(method, "")) for method in methods}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.second_runner", str(target), json.dumps(given)],
        env={**os.environ, **VARIABLES, "PYTHONPATH": str(TRITON)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain, *others = map(json.loads, done.stdout.splitlines())
    assert [other["method"] for other in others] == methods
    assert min(len(choice) for choices in plain["tokens"] for choice in choices) > 0
    for found in (plain, *others):
        assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
        assert "is ACTIVE" in found["log"]
        assert found["tokens"] == plain["tokens"]
        assert found["ranks"] == plain["ranks"] != []
        assert found["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-4)
    for other in others:
        accepted, drafted = other["counted"]
        assert 0 < accepted < drafted
