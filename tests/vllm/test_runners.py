"""Workers on vLLM's V2 model runner pass tests of the V1 runner, and so give its tokens: the CPU engine's.

In a process of its own, where Triton's kernels are interpreted. No GPU has run it.
"""

import os
import re
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams
from tests.support import vllm_head_helpers as heads
from tests.support.vllm_helpers import Session, generate, prompt, references
from tests.vllm.conftest import start_vllm
from tests.vllm.test_failures import worker_of
from tests.vllm.test_second_runner import TRITON

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
IS_SECOND = os.environ.get(VARIABLE) == "1"
TIMEOUT_S = 1800
HERE = Path(__file__).parent
SOME = (
    "runners::test_the_variable_selects_the_model_runner",
    "runners::test_the_steps_that_vllm_runs_at_start_on_gpus_leave_nothing",
    "runners::test_what_the_second_runner_lacks_is_refused_with_its_name",
    "tokens_equal::test_tokens_equal_plain_decoding_whatever_is_proposed_and_beside_whom[llama-0]",
    "vllm_sampling::test_all_parameters_in_one_batch_with_and_without_proposals",
    "vllm_sampling::test_grammars_hold_and_give_the_cpu_engines_tokens[sampled]",
    "logprobs::test_logprobs_of_a_prompt[new-3-300]",
    "drafts::test_proposals_of_a_batch_are_those_of_the_cpu_engine[drawn-coupled]",
)
WORKERS = (
    *("tokens_equal", "session_life", "methods", "logprobs", "drafts", "failures", "adapters"),
    *("vllm_sampling", "vllm_memory", "vllm_late_masks", "vllm_decode_ahead"),
)
HEADS = ("heads", "mixed_requests", "vllm_learning")
nightly = partial(pytest.param, marks=pytest.mark.nightly)


def test_the_variable_selects_the_model_runner(scheduler):
    runner = worker_of(scheduler).model_runner
    assert type(runner).__module__ == f"vllm.v1.worker.cpu{'.' if IS_SECOND else '_'}model_runner"


@pytest.mark.skipif(not IS_SECOND, reason="of the second runner")
def test_the_steps_that_vllm_runs_at_start_on_gpus_leave_nothing(llama, reference, tmp_path):
    """With a drafter of vLLM and without."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    for head in ("", str(heads.eagle(tmp_path / "head", llama))):
        with closing(start_vllm(llama, head=head)) as scheduler:
            worker = worker_of(scheduler)
            worker.model_runner.profile_run()
            warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
            assert worker.sampler.num_requests == worker.model_runner.req_states.num_reqs == 0
            sessions = [Session(prompt(30), SamplingParams(seed=1)), Session(prompt(9, 1))]
            assert generate(scheduler, sessions, 6) == references(reference, sessions, 6)


def test_what_the_second_runner_lacks_is_refused_with_its_name(llama, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    words = "speculative method 'medusa'" if IS_SECOND else "Model Runner V2 requires Triton"
    with pytest.raises(InvalidArgumentError, match=words):
        start_vllm(llama, head=str(heads.medusa(tmp_path / "head", llama)))


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("chosen", [SOME, nightly(WORKERS), nightly(HEADS)], ids=["some", "workers", "heads"])
def test_workers_pass_the_tests_on_the_second_runner(chosen):
    assert TRITON.is_dir(), "make test-vllm installs it"
    names = [name.partition("::") for name in chosen]
    tests = [f"{HERE / f'test_{file}.py'}{mark}{test}" for file, mark, test in names]
    options = ["-p", "tests.support.triton_interpreter", "-k", "not medusa", "-m", "not nightly", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        env={**os.environ, VARIABLE: "1", "PYTHONPATH": f"{HERE.parents[1]}:{TRITON}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed(, \d+ deselected)?(, \d+ warnings?)? in ", done.stdout, re.MULTILINE)
