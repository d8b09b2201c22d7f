"""Memory of sessions: more than fit, the end of the context, who shares prefixes, what is forgotten or leaks.

vLLM's own eviction order and preemption are used, so that tokens afterwards are the test.
"""

import ctypes
import gc
import random

import pytest

from gammaray.errors import ResourceExhaustedError
from gammaray.types import SamplingParams, VerificationMethod
from services.vllm.engine import MAX_REQUESTS
from tests.support.vllm_helpers import (
    Session,
    answers,
    ask,
    drafted,
    end,
    generate,
    prompt,
    proposer,
    references,
)
from tests.vllm.conftest import BLOCK, free_blocks


def session(length, seed):
    return Session(prompt(length, seed), SamplingParams(seed=seed))


def test_more_sessions_than_slots_are_served_in_one_batch_and_again(scheduler, reference):
    sessions = [session(3, seed) for seed in range(MAX_REQUESTS + 40)]
    outputs = generate(scheduler, sessions, 3)
    assert scheduler.engine.stats().num_sessions <= MAX_REQUESTS
    assert outputs == references(reference, sessions, 3)


def test_more_sessions_than_memory_have_the_right_tokens(scheduler, reference):
    """Twelve sessions of two or three blocks share eight, in batches of one to eight."""
    rng = random.Random(4)
    sessions = [session(rng.randrange(100, 300), seed) for seed in range(12)]
    outputs = references(reference, sessions, 40)
    expected = {each.name: output for each, output in zip(sessions, outputs, strict=True)}
    propose = proposer(expected, rng)
    evictions = scheduler.engine.stats().num_evictions
    with free_blocks(scheduler, 8):
        while active := [each for each in sessions if len(each.output) < 30]:
            batch = rng.sample(active, min(len(active), rng.randrange(1, 9)))
            tasks = [each.block(propose(each)) for each in batch]
            for each, task, reply in zip(batch, tasks, answers(scheduler, tasks), strict=True):
                each.take(task, reply)
                assert each.output == expected[each.name][: len(each.output)]
    assert scheduler.engine.stats().num_evictions > evictions + 20


def test_busy_sessions_that_grow_beyond_memory_are_preempted_and_read_again(scheduler, reference):
    """All five reach their second block in one step: vLLM takes the memory of those that it serves last."""
    sessions = [session(BLOCK - 2, seed) for seed in range(5)]
    outputs = references(reference, sessions, 8)
    evictions = scheduler.engine.stats().num_evictions
    with free_blocks(scheduler, 6):
        assert generate(scheduler, sessions, 8) == outputs
    assert scheduler.engine.stats().num_evictions > evictions


def test_blocks_that_wait_for_memory_are_served_when_others_end(scheduler, reference):
    """Three prompts of five blocks each, of which six are free."""
    sessions = [session(5 * BLOCK - 10, seed) for seed in range(3)]
    with free_blocks(scheduler, 6):
        assert generate(scheduler, sessions, 2) == references(reference, sessions, 2)


def test_a_block_that_cannot_fit_gets_a_typed_error_and_the_next_one_is_served(scheduler, reference):
    large, small = session(4 * BLOCK, 1), session(40, 2)
    with free_blocks(scheduler, 2):
        ask(scheduler, small)
        assert isinstance(ask(scheduler, large), ResourceExhaustedError)
        ask(scheduler, small)
    ask(scheduler, large)
    assert small.output == references(reference, [small], 2)[0]
    assert large.output == references(reference, [large], 1)[0]


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_a_session_reaches_the_end_of_the_context_beside_others(scheduler, reference, gamma):
    """The last position is given; a proposal that goes past it is cut, and others do not notice."""
    last = scheduler.engine.max_context
    near, others = session(last - 6, 1), [session(30 * n, n) for n in (1, 2, 3)]
    count = 7  # the prompt, and tokens up to and including the one at `last`
    [own], outputs = references(reference, [near], count), references(reference, others, 20)
    expected = {near.name: own, **{each.name: out for each, out in zip(others, outputs, strict=True)}}
    sessions = [near, *others]
    while near.tokens[last:] == []:
        tasks = [each.block(expected[each.name][len(each.output) :][:gamma]) for each in sessions]
        for each, task, reply in zip(sessions, tasks, answers(scheduler, tasks), strict=True):
            each.take(task, reply)
    assert len(near.tokens) == last + 1
    assert near.output == expected[near.name][:count]
    generate(scheduler, others, 12)
    for each in others:
        assert each.output == expected[each.name][: len(each.output)]
    # An owner that rolls back is served again.
    del near.tokens[last - 2 :]
    near.held = len(near.tokens)
    ask(scheduler, near)
    assert near.output == expected[near.name][: len(near.output)]


def test_the_oldest_blocks_are_served_first_when_a_step_cannot_take_all(scheduler):
    """A step takes 256 tokens; sessions that come back at once do not keep others from being served."""
    sessions = [session(20, seed) for seed in range(70)]
    generate(scheduler, sessions, 1)
    waiting = {each.name: 0 for each in sessions}
    tasks = {each.name: each.block([5] * 8) for each in sessions}
    scheduler.submit(tasks.values())
    by_name = {each.name: each for each in sessions}
    for _ in range(40):
        replies = scheduler.step()
        for name in waiting:
            waiting[name] += 1
        for task, reply in replies:
            by_name[task.session_id].take(task, reply)
            waiting[task.session_id] = 0
        scheduler.submit([by_name[task.session_id].block([5] * 8) for task, _ in replies])
        assert max(waiting.values()) <= 4
    scheduler.release([(name, 0, True) for name in waiting])
    scheduler.step()


PROMPT = prompt(3 * BLOCK + 20, 5)


def first_block(scheduler, salt, seed=0, prompt=PROMPT, **fields):
    """Serve the first block of a session; return the session, and how many tokens were found."""
    session = Session(prompt, SamplingParams(seed=seed), salt=salt, **fields)
    (reply,) = answers(scheduler, [task := session.block()])
    session.take(task, reply)
    return session, reply.timing.cached_tokens


def test_sessions_of_one_tenant_share_whole_blocks(scheduler, reference):
    first, found = first_block(scheduler, "one")
    assert found == 0
    sessions = [first]
    for seed in (1, 2):
        session, found = first_block(scheduler, "one", seed)
        assert found == 3 * BLOCK
        sessions.append(session)
    end(scheduler, first)
    assert first_block(scheduler, "one", 3)[1] == 3 * BLOCK
    assert generate(scheduler, sessions[1:], 6) == references(reference, sessions[1:], 6)


def test_another_tenant_finds_nothing(scheduler):
    first_block(scheduler, "one")
    assert first_block(scheduler, "two")[1] == 0
    assert first_block(scheduler, "")[1] == 0
    assert first_block(scheduler, None)[1] == 0
    assert first_block(scheduler, "two")[1] == 3 * BLOCK


def test_sessions_without_a_salt_share_nothing(scheduler):
    first, found = first_block(scheduler, None)
    assert found == 0
    assert first_block(scheduler, None)[1] == 0
    # Names that look like another's salt do not match it either.
    assert first_block(scheduler, f"session {first.name}")[1] == 0
    end(scheduler, first)
    assert first_block(scheduler, None, name=first.name)[1] == 0


def test_what_a_session_computed_is_forgotten_for_the_whole_tenant(scheduler):
    """Also the parts that others computed at the same time, and what is left after an eviction."""
    sessions = [Session(PROMPT, SamplingParams(seed=seed), salt="one") for seed in range(3)]
    generate(scheduler, sessions, 1)
    end(scheduler, sessions[0], forgets=True)
    assert first_block(scheduler, "one", 5)[1] == 0
    scheduler.engine.close(next(iter(scheduler.requests.values())).request_id)
    end(scheduler, sessions[1], forgets=True)
    assert first_block(scheduler, "one", 6)[1] == 0


def test_an_output_is_found_by_the_next_turn_of_a_conversation(scheduler):
    session, _ = first_block(scheduler, "one", prompt=PROMPT[: 2 * BLOCK - 3])
    generate(scheduler, [session], 6)
    end(scheduler, session)
    assert first_block(scheduler, "one", prompt=[*session.tokens, 5, 6, 7])[1] == 2 * BLOCK


NUM_SESSIONS = 40
ALLOWED_BYTES = 64 << 10
"""The token lists of the sessions would be more than that. Sessions have the same shapes, as vLLM's CPU build
keeps oneDNN's primitives for each number of rows that a step had."""

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def allocated_bytes() -> int:
    """Return what malloc has handed out and not got back, mapped blocks included."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = MallocInfo
    gc.collect()
    found = mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.nightly
@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.BLOCK])
def test_ended_sessions_hold_no_memory(scheduler, method):
    rng = random.Random(1)

    def run(seed: int) -> None:
        params = SamplingParams(temperature=1, seed=seed, frequency_penalty=0.5, top_p=0.9)
        session = Session(prompt(300, seed), params, method)
        generate(scheduler, [session], 40, lambda session: drafted(prompt(3, seed), rng))
        end(scheduler, session, forgets=True)

    for seed in range(10):
        run(seed)
    before = allocated_bytes()
    for seed in range(10, 10 + NUM_SESSIONS):
        run(seed)
    assert allocated_bytes() - before < ALLOWED_BYTES
