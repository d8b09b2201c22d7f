"""Every sampling parameter, alone and together, gives the CPU engine's tokens on the same seeds."""

import random

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.types import SamplingParams
from tests.support.processing_helpers import GRAMMAR, TOKENS, follows_grammar
from tests.support.vllm_helpers import Session, answers, complete, end, generate, proposer, references

EOS = (0, 3)

PARAMETERS = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "low temperature": {"temperature": 0.3},
    "high temperature": {"temperature": 1.9},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition penalty": {"repetition_penalty": 1.3},
    "repetition reward": {"repetition_penalty": 0.7},
    "frequency penalty": {"frequency_penalty": 0.5},
    "presence penalty": {"presence_penalty": 1.9},
    "greedy with penalties": {"temperature": 0, "presence_penalty": 0.9, "repetition_penalty": 1.1},
    "logit bias": {"logit_bias": {5: 4.0, 6: -100.0, 7: 2.5}},
    "greedy with bias": {"temperature": 0, "logit_bias": dict.fromkeys(range(40, 60), 3.0)},
    "allowed tokens": {"allowed_token_ids": tuple(range(10, 30))},
    "banned tokens": {"banned_token_ids": tuple(range(0, 96, 2))},
    "min_tokens": {"min_tokens": 6, "logit_bias": {0: 9.0, 3: 9.0}},
    "sample_index": {"sample_index": 3},
    "all together": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": {8: 1.0},
        "banned_token_ids": (9, 10),
        "min_tokens": 3,
    },
}


def sessions_of(fields, lengths=(1, 30, 150), number=4):
    """Three prompts with the parameters of each case; one is longer than a block of the cache.

    No greedy choice of these is within 1e-3 of another one, so that every instruction set makes the same.
    """
    rng = random.Random(number)
    prompts = [[rng.randrange(4, 97) for _ in range(length)] for length in lengths]
    return [
        Session(prompt, SamplingParams(**{"seed": seed, **fields}), eos_token_ids=EOS)
        for seed, prompt in enumerate(prompts)
    ]


def test_all_parameters_in_one_batch_with_and_without_proposals(scheduler, reference):
    """Sessions with equal filters share a draw; all others are judged one by one."""
    outputs = {name: references(reference, sessions_of(fields), 16) for name, fields in PARAMETERS.items()}
    for has_proposals in (False, True):
        mine = {name: sessions_of(fields) for name, fields in PARAMETERS.items()}
        everyone = [session for sessions in mine.values() for session in sessions]
        expected = {
            session.name: output
            for name, sessions in mine.items()
            for session, output in zip(sessions, outputs[name], strict=True)
        }
        propose = proposer(expected, random.Random(2)) if has_proposals else lambda session: ()
        generate(scheduler, everyone, 16, propose)
        wrong = [
            name
            for name, sessions in mine.items()
            for session in sessions
            if session.output[:16] != expected[session.name]
        ]
        assert wrong == []
        end(scheduler, *everyone)


def grammar_sessions(**fields):
    return sessions_of({"grammar": GRAMMAR, **fields}, (5, 40, 135), 3)


def plain(reference, count, **fields):
    """Return the CPU engine's tokens of the sessions with a grammar."""
    copies = grammar_sessions(**fields)
    outputs = complete(reference, copies, count)
    end(reference, *copies)
    return outputs


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"top_p": 0.8, "presence_penalty": 0.4}, {"logit_bias": {2: 3.0}}],
    ids=["sampled", "greedy", "filtered", "biased"],
)
def test_grammars_hold_and_give_the_cpu_engines_tokens(scheduler, reference, fields):
    outputs = plain(reference, 24, **fields)
    for output in outputs:
        for at, token in enumerate(output):
            assert follows_grammar(output[:at], token, EOS)
    beside = Session([5, 6, 7], SamplingParams(seed=1))
    for has_proposals in (False, True):
        sessions = grammar_sessions(**fields)
        expected = {session.name: output for session, output in zip(sessions, outputs, strict=True)}
        propose = proposer(expected, random.Random(4)) if has_proposals else lambda session: ()
        generate(scheduler, [sessions[0], beside], 1)
        assert (
            complete(scheduler, sessions, 24, lambda one, propose=propose: {"proposal": propose(one)})
            == outputs
        )
        end(scheduler, *sessions)


def test_a_proposal_that_vllm_cuts_is_verified_with_the_masks_of_its_beginning(scheduler, reference):
    """The step has room for 256 tokens: the last blocks of the batch get a part of their proposals."""
    outputs = plain(reference, 20, temperature=0)
    others = [Session([5] * 20, SamplingParams(seed=seed)) for seed in range(31)]
    generate(scheduler, others, 1)
    for index in range(3):
        session = grammar_sessions(temperature=0)[index]
        complete(scheduler, [session], 1)
        tasks = [*(each.block([5] * 7) for each in others), session.block(outputs[index][1:9])]
        for each, task, reply in zip([*others, session], tasks, answers(scheduler, tasks), strict=True):
            verdict = each.take(task, reply)
        assert 0 < verdict.num_tested < 8
        assert session.output == outputs[index][: len(session.output)]


def test_a_grammar_error_answers_that_block_alone(scheduler, reference, monkeypatch):
    bad, good, _ = grammar_sessions()
    masks = type(scheduler.queue.grammars.begin(GRAMMAR, EOS)).masks

    def fail(state, paths):
        if state is tasks[0].grammar:
            raise InvalidArgumentError("grammar", "a planted one", "a simple one")
        return masks(state, paths)

    monkeypatch.setattr("gammaray.grammar.matcher.GrammarState.masks", fail)
    tasks = [bad.block(), good.block()]
    failed, fine = answers(scheduler, tasks)
    assert isinstance(failed.outcome, InvalidArgumentError)
    good.take(tasks[1], fine)
    assert fine.timing.mask_us > 0
    monkeypatch.undo()
    # The session itself is served again.
    assert complete(scheduler, [bad, good], 8) == plain(reference, 8)[:2]


def test_blocks_that_cannot_be_verified_fail_alone(scheduler, reference):
    """With a grammar whose state is missing, and with masks that leave no token, also none of a grammar."""
    every = tuple(range(97))
    stateless, masked = grammar_sessions(banned_token_ids=every[: len(TOKENS)])[:2]
    empty = Session([5, 6, 7], SamplingParams(seed=1, banned_token_ids=every))
    good = Session([5, 6, 7], SamplingParams(seed=1))
    tasks = [session.block() for session in (stateless, masked, empty, good)]
    tasks[1].grammar = scheduler.queue.grammars.begin(GRAMMAR, EOS)
    scheduler.submit(tasks)
    replies = {}
    while len(replies) < len(tasks):
        replies |= {reply.session_id: reply for _, reply in scheduler.step()}
    errors = [replies[session.name].outcome for session in (stateless, masked, empty)]
    assert [type(error) for error in errors] == [FailedPreconditionError, *[InvalidArgumentError] * 2]
    assert errors[1].field == "grammar"
    good.take(tasks[3], replies[good.name])
    assert [good.output] == references(reference, [good], 1)
