"""Streams over HTTP that are resumed with Last-Event-ID, over a scripted orchestrator."""

import json

import pytest

from tests.support.http_helpers import CHAT, call, events_with_ids
from tests.support.surface_helpers import ScriptedBackend

WORDS = (b"one ", b"two ", b"three ", b"four")
CHATS = "/v1/chat/completions"


def backend():
    return ScriptedBackend(pieces=WORDS)


async def test_events_carry_session_turn_and_tokens():
    events = await events_with_ids(backend(), prompt="x")
    assert [event_id for event_id, _ in events] == ["s0:0:1", "s0:0:2", "s0:0:3", "s0:0:4:end", None]
    chat = await events_with_ids(backend(), CHATS, messages=CHAT)
    assert [event_id for event_id, _ in chat][:2] == [None, "s0:0:1"]  # the role is no token


async def test_events_of_several_choices_cannot_be_resumed_and_have_no_id():
    events = await events_with_ids(backend(), prompt="x", n=2)
    assert {event_id for event_id, _ in events} == {None}
    body = {"prompt": "x", "n": 2, "stream": True}
    answer = await call(backend(), json=body, headers={"Last-Event-ID": "s0:0:1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "2 choices" in answer.json()["error"]["message"]


async def test_events_that_are_not_stored_cannot_be_resumed_and_have_no_id():
    scripted = backend()
    events = await events_with_ids(scripted, prompt="x", store=False)
    assert {event_id for event_id, _ in events} == {None}
    assert [json.loads(data)["choices"][0]["text"].encode() for _, data in events[:-1]] == list(WORDS)
    (request,) = scripted.requests
    assert request.store is False
    for path, body in (("/v1/completions", {"prompt": "x"}), (CHATS, {"messages": CHAT})):
        body = {**body, "store": False, "stream": True}
        answer = await call(backend(), path=path, json=body, headers={"Last-Event-ID": "s0:0:1"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "store")
        assert "not stored" in error["message"]


@pytest.mark.parametrize(
    "body", [{"prompt": "x", "logprobs": 0, "echo": True}, {"messages": CHAT, "logprobs": True}]
)
@pytest.mark.parametrize("seen", [1, 2, 3])
async def test_resume_sends_the_events_after_the_last_one(body, seen):
    path = CHATS if "messages" in body else "/v1/completions"
    whole = await events_with_ids(backend(), path, **body)
    scripted = backend()
    resumed = await events_with_ids(scripted, path, last_id=f"s0:0:{seen}", **body)
    after = [event for event in whole if event[0] == f"s0:0:{seen}"]
    expected = whole[whole.index(after[0]) + 1 :]
    assert [event_id for event_id, _ in resumed] == [event_id for event_id, _ in expected]
    for (_, got), (_, wanted) in zip(resumed[:-1], expected[:-1], strict=True):
        got, wanted = json.loads(got), json.loads(wanted)
        assert got["choices"] == wanted["choices"]  # text offsets of log-probabilities included
        assert got.get("gammaray", {}).get("token_ids") == wanted.get("gammaray", {}).get("token_ids")
    (request,) = scripted.requests
    assert (request.session_id, request.turn, request.resume_from) == ("s0", 0, seen)


async def test_resume_after_the_end_sends_no_text():
    options = {"include_usage": True}
    events = await events_with_ids(backend(), last_id="s0:0:3:end", prompt="x", stream_options=options)
    (_, usage), (_, done) = events
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 4
    assert json.loads(usage)["gammaray"]["session_id"] == "s0"
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("last_id", "fields", "status", "param"),
    [
        ("nonsense", {}, 400, "Last-Event-ID"),
        ("s:0:-1", {}, 400, "Last-Event-ID"),
        ("s:0:1:END", {}, 400, "Last-Event-ID"),
        (":0:1", {}, 400, "Last-Event-ID"),
        ("s/s:0:1", {}, 400, "gammaray.session_id"),
        ("s:99999999999:1", {}, 400, "gammaray.turn"),
        ("s:0:1", {"stream": False}, 400, "Last-Event-ID"),
        ("s:0:1", {"prompt": ["x", "y"]}, 400, "Last-Event-ID"),
        ("s:0:1", {"gammaray": {"session_id": "other"}}, 400, "gammaray.session_id"),
        ("gone:0:1", {}, 404, None),
    ],
)
async def test_invalid_last_event_id_is_rejected(last_id, fields, status, param):
    scripted = backend()
    body = {"prompt": "x", "stream": True, **fields}
    answer = await call(scripted, json=body, headers={"Last-Event-ID": last_id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert scripted.requests == []


async def test_turns_are_for_completions_and_not_for_chats():
    scripted = backend()
    turn = {"session_id": "mine", "turn": 2}
    assert (await call(scripted, json={"prompt": "x", "gammaray": turn})).status_code == 200
    (request,) = scripted.requests
    assert (request.session_id, request.turn) == ("mine", 2)
    answer = await call(scripted, path=CHATS, json={"messages": CHAT, "gammaray": turn})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "gammaray.turn")
