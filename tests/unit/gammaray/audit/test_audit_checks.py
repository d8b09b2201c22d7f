"""Checks of the audit on scripted servers, and how they run: each in its ways, and none ends the others."""

import itertools
import json
import math
import random
from unittest.mock import AsyncMock

import pytest

from gammaray.audit import run
from gammaray.audit.chance import check_law
from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status, Undecided, failed, inconclusive, not_possible, passed
from gammaray.audit.limits import check_stop
from gammaray.audit.reference import MIN_TOKENS, check_probabilities
from gammaray.audit.run import run_audit
from gammaray.audit.subject import MODES, WHOLE, Subject
from gammaray.errors import UnavailableError
from tests.support.scripted_http import scripted

PROMPT = "a prompt"


async def found(check, reply, *, num_prompts=1, num_top=20, budget=10_000, knows_drafter=False):
    """Run a check, against a server whose choice is a function of the request's body; return its result."""

    def answered(path, body):
        return 200, {"choices": [{"index": 0, "text": "", "finish_reason": "length", **reply(body)}]}

    with scripted(answered) as (url, _):
        server = Endpoint(url, "m", "", "NO_KEY", 4, Spent(budget), 30.0, num_top=num_top)
        absent = dict.fromkeys(MODES[1:], "whole completions of one choice alone")
        subject = Subject(server, None, [PROMPT] * num_prompts, 0.005, 1, absent=absent)
        subject.drafter = server.beside(url) if knows_drafter else None
        try:
            return await check(subject)
        finally:
            await subject.close()


TEXT = "one two three four five six seven"


def cut(text, body):
    ends = [text.index(stop) for stop in body.get("stop") or [] if stop in text]
    return {"text": text[: min(ends)], "finish_reason": "stop"} if ends else {"text": text}


async def test_texts_that_end_before_their_stop_strings_fail():
    assert (await found(check_stop, lambda body: cut(TEXT, body))).status is Status.PASSED
    early = await found(check_stop, lambda body: cut(TEXT[:5] if "stop" in body else TEXT, body))
    assert early.status is Status.FAILED


async def test_texts_that_differ_from_request_to_request_prove_nothing():
    # The shorter text is a prefix of the first one, as if the server had stopped too early.
    texts = itertools.cycle([TEXT, TEXT[:5], TEXT[:3]])
    with pytest.raises(Undecided, match="not repeatable"):
        await found(check_stop, lambda body: cut(next(texts), body))


def listed(tokens, shift=0.0):
    """Every second token is likely."""
    own = [-0.5 + shift if i % 2 else -6.0 for i in range(len(tokens))]
    tops = [{token: logprob, "x": -0.9} for token, logprob in zip(tokens, own, strict=True)]
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops}


def shifted(shift, echoes=True):
    """Serve log-probabilities that differ by a shift from those of an echo."""

    def reply(body):
        tokens = [f" {i}" for i in range(body["max_tokens"])]
        if not body.get("echo") or not echoes:
            return {"text": "".join(tokens), "logprobs": listed(tokens, shift)}
        tokens = body["prompt"].removeprefix(PROMPT).split(" ")[1:]
        echoed = listed([f" {token}" for token in tokens])
        last = {"tokens": [" more"], "token_logprobs": [-0.1], "top_logprobs": [{" more": -0.1}]}
        columns = {name: column + last[name] for name, column in echoed.items()}
        return {"text": body["prompt"] + " more", "logprobs": columns}

    return reply


@pytest.mark.parametrize(
    ("shift", "status"), [(0.0, Status.PASSED), (0.05, Status.INCONCLUSIVE), (0.2, Status.FAILED)]
)
async def test_texts_are_asked_for_until_enough_likely_tokens_are_compared(shift, status):
    result = await found(check_probabilities, shifted(shift), num_prompts=24, num_top=2)
    assert result.status is status
    assert MIN_TOKENS <= result.evidence["tokens"] < MIN_TOKENS + 64
    assert result.evidence["mean"] == pytest.approx(shift)


async def test_ignored_echo_is_not_possible():
    with pytest.raises(Undecided, match="ignores `echo`") as caught:
        await found(check_probabilities, shifted(0.0, echoes=False), num_prompts=24, num_top=2)
    assert caught.value.status is Status.NOT_POSSIBLE


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


def drafted(share, **lacking):
    """Serve texts with a share of the drafter's choices, and the drafter's choices for given ids."""

    def reply(body):
        if isinstance(body["prompt"], list):
            entries = [{str(choice_of_drafter(i)): {"logprob": -1.0, "rank": 1}} for i in body["prompt"][:-1]]
            return {"prompt_logprobs": [None, *entries], **lacking}
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
        own = {"logprobs": names, "prompt_token_ids": PROMPT_IDS, "token_ids": ids[len(PROMPT_IDS) :]}
        return {**own, **lacking}

    return reply


async def result_of_law(reply, knows_drafter=True):
    return await found(check_law, reply, num_top=LISTED, budget=4000, knows_drafter=knows_drafter)


@pytest.mark.slow
@pytest.mark.statistical
async def test_known_drafter_is_found_sooner():
    blind, knowing = [await result_of_law(drafted(0.08), knows) for knows in (False, True)]
    assert knowing.status is Status.FAILED
    assert knowing.evidence["strongest"].startswith("draft share")
    assert knowing.evidence["tokens"] < blind.evidence["tokens"] / 1.5
    assert knowing.evidence["smallest_detectable"]["draft share"] < 0.1


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [({"token_ids": None}, "return_token_ids"), ({"prompt_logprobs": None}, "prompt_logprobs")],
)
async def test_servers_that_lack_token_ids_make_the_law_not_possible(lacking, reason):
    with pytest.raises(Undecided, match=reason) as caught:
        await result_of_law(drafted(0.0, **lacking))
    assert caught.value.status is Status.NOT_POSSIBLE


def completions(path, body):
    if body.get("stream"):
        piece = {"choices": [{"index": i, "text": "a"} for i in range(body.get("n", 1))]}
        return 200, f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n".encode()
    return 200, {"choices": [{"index": i, "text": "a"} for i in range(body.get("n", 1))]}


async def audited(checks, monkeypatch, handler=completions, max_tokens=1000):
    for name in checks:
        monkeypatch.setitem(run.CHECKS, name, (checks[name], MODES))
    with scripted(handler) as (url, _):
        subject = Subject(Endpoint(url, "m", "", "NO_KEY", 4, Spent(max_tokens), 30.0), None, ["a"], 0.005, 1)
        try:
            return {finding.check: finding.result async for finding in run_audit(subject, checks)}
        finally:
            await subject.close()


async def test_any_error_of_a_check_is_its_finding_and_the_others_go_on(monkeypatch):
    broken = AsyncMock(side_effect=RecursionError("too deep \x1b[2J"))
    fine = AsyncMock(return_value=passed("fine \u202e", text="\ud800", kinds=[{"\x9b": 1}]))
    found = await audited({"stop": broken, "usage": fine}, monkeypatch)
    assert found["stop"].status is Status.INCONCLUSIVE
    assert r"RecursionError: too deep \u001b[2J" in found["stop"].summary
    assert found["usage"].summary.startswith(r"fine \u202e; also streamed")
    assert found["usage"].evidence["text"] == r"\ud800"
    assert found["usage"].evidence["kinds"] == [{r"\u009b": 1}]


@pytest.mark.parametrize(
    ("streamed", "status"),
    [
        (passed("p"), Status.PASSED),
        (failed("f", "curl"), Status.FAILED),
        (inconclusive("i"), Status.INCONCLUSIVE),
        (not_possible("n"), Status.PASSED),
    ],
)
async def test_worst_way_decides_unless_it_is_not_possible(monkeypatch, streamed, status):
    async def check(subject):
        await subject.ask("hi", max_tokens=1)
        found = streamed if subject.mode.is_streamed else passed("p")
        if isinstance(found, Exception):
            raise found
        return found

    found = (await audited({"stop": check}, monkeypatch))["stop"]
    assert found.status is status
    assert list(found.evidence["ways"]) == [str(mode) for mode in MODES]


async def test_ways_that_the_server_lacks_are_left_out(monkeypatch):
    def whole_only(path, body):
        return (400, {}) if body.get("stream") or "n" in body else completions(path, body)

    async def check(subject):
        assert subject.mode == WHOLE
        return passed("p")

    assert (await audited({"stop": check}, monkeypatch, whole_only))["stop"].summary == "p"


async def test_budget_that_allows_no_probe_is_an_error_of_the_audit(monkeypatch):
    with pytest.raises(UnavailableError, match="budget of 3 tokens"):
        await audited({}, monkeypatch, max_tokens=3)
