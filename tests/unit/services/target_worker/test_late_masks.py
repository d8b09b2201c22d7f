"""Sessions whose masks take long: the others go on, and the tokens are the same."""

from __future__ import annotations

import threading
import time

import pytest

from gammaray.blocks import Shape, Verdict
from gammaray.config import TargetSettings
from gammaray.errors import DeadlineExceededError, InvalidArgumentError
from gammaray.types import Proposal, SamplingParams
from services.engine.loader import load_engine
from services.scheduling.masks import MAX_WAIT_S, NUM_THREADS
from services.scheduling.planning import Limits
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.gated_masks import PATIENCE_S, Gated, steps_until
from tests.support.head_helpers import DATA
from tests.support.processing_helpers import GRAMMAR, TOKENS, small_compiler
from tests.support.target_helpers import Run

EOS = (0,)
PROMPT = random_tokens(40, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3))


@pytest.fixture
def scheduler_of(model):
    """Make schedulers, and end their threads."""
    made = []

    def make(*, has_head=False):
        engine = load_engine(model)
        settings = TargetSettings(model=model, head=str(DATA / "llama"))
        head = load_local_drafter(settings, engine) if has_head else None
        made.append(TargetScheduler(engine, Limits(1024, 16), head=head, draft_ahead=False))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


def masked_run(scheduler, gate, seed=1):
    """Return a session with a grammar, and the grammar."""
    size = scheduler.engine.vocab_size
    state = Gated(small_compiler(TOKENS, size, EOS).begin(GRAMMAR, EOS), gate)
    return Run(scheduler, PROMPT, SamplingParams(seed=seed, grammar=GRAMMAR), eos_token_ids=EOS), state


def masked_block(run, state, shape=Shape(0), proposal=Proposal(), num_top=None):  # noqa: B008
    block = run.block(shape, proposal)
    block.grammar, block.num_prompt_logprobs = state, num_top
    return block


def test_others_go_on_while_masks_take_long(scheduler_of):
    scheduler, gate = scheduler_of(), threading.Event()
    slow, state = masked_run(scheduler, gate)
    quick = Run(scheduler, PROMPT[::-1], SamplingParams(seed=2))
    scheduler.submit([masked_block(slow, state, proposal=Proposal((1, 2)))])
    began = time.monotonic()
    for _ in range(10):
        quick.cycle(Shape(0), Proposal((5, 6)))
    assert time.monotonic() - began < PATIENCE_S / 2  # the gate was shut all the time
    assert state.num_asked == 1
    gate.set()
    (reply,) = steps_until(scheduler, len)
    assert reply.session_id == slow.name
    assert isinstance(reply.outcome, Verdict)


def test_masks_of_slow_sessions_delay_no_quick_grammar(scheduler_of):
    scheduler, gate, is_open = scheduler_of(), threading.Event(), threading.Event()
    is_open.set()
    slow = [masked_run(scheduler, gate, seed) for seed in range(NUM_THREADS)]
    scheduler.submit([masked_block(*one) for one in slow])
    steps_until(scheduler, lambda _: all(state.num_asked for _, state in slow))
    time.sleep(2 * MAX_WAIT_S)
    gate.set()
    steps_until(scheduler, lambda replies: len(replies) == len(slow))
    gate.clear()
    for run, state in slow:
        run.held, run.tokens = len(run.tokens), [*run.tokens, 2]
        scheduler.submit([masked_block(run, state)])
    quick, state = masked_run(scheduler, is_open)
    scheduler.submit([masked_block(quick, state)])
    replies = steps_until(scheduler, len)
    assert [reply.session_id for reply in replies] == [quick.name]
    gate.set()
    assert len(steps_until(scheduler, lambda replies: len(replies) == len(slow))) == len(slow)


@pytest.mark.parametrize("num_top", [None, 3])
@pytest.mark.parametrize(
    "proposal", [Proposal((1, 2, 1)), Proposal((1, 2, 4, 2), parents=(-1, -1, 0, 2))], ids=["chain", "tree"]
)
def test_late_masks_change_no_verdict(scheduler_of, proposal, num_top):
    def verdicts(*, is_late):
        scheduler, gate = scheduler_of(), threading.Event()
        run, state = masked_run(scheduler, gate)
        found = []
        for shown in (proposal, Proposal(), proposal):
            gate.clear() if is_late else gate.set()
            scheduler.submit([masked_block(run, state, proposal=shown, num_top=None if found else num_top)])
            replies = [reply for _ in range(8) for _, reply in scheduler.step()]
            assert not (is_late and replies)
            gate.set()
            (reply,) = replies or steps_until(scheduler, len)
            found.append(reply.outcome)
            run.held = len(run.tokens)
            run.tokens += [shown.token_ids[node] for node in reply.outcome.accepted_path]
            run.tokens.append(reply.outcome.next_token_id)
        return found, scheduler.engine.tokens(run.name)[:]

    assert verdicts(is_late=True) == verdicts(is_late=False)


def test_late_masks_change_no_draft_of_a_head(scheduler_of):
    def proposals(*, is_late):
        scheduler, gate = scheduler_of(has_head=True), threading.Event()
        run, state = masked_run(scheduler, gate)
        for shape in (Shape(0), Shape(3), Shape(2, 5), Shape(3)):
            gate.clear() if is_late else gate.set()
            opened = threading.Timer(3 * MAX_WAIT_S, gate.set)
            opened.start()
            block = masked_block(run, state, shape)
            verdict = run.ask(block)
            opened.join()
            run.held = len(run.tokens)
            drafted = verdict.drafted or Proposal()
            run.proposals.append(drafted.token_ids)
            run.tokens += [drafted.token_ids[node] for node in verdict.accepted_path]
            run.tokens.append(verdict.next_token_id)
        return run.proposals, run.tokens

    assert proposals(is_late=True) == proposals(is_late=False)


def test_error_of_late_masks_is_the_answer(scheduler_of):
    scheduler, gate = scheduler_of(), threading.Event()
    run, state = masked_run(scheduler, gate)
    state.error = InvalidArgumentError("grammar", "too much", "less")
    scheduler.submit([masked_block(run, state)])
    assert [scheduler.step() for _ in range(8)] == [[]] * 8
    gate.set()
    (reply,) = steps_until(scheduler, len)
    assert reply.outcome is state.error
    assert state.num_asked == 1


def test_next_block_of_a_session_waits_until_nothing_reads_it(scheduler_of):
    scheduler, gate = scheduler_of(), threading.Event()
    run, state = masked_run(scheduler, gate)
    block = masked_block(run, state, proposal=Proposal((1, 2)))
    block.deadline = time.monotonic() + 0.2
    scheduler.submit([block])
    (dropped,) = steps_until(scheduler, len)
    assert isinstance(dropped.outcome, DeadlineExceededError)
    scheduler.submit([masked_block(run, state, proposal=Proposal((2, 2)))])
    assert [scheduler.step() for _ in range(8)] == [[]] * 8
    assert state.num_asked == 1
    gate.set()
    (reply,) = steps_until(scheduler, len)
    other, open_gate = scheduler_of(), threading.Event()
    open_gate.set()
    same, unhurried = masked_run(other, open_gate)
    other.submit([masked_block(same, unhurried, proposal=Proposal((2, 2)))])
    assert reply.outcome == steps_until(other, len)[0].outcome
