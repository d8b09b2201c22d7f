"""Sessions whose masks take long: the others go on, and the tokens are the same."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gammaray.blocks import Verdict
from gammaray.errors import DeadlineExceededError, InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import SamplingParams
from services.scheduling.masks import MAX_WAIT_S, NUM_THREADS
from services.scheduling.tasks import Reply
from tests.support.processing_helpers import GRAMMAR
from tests.support.vllm_helpers import Session, ask, end, prompt

PATIENCE_S = 60.0
EOS = (0, 3)
BLOCKED_STEPS = 8


class Gated:
    """A grammar whose masks are computed when the gate is open."""

    def __init__(self, state: GrammarState, gate: threading.Event) -> None:
        self._state, self._gate = state, gate
        self.num_asked = 0
        self.error: Exception | None = None

    def __len__(self) -> int:
        return len(self._state)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._state.extend(token_ids)

    def truncate(self, length: int) -> None:
        self._state.truncate(length)

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        self.num_asked += 1
        assert self._gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return self._state.masks(paths)


def steps_until(scheduler: Any, is_done: Callable[[list[Reply]], object]) -> list[Reply]:
    """Step until a condition holds; return the replies."""
    replies: list[Reply] = []
    deadline = time.monotonic() + PATIENCE_S
    while not is_done(replies):
        assert time.monotonic() < deadline, replies
        replies += [reply for _, reply in scheduler.step()]
    return replies


def masked(scheduler, gate, seed=1, **fields):
    """Return a session with a grammar, and the grammar."""
    session = Session(prompt(40), SamplingParams(seed=seed, grammar=GRAMMAR, **fields), eos_token_ids=EOS)
    return session, Gated(scheduler.queue.grammars.begin(GRAMMAR, EOS), gate)


def outcome_of(replies, session):
    (reply,) = (reply for reply in replies if reply.session_id == session.name)
    return reply.outcome


def blocked(scheduler):
    """Return the replies of some steps."""
    return [reply for _ in range(BLOCKED_STEPS) for _, reply in scheduler.step()]


class LateMasks:
    """What holds for a target worker's scheduler with any engine; `scheduler` is a fixture of the module."""

    @pytest.fixture
    def gate(self):
        """Opened at the end, so that no thread waits for it."""
        found = threading.Event()
        yield found
        found.set()

    def test_others_go_on_while_masks_take_long(self, scheduler, gate):
        (slow, grammar), quick = masked(scheduler, gate), Session(prompt(30), SamplingParams(seed=2))
        scheduler.submit([slow.block((1, 2), grammar=grammar)])
        for _ in range(10):
            assert isinstance(ask(scheduler, quick, (5, 6)), Verdict)  # the gate is shut all the time
        assert grammar.num_asked == 1
        gate.set()
        assert isinstance(outcome_of(steps_until(scheduler, len), slow), Verdict)

    def test_no_step_waits_for_masks_of_slow_sessions(self, scheduler, gate):
        is_open = threading.Event()
        is_open.set()
        slow = [masked(scheduler, gate, seed) for seed in range(NUM_THREADS)]
        tasks = [session.block(grammar=grammar) for session, grammar in slow]
        scheduler.submit(tasks)
        steps_until(scheduler, lambda _: all(grammar.num_asked for _, grammar in slow))
        time.sleep(2 * MAX_WAIT_S)
        gate.set()
        replies = steps_until(scheduler, lambda replies: len(replies) == len(slow))
        for (session, _), task in zip(slow, tasks, strict=True):
            session.take(task, *(reply for reply in replies if reply.session_id == session.name))
        gate.clear()
        scheduler.submit([session.block() for session, _ in slow])
        num_steps = scheduler.queue.meter.totals.steps
        assert blocked(scheduler) == []
        assert scheduler.queue.meter.totals.steps == num_steps  # a block runs when its masks are there
        quick, grammar = masked(scheduler, is_open)
        scheduler.submit([quick.block(grammar=grammar)])
        assert isinstance(outcome_of(steps_until(scheduler, len), quick), Verdict)
        gate.set()
        assert len(steps_until(scheduler, lambda replies: len(replies) == len(slow))) == len(slow)

    @pytest.mark.parametrize("fields", [{}, {"temperature": 0, "presence_penalty": 0.4}], ids=str)
    @pytest.mark.parametrize("asked", [{}, {"num_top_logprobs": 3}, {"num_prompt_logprobs": 2}], ids=str)
    def test_late_masks_change_no_verdict(self, scheduler, gate, fields, asked):
        def verdicts(*, is_late):
            session, grammar = masked(scheduler, gate, **fields)
            found = []
            for proposal in ((), (1, 2, 1), (), (2, 2)):
                gate.clear() if is_late else gate.set()
                first = {} if found else {"grammar": grammar, **asked}
                task = session.block(proposal, **first)
                scheduler.submit([task])
                replies = blocked(scheduler) if is_late else []
                assert not replies
                gate.set()
                (reply,) = steps_until(scheduler, len)
                found.append(session.take(task, reply))
            end(scheduler, session, forgets=True)
            return found

        assert verdicts(is_late=True) == verdicts(is_late=False)

    def test_error_of_late_masks_is_the_answer(self, scheduler, gate):
        session, grammar = masked(scheduler, gate)
        grammar.error = InvalidArgumentError("grammar", "too much", "less")
        scheduler.submit([session.block(grammar=grammar)])
        assert blocked(scheduler) == []
        gate.set()
        assert outcome_of(steps_until(scheduler, len), session) is grammar.error
        assert grammar.num_asked == 1

    @pytest.mark.parametrize("is_slow", [False, True], ids=["late", "known to be slow"])
    def test_next_block_of_a_session_waits_until_nothing_reads_it(self, scheduler, gate, is_slow):
        session, grammar = masked(scheduler, gate)
        num_before = 0
        if is_slow:
            task = session.block(grammar=grammar)
            scheduler.submit([task])
            assert blocked(scheduler) == []
            gate.set()
            session.take(task, *steps_until(scheduler, len))
            gate.clear()
            num_before = 1
        first = session.block((1, 2), grammar=grammar, deadline=time.monotonic() + 1.0)
        scheduler.submit([first])
        assert isinstance(outcome_of(steps_until(scheduler, len), session), DeadlineExceededError)
        session.held = len(session.tokens) if is_slow else 0
        scheduler.submit([session.block((2, 2), grammar=grammar)])
        assert blocked(scheduler) == []
        assert grammar.num_asked == num_before + 1
        gate.set()
        late = outcome_of(steps_until(scheduler, len), session)
        same, unhurried = masked(scheduler, gate)
        if is_slow:
            ask(scheduler, same, grammar=unhurried)
            unhurried = None
        assert ask(scheduler, same, (2, 2), grammar=unhurried) == late
