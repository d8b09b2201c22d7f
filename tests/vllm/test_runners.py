"""Workers on vLLM's V2 model runner pass tests of the V1 runner, and so give its tokens: the CPU engine's.

In a process of its own, where Triton's kernels are interpreted. No GPU has run it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.test_second_runner import TRITON

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
TIMEOUT_S = 1800
HERE = Path(__file__).parent
SOME = (
    "runners::test_the_variable_selects_the_model_runner",
    "tokens_equal::test_tokens_equal_plain_decoding_whatever_is_proposed_and_beside_whom[llama-0]",
    "vllm_sampling::test_all_parameters_in_one_batch_with_and_without_proposals",
    "vllm_sampling::test_grammars_hold_and_give_the_cpu_engines_tokens[sampled]",
    "logprobs::test_logprobs_of_a_prompt[new-3-300]",
    "drafts::test_proposals_of_a_batch_are_those_of_the_cpu_engine[drawn-coupled]",
)
FILES = (
    *("tokens_equal", "session_life", "methods", "logprobs", "drafts", "failures", "adapters"),
    *("vllm_sampling", "vllm_memory", "vllm_late_masks", "vllm_decode_ahead"),
)


def test_the_variable_selects_the_model_runner(scheduler):
    runner = scheduler.engine.core.model_executor.driver_worker.worker.model_runner
    is_second = os.environ[VARIABLE] == "1"
    assert type(runner).__module__ == f"vllm.v1.worker.cpu{'.' if is_second else '_'}model_runner"


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param(FILES, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_workers_pass_the_tests_on_the_second_runner(chosen):
    assert TRITON.is_dir(), "make test-vllm installs it"
    names = [name.partition("::") for name in chosen]
    tests = [f"{HERE / f'test_{file}.py'}{mark}{test}" for file, mark, test in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.triton_interpreter", "-q", *tests],
        env={**os.environ, VARIABLE: "1", "PYTHONPATH": f"{HERE.parents[1]}:{TRITON}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^(\d+) passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE)
