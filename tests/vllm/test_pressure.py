"""More sessions than fit: slots, KV memory, preemption and the end of the context.

vLLM's own eviction order and preemption are used, so that tokens afterwards are the test.
"""

import random
from contextlib import contextmanager

import pytest

from gammaray.errors import ResourceExhaustedError
from gammaray.types import SamplingParams
from services.vllm.engine import MAX_REQUESTS
from tests.support.vllm_helpers import Session, answers, ask, generate, prompt, proposer, references

BLOCK = 128
"""Tokens of a KV block of vLLM's CPU build."""


def session(length, seed):
    return Session(prompt(length, seed), SamplingParams(seed=seed))


@contextmanager
def free_blocks(scheduler, count):
    """Leave vLLM that many KV blocks."""
    pool = scheduler.engine.pool
    taken = pool.get_new_blocks(scheduler.engine.num_free_blocks - count)
    try:
        yield
    finally:
        pool.free_blocks(taken)


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
