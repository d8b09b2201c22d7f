"""Chat formats recognised from templates, and conversations with tools as the templates render them."""

import json

import pytest

from orchestrator.api.http.tools.calls import ToolChoice, plan_calls, render_messages
from orchestrator.api.http.tools.formats import CallFamily, CallFormat
from orchestrator.text.chat import ChatFormat
from tests.support.tool_helpers import ADDED, BODY_TOOLS, LLAMA, MISTRAL, QWEN, TOOLS, TemplateModel

PLAIN = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
REFUSING = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN
OTHER = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
TALK = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "17", "tool_call_id": "call_1"},
]


def planned(model, mode="auto", is_parallel=True):
    return plan_calls(TOOLS, ToolChoice(mode), is_parallel, model)


@pytest.mark.parametrize(
    ("template", "family", "is_native"),
    [
        (QWEN, CallFamily.HERMES, True),
        (LLAMA, CallFamily.LLAMA, True),
        (MISTRAL, CallFamily.MISTRAL, True),
        (PLAIN, CallFamily.HERMES, False),
        (OTHER, CallFamily.HERMES, False),
        (QWEN + "{# <function=name> #}", CallFamily.HERMES, False),
        (MISTRAL + "{# [ARGS] #}", CallFamily.HERMES, False),
    ],
    ids=["qwen", "llama", "mistral", "no tools", "unknown", "qwen coder", "late mistral"],
)
def test_family_is_recognised_by_the_template(template, family, is_native):
    form = CallFormat.of(TemplateModel(template).chat_format)
    assert (form.family, form.is_native) == (family, is_native)


def test_chat_format_says_what_the_tokenizer_has():
    for template in (QWEN, {"default": PLAIN, "tool_use": QWEN}):
        found = TemplateModel(template).chat_format
        assert (found.template, found.has_tools) == (QWEN, True)
        assert ADDED.items() <= found.added_tokens.items()
    for template in (PLAIN, REFUSING):
        assert not TemplateModel(template).chat_format.has_tools
    assert TemplateModel(None).chat_format == ChatFormat()


QWEN_PARTS = (
    json.dumps(BODY_TOOLS[0]),
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "<tool_response>\n17\n</tool_response>",
)
LLAMA_PARTS = (
    '"name": "now"',
    '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>',
    "ipython<|end_header_id|>\n\n17",
)


@pytest.mark.parametrize(("template", "parts"), [(QWEN, QWEN_PARTS), (LLAMA, LLAMA_PARTS)])
def test_template_renders_tools_calls_and_results(template, parts):
    model = TemplateModel(template)
    prompt = render_messages(TALK, model, planned(model)).text
    assert all(part in prompt for part in parts)
    assert prompt == render_messages(TALK, model, planned(model, "required")).text


def test_mistral_gets_ids_that_it_takes_and_forced_calls_a_marker():
    model = TemplateModel(MISTRAL)
    prompt = render_messages(TALK, model, planned(model)).text
    call, result = prompt.partition('"id": "')[2][:9], prompt.partition('"call_id": "')[2][:9]
    assert call == result
    assert call.isalnum()
    talk = [TALK[0], {**TALK[1], "tool_calls": [{**CALL, "id": "a1b2c3d4e"}]}]
    assert '"id": "a1b2c3d4e"' in render_messages(talk, model, planned(model)).text
    asked = render_messages(TALK[:1], model, planned(model)).text
    assert "[AVAILABLE_TOOLS]" in asked
    assert not asked.endswith("[TOOL_CALLS]")
    assert render_messages(TALK[:1], model, planned(model, "required")).text == asked + "[TOOL_CALLS]"


@pytest.mark.parametrize("template", [PLAIN, OTHER, REFUSING], ids=["no tools", "unknown", "refusing"])
def test_model_without_a_known_form_is_told_in_messages(template):
    model = TemplateModel(template)
    prompt = render_messages(TALK, model, planned(model)).text
    system, _, rest = prompt.partition("<user>")
    assert system.startswith("<system># Tools")
    assert json.dumps(BODY_TOOLS[0]) in system
    assert rest == (
        'Weather?<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'
        "\n</tool_call>"
        "<user><tool_response>\n17\n</tool_response>"
    )
    own = [{"role": "system", "content": "Be kind."}, *TALK]
    assert render_messages(own, model, planned(model)).text.startswith("<system>Be kind.\n\n# Tools")


def test_results_of_several_calls_are_one_message():
    model = TemplateModel(PLAIN)
    talk = [
        *TALK,
        {"role": "tool", "content": "now", "tool_call_id": "call_2"},
        {"role": "user", "content": "?"},
    ]
    prompt = render_messages(talk, model).text
    assert prompt.endswith(
        "<user><tool_response>\n17\n</tool_response>\n<tool_response>\nnow\n</tool_response><user>?"
    )
    assert "# Tools" not in prompt
    text = {**TALK[1], "content": "Let me see."}
    assert "<assistant>Let me see.\n<tool_call>" in render_messages([TALK[0], text], model).text
