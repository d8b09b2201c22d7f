"""Stored responses over a scripted orchestrator: who finds them, their input, and their end."""

import json

import pytest

from gammaray.security.keys import create_key
from gammaray.wire.sessions import SessionState
from orchestrator.access.caller import Authenticator
from orchestrator.storage.response_store import StoredResponse
from tests.support.openapi_helpers import document, validator
from tests.support.response_helpers import PATH, get, http_client, respond
from tests.support.surface_helpers import ScriptedBackend


def described(path: str, method: str):
    operation = document()["paths"][f"{PATH}/{{response_id}}{path}"][method]
    return validator(operation["responses"]["200"]["content"]["application/json"]["schema"])


async def test_input_is_listed_in_pages():
    backend = ScriptedBackend()
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


async def test_deleted_response_is_gone_with_its_session():
    backend = ScriptedBackend()
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


async def test_response_in_progress_is_told_as_such_while_its_session_has_an_owner():
    backend = ScriptedBackend()
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
    async with http_client(backend, Authenticator(path)) as http:

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
