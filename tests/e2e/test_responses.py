"""The Responses API of the official openai client against a whole cluster."""

import json

import openai
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

OPTIONS = {"model": "demo", "max_output_tokens": 32, "extra_body": {"seed": 5}}


class Answer(BaseModel):
    """What a response is parsed to."""

    is_ok: bool
    count: int


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


def test_whole_streamed_retrieved_and_replayed_agree(client):
    whole = client.responses.create(input="def read_lines(path):\n", **OPTIONS)
    with client.responses.stream(input="def read_lines(path):\n", **OPTIONS) as stream:
        events = list(stream)
    streamed = events[-1].response
    assert streamed.output_text == whole.output_text
    assert streamed.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert streamed.usage.output_tokens == len(streamed.gammaray["token_ids"]) > 0
    stored = client.responses.retrieve(streamed.id)
    assert stored.to_dict() == streamed.to_dict()
    rest = list(client.responses.retrieve(streamed.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == list(range(4, len(events)))
    assert rest[-1].response.to_dict() == streamed.to_dict()


def test_next_response_continues_and_a_deleted_one_is_gone(client):
    first = client.responses.create(input="Hello", instructions="Be short.", **OPTIONS)
    second = client.responses.create(input="And?", previous_response_id=first.id, **OPTIONS)
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="And?", previous_response_id=first.id, **OPTIONS)
    third = client.responses.create(input="So?", previous_response_id=second.id, **OPTIONS)
    assert third.previous_response_id == second.id


def test_parsed_and_forced_calls_are_valid(client):
    options = {**OPTIONS, "max_output_tokens": 64}
    with client.responses.stream(input="x", text_format=Answer, **options) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Answer)
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tool = {"type": "function", "name": "take", "parameters": parameters, "strict": True}
    called = client.responses.create(
        input="x", tools=[tool], tool_choice="required", parallel_tool_calls=False, **options
    )
    (call,) = called.output
    assert json.loads(call.arguments)["n"] in (1, 2)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = client.responses.create(input=[result], previous_response_id=called.id, **options)
    assert after.output_text or after.output
