"""Stored responses over a scripted orchestrator: who finds them, and what the official client gets."""

import json

import openai
import pytest
from pydantic import BaseModel

from gammaray.security.keys import create_key
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import Authenticator
from orchestrator.storage.response_store import StoredResponse
from tests.support.http_helpers import http_client
from tests.support.openapi_helpers import document, validator
from tests.support.response_helpers import PATH, client, get, respond
from tests.support.surface_helpers import ScriptedBackend


def described(path: str, method: str):
    operation = document()["paths"][f"{PATH}/{{response_id}}{path}"][method]
    return validator(operation["responses"]["200"]["content"]["application/json"]["schema"])


async def test_input_is_listed_in_pages(backend):
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    response_id = (await respond(backend, input=items)).json()["id"]

    async def page(**query):
        answer = (await get(backend, f"{response_id}/input_items", **query)).json()
        described("/input_items", "get").validate(answer)
        texts = "".join(item["content"][0]["text"] for item in answer["data"])
        return texts, answer["has_more"], answer["last_id"]

    assert (await page())[:2] == ("43210", False)
    texts, has_more, last_id = await page(limit=2, order="asc")
    assert (texts, has_more) == ("01", True)
    assert (await page(limit=3, order="asc", after=last_id))[:2] == ("234", False)
    *_, last_id = await page(order="asc")
    assert await page(order="asc", after=last_id) == ("", False, None)


async def test_deleted_response_is_gone_with_its_session(backend):
    response_id = (await respond(backend, input="x")).json()["id"]
    answer = await get(backend, response_id, "DELETE")
    described("", "delete").validate(answer.json())
    assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
    assert backend.deleted == [response_id]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        answer = await get(backend, f"{response_id}{path}", method)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize("name", ["resp_none", "a b", "x" * 200, "tenant:resp"])
async def test_unknown_name_is_not_found(name):
    answer = await get(ScriptedBackend(), name)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    answer = await respond(ScriptedBackend(), input="x", previous_response_id=name)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "previous_response_not_found")


async def test_response_in_progress_is_told_as_such_while_its_session_has_an_owner(backend):
    body = (await respond(backend, input="x")).json()
    response_id = body["id"]
    running = json.dumps({**body, "status": "in_progress", "output": []}).encode()
    backend.responses.kept[response_id] = StoredResponse(b"[]", running)
    assert (await get(backend, response_id)).json()["status"] == "in_progress"
    answer = await respond(backend, input="x", previous_response_id=response_id)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    backend.state = SessionState.DETACHED  # its orchestrator has died
    answer = await get(backend, response_id)
    described("", "get").validate(answer.json())
    assert answer.json()["status"] == "failed"
    assert answer.json()["error"]["code"] == "server_error"


async def test_tenants_do_not_find_the_responses_of_others(tmp_path):
    path = tmp_path / "keys.json"
    keys = {tenant: create_key(path, tenant)[1] for tenant in ("alice", "bob")}
    backend = ScriptedBackend()
    async with http_client(backend, authenticator=Authenticator(path)) as http:

        def headers(tenant):
            return {"Authorization": f"Bearer {keys[tenant]}"}

        made = await http.post(PATH, json={"input": "secret"}, headers=headers("alice"))
        response_id = made.json()["id"]
        assert list(backend.responses.kept) == [f"alice:{response_id}"]
        for name in (response_id, f"alice:{response_id}"):
            for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                answer = await http.request(method, f"{PATH}/{name}{tail}", headers=headers("bob"))
                assert answer.status_code == 404
            body = {"input": "x", "previous_response_id": name}
            assert (await http.post(PATH, json=body, headers=headers("bob"))).status_code == 404
        answer = await http.get(f"{PATH}/{response_id}", headers=headers("alice"))
        assert answer.json() == made.json()


CALL = [b"Well <tool", b'_call>\n{"name": "Look', b'up", "arguments": {"wo', b'rd": "a"}}\n</tool_call>']


class Fact(BaseModel):
    """What a response is parsed to."""

    name: str
    size: int


class Lookup(BaseModel):
    """Arguments of a tool."""

    word: str


FACT = [b'{"name": "a', b'b", "si', b'ze": 3}']


async def test_parse_gives_the_model_whole_and_streamed():
    backend = ScriptedBackend(pieces=FACT)
    async with client(backend) as api:
        parsed = await api.responses.parse(model="scripted", input="a", text_format=Fact)
        assert parsed.output_parsed == Fact(name="ab", size=3)
        async with api.responses.stream(model="scripted", input="a", text_format=Fact) as stream:
            found = [event async for event in stream]
            final = await stream.get_final_response()
        deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
        assert "".join(deltas) == final.output_text == '{"name": "ab", "size": 3}'
        assert (final.output_parsed, final.status) == (Fact(name="ab", size=3), "completed")
    assert all("%json" in request.sampling.grammar for request in backend.requests)


async def test_tools_whole_and_streamed():
    backend = ScriptedBackend(pieces=CALL)
    tools = [openai.pydantic_function_tool(Lookup)]
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    async with client(backend) as api:
        parsed = await api.responses.parse(model="scripted", input="a", tools=flat)
        assert [item.type for item in parsed.output] == ["message", "function_call"]
        assert Lookup.model_validate_json(parsed.output[1].arguments) == Lookup(word="a")
        async with api.responses.stream(model="scripted", input="a", tools=flat) as stream:
            found = [event async for event in stream]
            final = await stream.get_final_response()
        pieces = [e.delta for e in found if e.type == "response.function_call_arguments.delta"]
        assert len(pieces) > 1
        call = final.output[1]
        assert "".join(pieces) == call.arguments == '{"word": "a"}'
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        items = [{"role": "user", "content": "a"}, *final.to_dict()["output"], result]
        by_items = await api.responses.create(model="scripted", input=items)
        by_id = await api.responses.create(
            model="scripted", input=[result], previous_response_id=final.id, tools=flat
        )
        other = await api.responses.create(model="scripted", input=[{**result, "call_id": "other"}])
        assert by_items.status == by_id.status == other.status == "completed"
    assert backend.requests[-2].prompt.endswith("user: <tool_response>\n7\n</tool_response>\n")
