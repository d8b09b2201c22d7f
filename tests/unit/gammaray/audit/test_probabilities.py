"""Log-probabilities against those of one pass over the finished text, which the server echoes."""

import pytest

from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status, Undecided
from gammaray.audit.reference import MIN_TOKENS, check_probabilities
from gammaray.audit.subject import Subject
from tests.support.scripted_http import scripted

UNLIKELY = -6.0


def listed(tokens, shift=0.0):
    """Every second token is likely."""
    own = [-0.5 + shift if i % 2 else UNLIKELY for i in range(len(tokens))]
    tops = [{token: logprob, "x": -0.9} for token, logprob in zip(tokens, own, strict=True)]
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops}


def served(shift, echoes=True):
    def reply(path, body):
        tokens = [f" {i}" for i in range(body["max_tokens"])]
        text = "".join(tokens)
        found = listed(tokens, shift)
        if body.get("echo") and echoes:
            tokens = body["prompt"].removeprefix("a prompt").split(" ")[1:]
            found = listed([f" {token}" for token in tokens])
            text = body["prompt"] + " more"
            last = {"tokens": [" more"], "token_logprobs": [-0.1], "top_logprobs": [{" more": -0.1}]}
            found = {name: column + last[name] for name, column in found.items()}
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": found}
        return 200, {"choices": [choice]}

    return reply


async def result(shift, **options):
    with scripted(served(shift, **options)) as (url, _):
        server = Endpoint(url, "m", "", "NO_KEY", 4, Spent(10_000), 30.0, num_top=2)
        subject = Subject(server, None, ["a prompt"] * 24, 0.005, 1)
        try:
            return await check_probabilities(subject)
        finally:
            await subject.close()


@pytest.mark.parametrize(
    ("shift", "status"), [(0.0, Status.PASSED), (0.05, Status.INCONCLUSIVE), (0.2, Status.FAILED)]
)
async def test_texts_are_asked_for_until_enough_likely_tokens_are_compared(shift, status):
    found = await result(shift)
    assert found.status is status
    assert MIN_TOKENS <= found.evidence["tokens"] < MIN_TOKENS + 64
    assert found.evidence["mean"] == pytest.approx(shift)


async def test_ignored_echo_is_not_possible():
    with pytest.raises(Undecided, match="ignores `echo`") as caught:
        await result(0.0, echoes=False)
    assert caught.value.status is Status.NOT_POSSIBLE
