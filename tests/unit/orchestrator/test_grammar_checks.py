"""Checks of the grammars of requests: once each, in turn between tenants, with deadlines and cancellation."""

import asyncio
import threading
import time

import pytest

from gammaray.demo_pair import resolve_model
from gammaray.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from gammaray.grammar import check_pool
from gammaray.grammar.check_pool import CheckPool
from gammaray.grammar.matcher import GrammarState
from orchestrator import grammar_checks
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.grammar_checks import GrammarChecks
from orchestrator.text.tokenizer import Tokenizer
from tests.support.workers.scripted_workers import until

pytestmark = pytest.mark.slow

WAIT_S = 120.0


def endless(number: int = 0) -> str:
    """Return a grammar whose compilation does not end; different ones have different numbers."""
    return (
        f'start: %json {{"type": ["string", "integer"], "multipleOf": 2147483647, "description": "{number}"}}'
    )


@pytest.fixture
def submitted(monkeypatch):
    """The grammars of which a check began, in order."""
    found, submit = [], CheckPool.submit

    def recording(self, check):
        found.append(check.grammar)
        return submit(self, check)

    monkeypatch.setattr(CheckPool, "submit", recording)
    return found


@pytest.fixture
async def checks(monkeypatch):
    """Checks with less CPU time for each, unless a test gives them more."""
    monkeypatch.setattr(check_pool, "MAX_CPU_S", 0.3)
    monkeypatch.setattr(check_pool, "MAX_DURATION_S", WAIT_S)
    monkeypatch.setattr(grammar_checks, "MAX_WAIT_S", WAIT_S)
    checks = GrammarChecks(Tokenizer(resolve_model("demo")))
    yield checks
    await checks.close()


async def test_grammar_of_several_choices_is_checked_once(checks, submitted):
    for grammar in ('start: "a"', 'start: "a'):
        assert not checks.is_remembered(grammar)
        calls = (checks.check(grammar, ANONYMOUS) for _ in range(8))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert checks.is_remembered(grammar)
        assert not checks.is_remembered(grammar + " ")
        is_good = grammar.endswith('a"')
        assert {type(result) for result in results} == {type(None) if is_good else InvalidArgumentError}
    assert submitted == ['start: "a"', 'start: "a']


async def test_grammars_whose_steps_take_long_are_left_to_the_workers(checks, monkeypatch):
    monkeypatch.setattr(check_pool, "MAX_CPU_S", 100.0)
    costly = f"start: /{'a?' * 4096}/"
    for grammar, followed in ((costly, type(None)), ('start: "a"', GrammarState)):
        await checks.check(grammar, ANONYMOUS)
        assert type(await checks.begin(grammar, ANONYMOUS)) is followed


async def test_tokens_of_a_resumed_session_are_followed(checks):
    tokens = Tokenizer(resolve_model("demo")).encode("abc", is_start=False)
    state = await checks.begin("start: /[a-c]{9}/", ANONYMOUS, tokens)
    assert len(state) == len(tokens)
    with pytest.raises(FailedPreconditionError, match=r"do not follow it with llguidance-1\."):
        await checks.begin("start: /[d-f]{9}/", ANONYMOUS, tokens)


async def test_endless_grammars_of_one_tenant_do_not_keep_another_waiting(checks, submitted):
    hostile = [asyncio.create_task(checks.check(endless(number), Caller("hostile"))) for number in range(4)]
    await until(lambda: submitted)
    await checks.check('start: "a"', Caller("other"))
    # The hostile tenant has one place, however many grammars wait.
    assert sum(task.done() for task in hostile) < len(hostile)
    results = await asyncio.gather(*hostile, return_exceptions=True)
    assert all("of CPU time" in str(result) for result in results)


async def test_deadline_ends_the_wait_and_the_check(checks, monkeypatch):
    monkeypatch.setattr(check_pool, "MAX_CPU_S", 1000.0)
    await checks.check('start: "a"', ANONYMOUS)
    for number in range(3):
        caller = Caller(deadline=time.monotonic() + 0.1)
        with pytest.raises(DeadlineExceededError):
            await checks.check(endless(number), caller)
        assert not checks.is_remembered(endless(number))
    await checks.check('start: "b"', ANONYMOUS)


async def test_cancellation_frees_the_place(checks, submitted, monkeypatch):
    monkeypatch.setattr(check_pool, "MAX_CPU_S", 1000.0)
    await checks.check('start: "a"', ANONYMOUS)
    tasks = [asyncio.create_task(checks.check(endless(number), Caller("t"))) for number in range(20)]
    await until(lambda: len(submitted) == 2)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await checks.check('start: "b"', Caller("t"))
    assert len(submitted) == 3


async def test_request_of_a_cancelled_one_s_grammar_checks_it_itself(checks, submitted):
    first = asyncio.create_task(checks.check(endless(), ANONYMOUS))
    await until(lambda: submitted)
    second = asyncio.create_task(checks.check(endless(), ANONYMOUS))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(InvalidArgumentError, match="of CPU time"):
        await second
    assert first.cancelled()
    assert submitted == [endless()] * 2


async def test_slow_compilations_of_one_tenant_do_not_keep_another_waiting(checks, monkeypatch):
    goes_on = threading.Event()
    compile_one = Tokenizer.begin_grammar

    def slowly(self, grammar):
        if grammar.startswith("// slow"):
            assert goes_on.wait(WAIT_S)
        return compile_one(self, grammar)

    monkeypatch.setattr(Tokenizer, "begin_grammar", slowly)
    slow = [asyncio.create_task(checks.begin('// slow\nstart: "a"', Caller("hostile"))) for _ in range(4)]
    await asyncio.sleep(0)
    slow[-1].cancel()
    state = await checks.begin('start: "b"', Caller("other"))
    assert not state.is_ended
    assert not any(task.done() for task in slow[:-1])
    slow[0].cancel()  # it holds its place until its thread ends
    goes_on.set()
    results = await asyncio.gather(*slow, return_exceptions=True)
    assert [type(result) for result in results] == [
        asyncio.CancelledError,
        GrammarState,
        GrammarState,
        asyncio.CancelledError,
    ]
