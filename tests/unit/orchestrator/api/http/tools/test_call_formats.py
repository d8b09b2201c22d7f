"""Chat formats of templates: conversations with tools as they render them, and grammars of forced calls."""

import json

import pytest

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.tools.calls import CallPlan, Tool, ToolChoice, plan_calls, render_messages
from orchestrator.api.http.tools.formats import CallFamily, CallFormat
from orchestrator.api.http.tools.grammar import MAX_CALLS
from orchestrator.text.chat import ChatFormat
from tests.support.tool_helpers import (
    ADDED,
    BODY_TOOLS,
    LLAMA,
    LLAMA_CHAT,
    MISTRAL,
    MISTRAL_CHAT,
    PLAIN_CHAT,
    QWEN,
    QWEN_CHAT,
    THINKING_CHAT,
    TOOLS,
    Follower,
    TemplateModel,
    assembled,
    plan_text,
)

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


PARIS, NOW = ("get_weather", '{"city": "Paris"}'), ("now", "{}")
MISTRAL_TEXT = type(MISTRAL_CHAT)(MISTRAL_CHAT.template, True, {"[TOOL_CALLS]": False})
CHATS = {"plain": PLAIN_CHAT, "qwen": QWEN_CHAT, "llama": LLAMA_CHAT, "mistral": MISTRAL_CHAT}


@pytest.fixture(scope="module")
def followers():
    return {has_markers: Follower(ADDED if has_markers else {}) for has_markers in (False, True)}


@pytest.fixture
def follower(request, followers):
    """That of the parameter `chat`, if the test has it."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return followers[parameters.get("chat") is not PLAIN_CHAT]


def plan_of(chat, name="", is_parallel=True, tools=TOOLS, mode="required"):
    return CallPlan(tuple(tools), ToolChoice(mode, name), is_parallel, CallFormat.of(chat))


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_forced_calls_are_in_the_form_of_the_model(follower, chat):
    plan = plan_of(chat)
    grammar = plan.grammar("prompt")
    for calls in ([PARIS], [NOW], [("get_weather", '{"city": "\\"}", "unit": "c"}')]):
        text = plan_text(plan, calls)
        assert follower.accepts(grammar, text)
        assert not follower.accepts(grammar, text[:-1])
        parser = plan.parser(str)
        _, found = assembled(parser.push(text) + parser.finish())
        assert [(name, arguments) for _, name, arguments, _ in found] == calls
    for wrong in (("h", "{}"), ("get_weather", "{}"), ("now", '{"a": 1}'), ("get_weather", '{"city": 1}')):
        assert not follower.accepts(grammar, plan_text(plan, [wrong]))
    for wrong in ("", "Hello", plan_text(plan, [PARIS]) + " Hello"):
        assert not follower.accepts(grammar, wrong)


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_several_calls_only_where_they_are_parallel(follower, chat):
    plan, single = plan_of(chat), plan_of(chat, is_parallel=False)
    is_several = plan.form.family is not CallFamily.LLAMA
    for calls in ([PARIS, NOW], [NOW] * MAX_CALLS):
        text = plan_text(plan, calls)
        assert follower.accepts(plan.grammar(""), text) is is_several
        assert not follower.accepts(single.grammar(""), text)
    assert not follower.accepts(plan.grammar(""), plan_text(plan, [NOW] * (MAX_CALLS + 1)))
    assert follower.accepts(single.grammar(""), plan_text(plan, [NOW]))


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_named_tool_is_the_only_one(follower, chat):
    plan = plan_of(chat, name="now")
    assert follower.accepts(plan.grammar(""), plan_text(plan, [NOW]))
    assert not follower.accepts(plan.grammar(""), plan_text(plan, [PARIS]))


def test_markers_are_tokens_where_the_tokenizer_has_them(follower):
    with_tokens, with_text = plan_of(QWEN_CHAT).grammar(""), plan_of(PLAIN_CHAT).grammar("")
    assert "marked: <tool_call>" in with_tokens
    assert "<" not in with_text
    assert "[TOOL_CALLS]" in plan_of(MISTRAL_TEXT).grammar("")
    assert plan_of(MISTRAL_TEXT).form.marker_in_prompt == ""


def test_marker_that_no_grammar_can_express_ends_the_prompt(follower):
    assert plan_of(MISTRAL_CHAT).form.marker_in_prompt == "[TOOL_CALLS]"
    assert plan_of(MISTRAL_CHAT, mode="auto").markers == {b"[TOOL_CALLS]"}
    grammar = plan_of(MISTRAL_CHAT).grammar("")
    assert "TOOL_CALLS" not in grammar
    assert follower.accepts(grammar, ' [{"name": "now", "arguments": {}}]')


@pytest.mark.parametrize("thought", ["<think>\nhm, {\n</think>\n\n", "<think></think>", ""])
def test_thinking_before_forced_calls_is_free(follower, thought):
    plan = plan_of(THINKING_CHAT)
    call = plan_text(plan, [NOW])
    assert follower.accepts(plan.grammar("prompt"), thought + call)
    assert not follower.accepts(plan.grammar("prompt"), thought + "Hello")
    begun, rest = plan.grammar("prompt<think>\n"), (thought or "<think></think>").removeprefix("<think>")
    assert follower.accepts(begun, rest + call)
    assert not follower.accepts(begun, call)
    if thought:
        assert not follower.accepts(plan_of(QWEN_CHAT).grammar("prompt"), thought + call)


def test_answer_in_a_format_is_an_alternative_to_calls(follower):
    plan = plan_of(QWEN_CHAT, mode="auto")
    grammar = plan.grammar("", answer='%json {"type": "integer"}')
    assert follower.accepts(grammar, "17")
    assert follower.accepts(grammar, plan_text(plan, [PARIS, NOW]))
    assert not follower.accepts(grammar, "seventeen")
    forced = plan_of(QWEN_CHAT).grammar("", answer='%json {"type": "integer"}')
    assert not follower.accepts(forced, "17")
    with pytest.raises(InvalidArgumentError) as error:
        plan_of(MISTRAL_CHAT, mode="auto").grammar("", answer='%json {"type": "integer"}')
    assert error.value.field == "response_format"


OBJECT = {"type": "object", "properties": {"a": {"type": "null"}}}
SCHEMAS = {
    "absent": (None, ["{}"], ['{"a": 1}', "[]"]),
    "no type": ({"properties": {"a": {}}}, ["{}", '{"a": [1]}'], ["[]", '{"b": 1}']),
    "reference": ({"$ref": "#/$defs/o", "$defs": {"o": OBJECT}}, ['{"a": null}'], ['{"a": 1}']),
    "choice": ({"anyOf": [OBJECT, {"type": "object"}]}, ['{"a": null}', '{"b": 3}'], ["[]", "1"]),
}


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS.values(), ids=SCHEMAS)
def test_arguments_follow_the_schema(follower, schema, right, wrong):
    plan = plan_of(QWEN_CHAT, tools=[Tool("f", parameters=schema)])
    grammar = plan.grammar("")
    assert all(follower.accepts(grammar, plan_text(plan, [("f", text)])) for text in right)
    assert not any(follower.accepts(grammar, plan_text(plan, [("f", text)])) for text in wrong)


def test_many_tools_with_awkward_names(followers):
    names = [f"tool-{n}.of_{'x' * 40}" for n in range(128)]
    tools = [Tool(name, parameters={"properties": {"<[1]>": {"const": name}}}) for name in names]
    plan = plan_of(PLAIN_CHAT, tools=tools)
    text = plan_text(plan, [(name, json.dumps({"<[1]>": name})) for name in names[-2:]])
    assert followers[False].accepts(plan.grammar(""), text)
