"""Grammars of forced calls, compiled for the demo model's tokenizer with the markers of the families."""

import json

import pytest

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.tools.calls import CallPlan, Tool, ToolChoice
from orchestrator.api.http.tools.formats import CallFamily, CallFormat
from orchestrator.api.http.tools.grammar import MAX_CALLS
from tests.support.tool_helpers import (
    ADDED,
    LLAMA_CHAT,
    MISTRAL_CHAT,
    PLAIN_CHAT,
    QWEN_CHAT,
    THINKING_CHAT,
    TOOLS,
    Follower,
    assembled,
    plan_text,
)

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
