"""A model over two ranks of vLLM's multiprocess executor, here two processes on CPUs that talk by gloo."""

import random
import signal

import psutil
import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams
from services.scheduling.tasks import NeedTokens
from tests.support.processing_helpers import GRAMMAR, follows_grammar
from tests.support.vllm_helpers import Session, ask, end, generate, proposer
from tests.support.workers.service_helpers import worker_process
from tests.vllm.conftest import start_vllm

NUM_TOKENS = 40
START_TIMEOUT_S, END_TIMEOUT_S = 180, 20
EOS = (0, 3)


def vllm_processes():
    """Below this one, those of other engines included."""
    return {child for child in psutil.Process().children(recursive=True) if "vllm" in child.name().lower()}


@pytest.fixture(scope="module")
def ranks(llama):
    others = vllm_processes()
    scheduler = start_vllm(llama, tensor_parallel=2)
    yield scheduler
    own = vllm_processes() - others
    assert len(own) == 2
    scheduler.close()
    _, alive = psutil.wait_procs(own, END_TIMEOUT_S)
    assert alive == []


def sessions(**params):
    rng = random.Random(3)
    return [
        Session([rng.randrange(4, 97) for _ in range(6 + 29 * at)], SamplingParams(seed=at, **params))
        for at in range(4)
    ]


PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_over_two_ranks_equal_those_of_one_whatever_is_proposed(scheduler, ranks, params):
    wanted = generate(scheduler, sessions(**params), NUM_TOKENS)
    assert generate(ranks, sessions(**params), NUM_TOKENS) == wanted
    again = sessions(**params)
    expected = {session.name: output for session, output in zip(again, wanted, strict=True)}
    assert generate(ranks, again, NUM_TOKENS, proposer(expected, random.Random(1))) == wanted


def test_a_grammar_holds_over_two_ranks(scheduler, ranks):
    params, outputs = {"temperature": 1.0, "grammar": GRAMMAR}, []
    for served in (scheduler, ranks):
        session = Session([5, 6, 7], SamplingParams(seed=4, **params), eos_token_ids=EOS)
        for proposal in ([], [1, 2], [4, 4, 4], [2]):
            ask(served, session, proposal)
        outputs.append(session.output)
    assert outputs[0] == outputs[1]
    for at, token in enumerate(outputs[1]):
        assert follows_grammar(outputs[1][:at], token, EOS)


def test_the_error_of_a_block_comes_back_from_another_process(ranks):
    # Every token is masked: the ones that may be drawn end the sequence, which is too short for that.
    params = SamplingParams(seed=0, allowed_token_ids=(3,), min_tokens=4)
    outcome = ask(ranks, Session([5, 6], params, eos_token_ids=(3,)))
    assert isinstance(outcome, InvalidArgumentError)
    session = Session([5, 6])
    assert not isinstance(ask(ranks, session), InvalidArgumentError | NeedTokens)
    end(ranks, session)


@pytest.fixture
def worker(llama):
    """A target worker with two ranks, as a process that listens; its ranks."""
    options = ("--engine", "vllm", "--tensor-parallel", "2", "--cache-budget-mb", "16")
    with worker_process("target", str(llama), *options) as (process, _):
        yield process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.nightly
@pytest.mark.timeout(START_TIMEOUT_S)
@pytest.mark.parametrize(
    ("victim", "signum", "status"),
    [("worker", signal.SIGTERM, 0), ("worker", signal.SIGKILL, -signal.SIGKILL), ("rank", signal.SIGKILL, 1)],
)
def test_a_signal_to_the_worker_or_a_rank_leaves_no_process(worker, victim, signum, status):
    process, children = worker
    commands = {child: " ".join(child.cmdline()) for child in children}
    ranks = [one for one in children if "multiprocessing.spawn" in commands[one] or "VLLM" in one.name()]
    assert len(ranks) == 2, commands
    (process if victim == "worker" else ranks[1]).send_signal(signum)
    assert process.wait(30) == status
    _, alive = psutil.wait_procs(children, 10)
    assert not alive
