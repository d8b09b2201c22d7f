"""The audit's check of stop strings, on servers whose texts repeat and on one whose do not."""

import itertools

import pytest

from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status, Undecided
from gammaray.audit.limits import check_stop
from gammaray.audit.subject import Subject
from tests.support.scripted_http import scripted

TEXT = "one two three four five six seven"


def completion(text, reason):
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def cut(text, body):
    ends = [text.index(stop) for stop in body.get("stop") or [] if stop in text]
    return completion(text[: min(ends)] if ends else text, "stop" if ends else "length")


async def stop_result(handler):
    with scripted(lambda path, body: handler(body)) as (url, _):
        server = Endpoint(url, "m", "", "NO_KEY", 1, Spent(10_000), 30.0)
        subject = Subject(server, None, ["a prompt"], 0.005, 1)
        try:
            return (await check_stop(subject)).status
        finally:
            await subject.close()


async def test_texts_that_end_at_their_stop_strings_pass():
    assert await stop_result(lambda body: cut(TEXT, body)) is Status.PASSED


async def test_texts_that_end_before_their_stop_strings_fail():
    early = TEXT[:5]
    assert await stop_result(lambda body: cut(early if "stop" in body else TEXT, body)) is Status.FAILED


async def test_texts_that_differ_from_request_to_request_prove_nothing():
    # The shorter text is a prefix of the first one, as if the server had stopped too early.
    texts = itertools.cycle([TEXT, TEXT[:5], TEXT[:3]])
    with pytest.raises(Undecided, match="not repeatable"):
        await stop_result(lambda body: cut(next(texts), body))
