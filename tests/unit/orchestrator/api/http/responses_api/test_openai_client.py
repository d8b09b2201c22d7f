"""The official openai client, unmodified, over a scripted orchestrator."""

import openai
import pytest
from pydantic import BaseModel

from tests.support.response_helpers import client
from tests.support.surface_helpers import ScriptedBackend

CALL = [b"Well <tool", b'_call>\n{"name": "Look', b'up", "arguments": {"wo', b'rd": "a"}}\n</tool_call>']


class Fact(BaseModel):
    """What a response is parsed to."""

    name: str
    size: int


class Lookup(BaseModel):
    """Arguments of a tool."""

    word: str


FACT = [b'{"name": "a', b'b", "si', b'ze": 3}']


async def test_create_retrieve_continue_and_delete():
    async with client(ScriptedBackend()) as api:
        first = await api.responses.create(model="scripted", input="a", instructions="be")
        assert first.output_text == "café"
        assert first.usage is not None
        assert first.usage.total_tokens == 8
        second = await api.responses.create(model="scripted", input="b", previous_response_id=first.id)
        items = [item async for item in api.responses.input_items.list(second.id, limit=1, order="asc")]
        assert [item.role for item in items] == ["user", "assistant", "user"]
        assert await api.responses.retrieve(second.id) == second
        await api.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(second.id)


async def test_stream_helper_gives_the_final_response():
    async with client(ScriptedBackend()) as api:
        async with api.responses.stream(model="scripted", input="a") as stream:
            found = [event async for event in stream]
            final = await stream.get_final_response()
        assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == "café"
        assert final.output_text == "café"
        assert final.status == "completed"
        retrieved = await api.responses.retrieve(final.id)
        assert retrieved.to_dict() == {**final.to_dict(), "output": retrieved.to_dict()["output"]}


async def test_parse_gives_the_model_whole_and_streamed():
    backend = ScriptedBackend(pieces=FACT)
    async with client(backend) as api:
        parsed = await api.responses.parse(model="scripted", input="a", text_format=Fact)
        assert parsed.output_parsed == Fact(name="ab", size=3)
        async with api.responses.stream(model="scripted", input="a", text_format=Fact) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == Fact(name="ab", size=3)
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
