"""The audit's HTTP client: retries, refusals, bounds, streams, and keys that are not printed."""

import asyncio
import contextlib
import json
import shlex

import pytest

from gammaray import errors
from gammaray.audit import endpoint as module
from gammaray.audit.answers import AnswerError
from gammaray.audit.endpoint import Endpoint, RefusedError, Spent
from gammaray.audit.findings import Status, Undecided
from tests.support.scripted_http import scripted

DONE = {
    "choices": [{"index": 0, "text": "ok"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
}


def server(url, key="", max_tokens=1000, timeout_s=30.0, **options):
    return Endpoint(url, "m", key, "MY_KEY", 4, Spent(max_tokens), timeout_s, **options)


@contextlib.asynccontextmanager
async def asking(*reply, **options):
    """Yield an endpoint whose server gives this reply, or that of a function, and its requests' headers."""
    function = reply[0] if callable(reply[0]) else lambda path, body: reply
    with scripted(function) as (url, headers):
        one = server(url, **options)
        try:
            yield one, headers
        finally:
            await one.close()


async def ask(*reply, **options):
    async with asking(*reply, **options) as (one, _):
        return (await one.ask("hi", max_tokens=5)).choice.tokens


async def test_answer_is_counted_and_the_key_is_sent_but_not_printed():
    async with asking(200, DONE, key="secret") as (one, headers):
        answer = await one.ask("hi", max_tokens=5)
    assert answer.choices[0].text == "ok"
    assert (one.spent.tokens, one.spent.requests, one.spent.reserved) == (3, 1, 0)
    assert headers[0]["authorization"] == "Bearer secret"
    curl = one.curl({"prompt": "it's $HOME", "max_tokens": 5})
    assert "secret" not in curl
    assert '"authorization: Bearer $MY_KEY"' in curl
    assert json.loads(shlex.split(curl)[-1]) == {"prompt": "it's $HOME", "max_tokens": 5}
    assert answer.curl == one.curl({"model": "m", "prompt": "hi", "max_tokens": 5})


async def test_overload_is_tried_again_a_few_times():
    replies = [(429, {}, {"retry-after": "0"}), (503, {}, {"retry-after": "0"}), (200, DONE)]
    async with asking(lambda path, body: replies.pop(0)) as (one, _):
        assert (await one.ask("hi", max_tokens=5)).choice.text == "ok"
    assert one.spent.requests == 1
    async with asking(503, {"error": "busy"}, {"retry-after": "0"}) as (one, headers):
        with pytest.raises(errors.UnavailableError, match="busy"):
            await one.ask("hi", max_tokens=5)
    assert len(headers) == 5


@pytest.mark.parametrize(
    ("status", "answer", "error", "text"),
    [
        (400, {"error": {"message": "no\nsuch field"}}, RefusedError, "400: no such field"),
        (422, {"detail": "top_k"}, RefusedError, "top_k"),
        (404, b"<html>", RefusedError, "<html>"),
        (401, {"error": {"message": "key"}}, errors.UnauthenticatedError, "key"),
        (500, {"error": {"message": "boom"}}, errors.UnavailableError, "boom"),
        (200, b"{", AnswerError, "body"),
    ],
)
async def test_failures_have_a_type_and_the_servers_reason(status, answer, error, text):
    with pytest.raises(error, match=text):
        await ask(status, answer)


async def test_answers_are_bounded_in_size_and_tokens():
    async with asking(200, b" " * 2**19) as (one, _):
        for call in (one.ask, one.stream):
            with pytest.raises(AnswerError, match="at most"):
                await call("hi", max_tokens=5)
        with pytest.raises(Undecided, match="budget") as caught:
            await one.ask("hi", max_tokens=500, n=3)
        assert caught.value.status is Status.INCONCLUSIVE


async def test_answers_are_bounded_in_time():
    async def dripping(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    listener = await asyncio.start_server(dripping, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    one = server(url, timeout_s=0.3)
    for work in (one.first_model(), one.ask("hi", max_tokens=5)):
        with pytest.raises(errors.DeadlineExceededError):
            await asyncio.wait_for(work, 60)
    listener.close()
    with pytest.raises(errors.UnavailableError):
        await one.ask("hi", max_tokens=5)
    await one.close()


def lists(num_tokens=1, num_top=1, text="a", n=1):
    top = {f"t{i}": -5.0 - i for i in range(num_top)}
    logprobs = {
        "tokens": ["t0"] * num_tokens,
        "token_logprobs": [-5.0] * num_tokens,
        "top_logprobs": [top] * num_tokens,
    }
    return {"choices": [{"index": i, "text": text, "logprobs": logprobs} for i in range(n)]}


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (lists(num_tokens=30), "tokens of a choice"),
        (lists(num_top=14), "alternatives of a token"),
        (lists(text="a" * 14_000), "characters of a text"),
        (lists(n=3), "choices"),
    ],
)
async def test_more_than_asked_for_is_refused(answer, field):
    with pytest.raises(AnswerError, match=f"answer: {field}"):
        await ask(200, answer, num_top=5)
    # A little more is a check's finding.
    assert len(await ask(200, lists(num_tokens=6, num_top=6), num_top=5)) == 6


async def test_compressed_answer_is_refused_without_decoding():
    async with asking(200, b"\x1f\x8b", {"content-encoding": "gzip, gzip"}) as (one, headers):
        with pytest.raises(AnswerError, match="content-encoding"):
            await one.ask("hi", max_tokens=5)
        assert await one.first_model() == ""
    assert {one["accept-encoding"] for one in headers} == {"identity"}


@pytest.mark.parametrize("completion_tokens", [0, -(10**9), 10**9])
async def test_budget_is_charged_what_was_asked_whatever_the_server_counts(completion_tokens):
    usage = {"prompt_tokens": 1, "completion_tokens": completion_tokens, "total_tokens": 1}
    answer = {"choices": [{"text": "", "logprobs": {"tokens": []}}], "usage": usage}
    async with asking(200, answer, max_tokens=20) as (one, _):
        await asyncio.gather(*(one.ask("hi", max_tokens=5) for _ in range(4)))
        assert one.spent.left == 0
        assert one.spent.tokens == 20
        with pytest.raises(Undecided, match="budget"):
            await one.ask("hi", max_tokens=5)


async def test_lone_surrogates_of_a_server_are_sent_and_shown_as_escapes():
    answer = {**DONE, "choices": [{"text": "\ud800\x1b[2J\u202e"}]}
    asked = []
    async with asking(lambda path, body: (200, asked.append(body) or answer)) as (one, _):
        text = (await one.ask("hi", max_tokens=5)).choice.text
        again = await one.ask("hi", max_tokens=5, stop=[text])
    assert asked[1]["stop"] == [text]
    assert again.curl.isprintable()
    assert json.loads(shlex.split(again.curl)[-1])["stop"] == [text]


def events(*found):
    texts = (event.decode() if isinstance(event, bytes) else json.dumps(event) for event in found)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def piece(text, index=0, **more):
    return {"choices": [{"index": index, "delta": {"content": text}, **more}]}


async def test_stream_is_joined_by_choice():
    data = events(
        piece("a"),
        piece("x", 1),
        piece("b", finish_reason="stop"),
        {"choices": [], "usage": DONE["usage"]},
        b"[DONE]",
    )
    async with asking(200, data, is_chat=True) as (one, _):
        answer = await one.stream("hi", max_tokens=5)
    assert [choice.text for choice in answer.choices] == ["ab", "x"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage == (1, 3, 4)


async def test_endless_line_of_a_stream_takes_linear_time():
    """8 MiB in pieces of 64 bytes; copied again with each piece they would be 512 GiB."""

    async def pieces():
        yield b"data: "
        for _ in range(2**17):
            await asyncio.sleep(0)
            yield b"x" * 64
        yield b"\ndata: [DONE]\n"

    async with asyncio.timeout(60):
        assert [len(event) async for event in module.events(pieces())] == [2**23, 6]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (events(piece("a")), AnswerError),
        (events({"choices": []}, b"[DONE]"), AnswerError),
        (events(b"{"), AnswerError),
        (events(5, b"[DONE]"), AnswerError),
        (events({"choices": [{"index": "x"}]}, b"[DONE]"), AnswerError),
        (events({"error": {"message": "died"}}, b"[DONE]"), errors.UnavailableError),
    ],
)
async def test_broken_stream_is_an_error(data, error):
    async with asking(200, data) as (one, _):
        with pytest.raises(error) as caught:
            await one.stream("hi", max_tokens=5)
    if error is AnswerError:
        assert '"stream": true' in caught.value.curl


def test_wrong_url_or_key_is_refused():
    urls = ("ftp://a", "http://", "http://u:p@a", "http://a?b=c")
    for url, key in (*((url, "") for url in urls), ("http://a", "a\nb"), ("http://a", "é")):
        with pytest.raises(errors.InvalidArgumentError):
            server(url, key)


def test_another_server_does_not_get_the_key():
    one = server("http://a", "secret")
    assert one.beside("http://b").api_key == ""
    assert one.beside(one.url).api_key == "secret"
