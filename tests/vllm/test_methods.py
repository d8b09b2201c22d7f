"""All verification methods: verdicts as the CPU engine's.

The functions that judge are the CPU engine's, whose exactness `tests/unit/services/target_worker` shows by
enumeration. Here the rows, noise and proposals that vLLM's runner hands them are tested: verdict for verdict
on the same seeds. `test_law_of_workers.py` tests the tokens of many seeds.
"""

import random
from collections import Counter

import pytest

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from tests.support.vllm_helpers import Session, answers, drafted, end, generate, prompt


@pytest.mark.parametrize("method", VerificationMethod)
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}, {"presence_penalty": 0.7, "top_k": 12}],
    ids=["sampled", "greedy", "filtered", "edited"],
)
def test_verdicts_equal_the_cpu_engines(scheduler, reference, method, fields):
    """Proposals drawn from their distributions, likely tokens without distributions, and none."""
    verdicts = []
    for engine in (scheduler, reference):
        rng = random.Random(7)
        sessions = [
            Session(prompt(length, length), SamplingParams(seed=length, **fields), method)
            for length in (1, 20, 64, 140)
        ]
        generate(engine, sessions, 1)
        seen = []
        for cycle in range(8):
            guesses = [Session(session.tokens) for session in sessions]
            likely = generate(reference, guesses, 8)
            end(reference, *guesses)
            tasks = []
            for number, session in enumerate(sessions):
                proposal = drafted(likely[number][: rng.randrange(9)], rng)
                if (cycle + number) % 3 == 0:
                    proposal = Proposal(proposal.token_ids)
                tasks.append(session.block(proposal))
            for session, task, reply in zip(sessions, tasks, answers(engine, tasks), strict=True):
                seen.append(session.take(task, reply))
        verdicts.append(seen)
        end(engine, *sessions)
    assert verdicts[0] == verdicts[1]
    lengths = Counter(len(verdict.accepted_path) for verdict in verdicts[0])
    assert len(lengths) > 2
    assert lengths[0] > 2
