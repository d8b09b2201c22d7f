"""How an audit runs its checks: each in its ways, and none ends the others."""

import json

import pytest

from gammaray.audit import run
from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status, failed, inconclusive, not_possible, passed
from gammaray.audit.run import run_audit
from gammaray.audit.subject import MODES, WHOLE, Subject
from gammaray.errors import UnavailableError
from tests.support.scripted_http import scripted


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
    async def broken(subject):
        raise RecursionError("too deep \x1b[2J")

    async def fine(subject):
        return passed("fine \u202e", text="\ud800", kinds=[{"\x9b": 1}])

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
