"""Forms of completions over HTTP and in the SDK: OpenAI's client unmodified, the SDK's parsed objects."""

import asyncio
import json
import re

import openai
import pytest
from pydantic import BaseModel, Field

from gammaray import AsyncClient, Client, FinishReason, IncompleteOutputError, InvalidArgumentError

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "# An example\nexample = "
MESSAGES = [{"role": "user", "content": "Give an example."}]


class Part(BaseModel):
    kind: str = Field(pattern="^[a-z]{1,8}$")
    size: int = Field(ge=0, le=99)


class Machine(BaseModel):
    name: str = Field(max_length=10)
    is_on: bool
    parts: list[Part] = Field(max_length=2)


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


def test_openai_parse_returns_the_model(client):
    answer = client.chat.completions.parse(
        model="", messages=MESSAGES, response_format=Machine, seed=1, max_tokens=300
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Machine)
    assert choice.message.parsed == Machine.model_validate_json(choice.message.content)
    assert json.dumps(json.loads(choice.message.content), ensure_ascii=False) == choice.message.content


def test_openai_stream_parses_as_it_arrives(client):
    options = {"model": "", "messages": MESSAGES, "seed": 2, "max_tokens": 300}
    with client.chat.completions.stream(**options, response_format=Machine) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert (
        streamed.parsed
        == client.chat.completions.parse(**options, response_format=Machine).choices[0].message.parsed
    )


def test_openai_parse_raises_where_the_text_is_cut(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="", messages=MESSAGES, response_format=Machine, max_tokens=4)


def test_json_object_of_every_choice(client):
    answer = client.chat.completions.create(
        model="",
        messages=MESSAGES,
        response_format={"type": "json_object"},
        n=3,
        max_tokens=200,
        seed=3,
        extra_body={"structured_outputs": None},
    )
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        assert choice.message.content.startswith("{")


GBNF = 'root ::= greeting " " [a-c]{2}\ngreeting ::= "hi" | "h\\u00e9"\n'


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"\d{2}/[x<]\["}, r"\d{2}/[x<]\["),
        ({"choice": ["def", 'a "b"\n']}, 'def|a "b"\n'),
        ({"grammar": 'start: ("ab" | NUMBER)~2\nNUMBER: /[0-9]/'}, "(ab|[0-9]){2}"),
        ({"grammar": GBNF}, "(hi|hé) [a-c]{2}"),
        ({"json": json.dumps({"enum": ["<[1]>", None]})}, r'"<\[1\]>"|null'),
    ],
    ids=str,
)
def test_structured_outputs_have_their_form(client, outputs, pattern):
    for seed in range(3):
        answer = client.completions.create(
            model="", prompt=PROMPT, seed=seed, max_tokens=40, extra_body={"structured_outputs": outputs}
        )
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema.not",
            "not {}",
        ),
        (
            {"structured_outputs": {"json": {"uniqueItems": True}}},
            "structured_outputs.json.uniqueItems",
            "uniqueItems true",
        ),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"grammar": "start: <[5]>"}}, "structured_outputs", "<[5]>"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "without a text"),
    ],
)
def test_wrong_form_is_a_400_that_names_field_and_reason(client, stream, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt=PROMPT, stream=stream, extra_body=fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_form_goes_with_scores_of_the_prompt(client):
    answer = client.completions.create(
        model="",
        prompt="x = ",
        echo=True,
        logprobs=1,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["1"]}},
    )
    assert answer.choices[0].text == "x = 1"
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert len(answer.choices[0].logprobs.tokens) >= 3


async def test_sdk_parses_and_streams(cluster):
    async with AsyncClient(cluster.grpc) as client:
        options = {"json_schema": Machine, "max_tokens": 300, "seed": 5, "temperature": 0.8}
        whole, again = await asyncio.gather(
            client.complete(PROMPT, **options), client.complete(PROMPT, **options, gamma=0)
        )
        streamed = [chunk.text async for chunk in client.generate(PROMPT, **options)]
        assert isinstance(whole.parsed, Machine)
        assert whole.text == again.text == "".join(streamed)
        assert (await client.complete(PROMPT, choice=["a", "b"], max_tokens=5)).text in ("a", "b")
        with pytest.raises(InvalidArgumentError, match=r"^json_schema\.not: got not"):
            await client.complete(PROMPT, json_schema={"not": {}})


def test_sdk_returns_a_cut_completion_whose_object_raises(cluster):
    with Client(cluster.grpc) as client:
        completion = client.complete(PROMPT, json_schema=Machine, max_tokens=3)
    assert completion.finish_reason is FinishReason.LENGTH
    with pytest.raises(IncompleteOutputError):
        completion.parsed  # noqa: B018  # a property
