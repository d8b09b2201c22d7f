"""Every sampling parameter, alone and together, gives the CPU engine's tokens on the same seeds."""

import random

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.types import SamplingParams
from services.scheduling.tasks import VerifyTask
from tests.support.processing_helpers import GRAMMAR, TOKENS, follows_grammar
from tests.support.vllm_helpers import Session, answers, end, generate, proposer

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


def sessions_of(fields):
    """Three prompts with the parameters of each case; one is longer than a block of the cache.

    No greedy choice of these is within 1e-3 of another one, so that every instruction set makes the same.
    """
    rng = random.Random(4)
    prompts = [[rng.randrange(4, 97) for _ in range(length)] for length in (1, 30, 150)]
    return [
        Session(prompt, SamplingParams(**{"seed": seed, **fields}), eos_token_ids=EOS)
        for seed, prompt in enumerate(prompts)
    ]


def test_all_parameters_in_one_batch_with_and_without_proposals(scheduler, reference):
    """Sessions with equal filters share a draw; all others are judged one by one."""
    copies = {name: sessions_of(fields) for name, fields in PARAMETERS.items()}
    outputs = {name: generate(reference, sessions, 16) for name, sessions in copies.items()}
    for sessions in copies.values():
        end(reference, *sessions)
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


def with_grammars(scheduler, session, proposal=()) -> VerifyTask:
    """Return the next block as a stream submits it: with the compiled grammar."""
    task = session.block(proposal)
    if task.spec is not None and task.spec.params.grammar:
        task.grammar = scheduler.grammars.begin(task.spec.params.grammar, task.spec.eos_token_ids)
    return task


def complete(scheduler, sessions, count, propose=lambda session: ()):
    """Run cycles until each session has `count` tokens or its end."""
    while True:
        active = [s for s in sessions if len(s.output) < count and not set(s.output) & set(EOS)]
        if not active:
            return [session.output for session in sessions]
        tasks = [with_grammars(scheduler, session, propose(session)) for session in active]
        for session, task, reply in zip(active, tasks, answers(scheduler, tasks), strict=True):
            session.take(task, reply)


def grammar_sessions(**fields):
    rng = random.Random(3)
    return [
        Session(
            [rng.randrange(4, 97) for _ in range(length)],
            SamplingParams(seed=seed, grammar=GRAMMAR, **fields),
            eos_token_ids=EOS,
        )
        for seed, length in enumerate((5, 40, 135))
    ]


def up_to_end(output):
    at = next((at for at, token in enumerate(output) if token in EOS), len(output))
    return output[: at + 1]


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"top_p": 0.8, "presence_penalty": 0.4}, {"logit_bias": {2: 3.0}}],
    ids=["sampled", "greedy", "filtered", "biased"],
)
def test_grammars_hold_and_give_the_cpu_engines_tokens(scheduler, reference, fields):
    copies = grammar_sessions(**fields)
    outputs = [up_to_end(output) for output in complete(reference, copies, 24)]
    end(reference, *copies)
    for output in outputs:
        for at, token in enumerate(output):
            assert follows_grammar(output[:at], token, EOS)
    rng = random.Random(4)
    beside = Session([5, 6, 7], SamplingParams(seed=1))
    for has_proposals in (False, True):
        sessions = grammar_sessions(**fields)
        expected = {session.name: output for session, output in zip(sessions, outputs, strict=True)}
        propose = proposer(expected, rng) if has_proposals else lambda session: ()
        tasks = [with_grammars(scheduler, sessions[0]), beside.block()]
        for session, task, reply in zip((sessions[0], beside), tasks, answers(scheduler, tasks), strict=True):
            session.take(task, reply)
        complete(scheduler, sessions, 24, propose)
        assert [up_to_end(session.output)[:24] for session in sessions] == [out[:24] for out in outputs]
        end(scheduler, *sessions)


def test_a_proposal_that_vllm_cuts_is_verified_with_the_masks_of_its_beginning(scheduler, reference):
    """The step has room for 256 tokens: the last blocks of the batch get a part of their proposals."""
    copies = grammar_sessions(temperature=0)
    outputs = complete(reference, copies, 20)
    end(reference, *copies)
    others = [Session([5] * 20, SamplingParams(seed=seed)) for seed in range(31)]
    generate(scheduler, others, 1)
    for index in range(3):
        session = grammar_sessions(temperature=0)[index]
        complete(scheduler, [session], 1)
        tasks = [each.block([5] * 7) for each in others]
        tasks.append(with_grammars(scheduler, session, outputs[index][1:9]))
        everyone = [*others, session]
        for each, task, reply in zip(everyone, tasks, answers(scheduler, tasks), strict=True):
            verdict = each.take(task, reply)
        assert 0 < verdict.num_tested < 8
        assert session.output == outputs[index][: len(session.output)]


def test_a_grammar_error_answers_that_block_alone(scheduler, reference, monkeypatch):
    bad, good, plain = *grammar_sessions()[:2], Session([5, 6, 7], SamplingParams(seed=1))
    masks = type(scheduler.grammars.begin(GRAMMAR, EOS)).masks
    states = {}

    def fail(state, paths):
        if state is states["bad"]:
            raise InvalidArgumentError("grammar", "a planted one", "a simple one")
        return masks(state, paths)

    monkeypatch.setattr("gammaray.grammar.matcher.GrammarState.masks", fail)
    tasks = [with_grammars(scheduler, bad), with_grammars(scheduler, good), plain.block()]
    states["bad"] = tasks[0].grammar
    failed, fine, also_fine = answers(scheduler, tasks)
    assert isinstance(failed.outcome, InvalidArgumentError)
    good.take(tasks[1], fine)
    plain.take(tasks[2], also_fine)
    assert fine.timing.mask_us > 0
    monkeypatch.undo()
    complete(scheduler, [good, bad], 8)  # the session itself is served again
    copies = grammar_sessions()[:2]
    expected = [up_to_end(output) for output in complete(reference, copies, 8)]
    assert [up_to_end(session.output) for session in (bad, good)] == expected
    end(reference, *copies)


def test_a_grammar_without_its_state_is_refused_alone(scheduler):
    session, plain = grammar_sessions()[0], Session([5, 6, 7], SamplingParams(seed=1))
    tasks = [session.block(), plain.block()]
    failed, fine = answers(scheduler, tasks)
    assert isinstance(failed.outcome, FailedPreconditionError)
    plain.take(tasks[1], fine)


def test_masks_that_leave_no_token_of_the_grammar_are_refused(scheduler):
    session = grammar_sessions(banned_token_ids=tuple(range(len(TOKENS))))[0]
    (reply,) = answers(scheduler, [with_grammars(scheduler, session)])
    assert isinstance(reply.outcome, InvalidArgumentError)
    assert reply.outcome.field == "grammar"
