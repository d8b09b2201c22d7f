"""Log-probabilities of emitted tokens and of prompts, against the CPU engine's.

Both compute in float32, in another order. On a prompt of 300 tokens of this model each was at most 3.5e-5
from a forward in float64, so that they are within 7e-5 of each other. A row of another position differs by
0.01 and more, which a test here asserts.
"""

import itertools

import pytest

from gammaray.types import SamplingParams
from tests.support.vllm_helpers import Session, answers, ask, end, generate, prompt

TOLERANCE = 7e-5


def assert_tops_agree(ours, theirs):
    """Compare alternatives; their order may differ where values are nearly equal."""
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=TOLERANCE)
    last = ours[-1][1] if ours else 0.0
    mine = {token_id for token_id, value in ours if value > last + 2 * TOLERANCE}
    assert mine <= {token_id for token_id, _ in theirs}


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_of_emitted_tokens(scheduler, reference, num_top):
    params = SamplingParams(seed=3, temperature=0.7, top_p=0.9)  # they are the model's, before processing
    pairs = []
    for each in (scheduler, reference):
        session = Session(prompt(70), params)
        plain = Session(prompt(70), params)
        own = generate(each, [plain], 6)[0]
        first = ask(each, session, num_top_logprobs=num_top)
        second = ask(each, session, [*own[1:4], (own[4] + 1) % 97], num_top_logprobs=num_top)
        pairs.append((first.logprobs, second.logprobs))
        end(each, session, plain)
    (ours, more_ours), (theirs, more_theirs) = pairs
    assert (len(ours), len(more_ours)) == (1, 4)
    for one, two in zip(ours + more_ours, theirs + more_theirs, strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=TOLERANCE)
        assert len(one.top) == num_top
        assert_tops_agree(one.top, two.top)


def rows(scores):
    """Return (log-probability, rank, alternatives) of each scored token of a prompt."""
    width, tops = scores.num_top, list(zip(scores.top_token_ids, scores.top_logprobs, strict=True))
    return [
        (value, rank, tops[at * width : (at + 1) * width])
        for at, (value, rank) in enumerate(zip(scores.logprobs, scores.ranks, strict=True))
    ]


@pytest.mark.parametrize("length", [2, 50, 64, 65, 300], ids=str)  # chunks have 64 tokens
@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached prefix"])
def test_logprobs_of_a_prompt(scheduler, reference, length, num_top, is_cached):
    results = []
    for each in (scheduler, reference):
        beside = Session(prompt(20, 9), salt="a")
        ask(each, beside)
        if is_cached:
            end_of = Session(prompt(length), salt="a")
            generate(each, [end_of], 2)
            end(each, end_of)
        session = Session(prompt(length), SamplingParams(seed=1), salt="a")
        tasks = [session.block([5, 6], num_prompt_logprobs=num_top), beside.block()]
        reply, _ = answers(each, tasks)
        results.append((session.take(tasks[0], reply).prompt_logprobs, generate(each, [session], 4)[0]))
        end(each, beside, session)
    (ours, output), (theirs, other_output) = results
    assert ours.token_ids == theirs.token_ids == tuple(prompt(length))
    assert len(ours.logprobs) == length - 1
    for (value, rank, top), (other, other_rank, other_top) in zip(rows(ours), rows(theirs), strict=True):
        assert value == pytest.approx(other, abs=TOLERANCE)
        assert abs(rank - other_rank) <= 1  # nearly equal values may change places
        assert_tops_agree(top, other_top)
    assert sum(a[1] != b[1] for a, b in zip(rows(ours), rows(theirs), strict=True)) <= length // 50
    differences = [abs(a - b) for a, b in itertools.pairwise(ours.logprobs)]
    assert sum(difference > 0.01 for difference in differences) >= 0.9 * len(differences)
    assert output == other_output


def test_logprobs_of_a_prompt_in_the_middle_of_its_output(scheduler, reference):
    """An owner may ask late; the tokens after the prompt are not scored."""
    results = []
    for each in (scheduler, reference):
        session = Session(prompt(70), SamplingParams(seed=1))
        generate(each, [session], 5)
        verdict = ask(each, session, num_prompt_logprobs=2)
        generate(each, [session], 9)
        results.append((verdict.prompt_logprobs, session.output))
        end(each, session)
    (ours, output), (theirs, other_output) = results
    assert ours.token_ids == tuple(prompt(70))
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
    assert output == other_output
