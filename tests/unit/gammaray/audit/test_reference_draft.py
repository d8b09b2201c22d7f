"""`law` with a reference drafter: a server that takes its choices is found sooner, by token ids alone."""

import math
import random

import pytest

from gammaray.audit.chance import check_law
from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status, Undecided
from gammaray.audit.subject import MODES, Subject
from tests.support.scripted_http import scripted

VOCAB, LISTED = 40, 20
PROMPT_IDS = [7, 8]


def law(previous):
    """Return the probabilities after a token, the most likely first."""
    rng = random.Random(previous)
    weights = {token: rng.random() / rank for rank, token in enumerate(rng.sample(range(VOCAB), VOCAB), 1)}
    total = sum(weights.values())
    return dict(sorted(((t, w / total) for t, w in weights.items()), key=lambda item: -item[1]))


def choice_of_drafter(previous):
    return list(law(previous))[3]


def served(share, **lacking):
    """Serve texts with a share of the drafter's choices, and the drafter's choices for given ids."""

    def reply(path, body):
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        if isinstance(body["prompt"], list):
            entries = [{str(choice_of_drafter(i)): {"logprob": -1.0, "rank": 1}} for i in body["prompt"][:-1]]
            choice["prompt_logprobs"] = [None, *entries]
        else:
            rng, ids = random.Random(body["seed"]), [*PROMPT_IDS]
            names = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            for _ in range(body["max_tokens"]):
                probs = law(ids[-1])
                (drawn,) = rng.choices([*probs], [*probs.values()])
                token = choice_of_drafter(ids[-1]) if rng.random() < share else drawn
                names["tokens"].append(f"token_id:{token}")
                names["token_logprobs"].append(math.log(probs[token]))
                tops = {*list(probs)[:LISTED], token}
                names["top_logprobs"].append({f"token_id:{t}": math.log(probs[t]) for t in tops})
                ids.append(token)
            choice |= {"logprobs": names, "prompt_token_ids": PROMPT_IDS, "token_ids": ids[len(PROMPT_IDS) :]}
        return 200, {"choices": [{**choice, **lacking}]}

    return reply


async def result(share, *, knows_drafter=True, **lacking):
    with scripted(served(share, **lacking)) as (url, _):
        server = Endpoint(url, "m", "", "NO_KEY", 4, Spent(4000), 30.0, num_top=LISTED)
        absent = dict.fromkeys(MODES[1:], "whole completions of one choice alone")
        subject = Subject(server, None, ["a prompt"], 0.005, 1, absent=absent)
        subject.drafter = server.beside(url) if knows_drafter else None
        try:
            return await check_law(subject)
        finally:
            await subject.close()


@pytest.mark.slow
@pytest.mark.statistical
async def test_known_drafter_is_found_sooner():
    blind, knowing = await result(0.08, knows_drafter=False), await result(0.08)
    assert knowing.status is Status.FAILED
    assert knowing.evidence["strongest"].startswith("draft share")
    assert knowing.evidence["tokens"] < blind.evidence["tokens"] / 1.5


@pytest.mark.slow
@pytest.mark.statistical
async def test_honest_server_raises_no_alarm_against_its_drafter():
    found = await result(0.0)
    assert found.status is Status.INCONCLUSIVE, "too few tokens"
    assert found.evidence["largest_log_e_value"] < 3
    assert found.evidence["smallest_detectable"]["draft share"] < 0.1


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [({"token_ids": None}, "return_token_ids"), ({"prompt_logprobs": None}, "prompt_logprobs")],
)
async def test_servers_that_lack_token_ids_make_the_law_not_possible(lacking, reason):
    with pytest.raises(Undecided, match=reason) as caught:
        await result(0.0, **lacking)
    assert caught.value.status is Status.NOT_POSSIBLE
