"""Who shares computed prefixes with whom, and what is forgotten."""

import random

from gammaray.types import SamplingParams
from tests.support.vllm_helpers import Session, answers, end, generate, references

BLOCK = 128
rng = random.Random(5)
PROMPT = [rng.randrange(4, 97) for _ in range(3 * BLOCK + 20)]


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
