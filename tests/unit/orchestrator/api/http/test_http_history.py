"""Conversations that clients send back: whatever the server has sent is taken, and every role renders."""

import json
import random

import pytest

from orchestrator.api.http.tools.formats import OPEN, CallFamily, CallFormat
from orchestrator.text.chat import Roles
from tests.support.http_helpers import complete, events_with_ids
from tests.support.response_helpers import PATH as RESPONSES
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tool_helpers import (
    BODY_TOOLS,
    LLAMA,
    MISTRAL,
    QWEN,
    STRICT,
    XML_RESPONSE,
    TemplateModel,
    joined,
)

CHATS = "/v1/chat/completions"
GENERIC = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<assistant>"
)
GEMMA = STRICT.replace('message.role == "system"', 'message.role == "system" and raise_exception("none")')
HARMONY = GENERIC.replace("{{ message['role'] }}", "{{ message['role'] | replace('developer', 'dev') }}")
# Those of newer models, which take arguments apart; and those that want texts.
ITEMS = QWEN.replace(
    "call.function.arguments | tojson",
    "''}}{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}{% endfor %}{{''",
)
TEXTS = QWEN.replace("call.function.arguments | tojson", "call.function.arguments")
SILENT = QWEN.replace(
    "call.function.arguments | tojson",
    "''}}{% for key in call.function.arguments %}{{ key[:1] }}{% endfor %}{{''",
)
XML = QWEN + "{# <function=name> #}"
TEMPLATES = {
    "qwen": TemplateModel(QWEN),
    "llama": TemplateModel(LLAMA),
    "mistral": TemplateModel(MISTRAL),
    "strict": TemplateModel(STRICT),
    "no system": TemplateModel(GEMMA),
    "generic": TemplateModel(GENERIC),
    "items": TemplateModel(ITEMS),
    "texts": TemplateModel(TEXTS),
    "silent": TemplateModel(SILENT),
    "template": TemplateModel(XML, XML_RESPONSE),
}


class Backend(ScriptedBackend):
    """Renders with a model's template."""

    max_context = 100_000

    def __init__(self, model: TemplateModel, **options) -> None:
        super().__init__(chat_format=model.chat_format, **options)
        self.render_chat, self.encode_marked = model.render_chat, model.encode_marked


async def prompt_of(model, messages, **body):
    backend = Backend(model)
    answer = await complete(backend, CHATS, messages=messages, **body)
    assert answer.status_code == 200, answer.text
    return backend.requests[0].prompt


def test_developer_stays_where_the_template_knows_it():
    model = TemplateModel(HARMONY)
    assert model.chat_format.roles == Roles()
    assert model.render_chat([{"role": "developer", "content": "Be brief."}]).startswith("<dev>Be brief.")


def texts_of(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_developer_is_the_system_where_the_template_does_not_know_it(name):
    model = TEMPLATES[name]
    found = [
        await prompt_of(model, texts_of((role, "Be brief."), ("user", "Hi")))
        for role in ("developer", "system")
    ]
    assert found[0] == found[1]
    assert "developer" not in found[0]
    assert "Be brief." in found[0]


SEQUENCES = [
    ("system", "developer", "user"),
    ("system", "user", "assistant", "system", "user"),
    ("user", "developer", "user"),
    ("user", "user", "assistant", "assistant", "user", "user"),
    ("system",),
    ("user", "assistant"),
    ("system", "assistant", "user"),
]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_sequence_of_roles_renders_with_all_texts_in_order_or_is_named(name):
    for roles in SEQUENCES:
        texts = [f"text {number}" for number in range(len(roles))]
        messages = texts_of(*zip(roles, texts, strict=True))
        prompt = await prompt_of(TEMPLATES[name], messages)
        assert all(prompt.count(text) == 1 for text in texts), roles
        for role in ("user", "assistant"):
            places = [prompt.index(t) for own, t in zip(roles, texts, strict=True) if own == role]
            assert places == sorted(places)


async def test_instructions_join_the_messages_of_the_system():
    backend = Backend(TEMPLATES["strict"])
    body = {"instructions": "One.", "input": texts_of(("developer", "Two."), ("user", "Hi"))}
    answer = await complete(backend, RESPONSES, **body)
    assert answer.status_code == 200, answer.text
    assert backend.requests[0].prompt.startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n")


REFUSING = '{%- elif message.content == "bad" %}{{ raise_exception("bad") }}{%- else %}'


@pytest.mark.parametrize("template", [QWEN.replace("{%- else %}", REFUSING), None], ids=["refusing", "none"])
async def test_messages_that_no_template_takes_are_named(template):
    model = TemplateModel(template)
    messages = texts_of(("user", "good"), ("user", "bad"))
    for tools in ({}, {"tools": BODY_TOOLS}):
        answer = await complete(Backend(model), CHATS, messages=messages, **tools)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    answer = await complete(Backend(model), RESPONSES, input=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None, "tool_calls": None, "name": None, "audio": None}, ""),
    ],
    ids=str,
)
async def test_answer_may_have_no_content(message, text):
    asked = {"role": "user", "content": "x"}
    prompt = await prompt_of(TEMPLATES["generic"], [asked, {"role": "assistant", **message}, asked])
    assert prompt == f"<user>x<assistant>{text}<user>x<assistant>"


@pytest.mark.parametrize("name", TEMPLATES)
async def test_arguments_that_are_no_json_object_render_as_text(name, subtests):
    for arguments in ['{"city": "Os', "[1]", '{"a": "\\ud800"}', '"x"', '{"a":' * 100, "NaN", "{x}"]:
        with subtests.test(arguments[:80]):
            function = {"name": "get_weather", "arguments": arguments}
            called = [{"id": "c1", "type": "function", "function": function}]
            messages = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": called},
                {"role": "tool", "tool_call_id": "unknown", "content": "not run"},
                {"role": "user", "content": "Go on."},
            ]
            for tools in ({}, {"tools": BODY_TOOLS}):
                prompt = await prompt_of(TEMPLATES[name], messages, **tools)
                assert arguments in prompt or json.dumps(arguments, ensure_ascii=False)[1:-1] in prompt
                assert "not run" in prompt


ANSWERS = {
    "hermes": (
        'Sure 😀.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\ud83d"}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "broken": '<tool_call>{"name": "now", "arguments": {a: 1}}</tool_call> <tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Zürich"}}; {"name": "now", "parameters": {}}',
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
}
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_chat_takes_back_every_answer_of_its_own_and_streams_the_same(name):
    rng = random.Random(name)
    marker = OPEN.get(CallFormat.of(TEMPLATES[name].chat_format).family, OPEN[CallFamily.HERMES])
    messages = [{"role": "user", "content": "Hi"}]
    for turn in range(12):
        data = rng.choice(list(ANSWERS.values())).encode()  # ends anywhere, at the limit of tokens or before
        data, size = data[: rng.randrange(1, len(data) + 1)], rng.choice((1, 3, 8))
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        backend, max_tokens = Backend(TEMPLATES[name], pieces=pieces), len(pieces) + rng.choice((0, 9))
        body = {
            "messages": messages,
            "tools": BODY_TOOLS,
            "tool_choice": rng.choice(CHOICES),
            "max_tokens": max_tokens,
        }
        answer = await complete(backend, CHATS, **body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        content, reason = message["content"] or "", choice["finish_reason"]
        *events, _ = await events_with_ids(backend, CHATS, **body)
        pieces = [json.loads(data)["choices"][0] for _, data in events]
        assert joined(pieces) == (content, calls, [reason])
        # Text has no beginning of a call; a call in another model's form is text.
        assert not any(content.rstrip().endswith(marker[:length]) for length in range(2, len(marker) + 1))
        if reason == "tool_calls":
            assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        messages.append(message)
        if calls and rng.random() < 0.7:
            ids = [call["id"] for call in calls] + ["unknown"]
            messages += [{"role": "tool", "tool_call_id": own, "content": "ok"} for own in ids]
        if rng.random() < 0.7:
            messages.append({"role": rng.choice(("user", "system", "developer")), "content": f"turn {turn}"})
