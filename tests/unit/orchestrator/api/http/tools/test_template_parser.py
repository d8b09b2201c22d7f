"""Calls in forms that only a response template of transformers describes."""

import random
from functools import reduce

import pytest
from transformers import PreTrainedTokenizerFast

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.tools.calls import ToolChoice, plan_calls
from orchestrator.api.http.tools.formats import CallFamily
from orchestrator.api.http.tools.template_parser import TemplateParser
from orchestrator.text.chat import ChatFormat, chat_format
from tests.support.http_helpers import CHAT, complete, events_with_ids
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tool_helpers import ADDED, BODY_TOOLS, QWEN, TOOLS, XML_RESPONSE, assembled, raw_tokenizer

# JSON between markers.
JSON = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
CHAT_XML = QWEN + "{# <function=name> #}"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
WEATHER = ("c0", "get_weather", '{"city": "Zürich", "days": 3}', True)


def tools_with(**properties):
    parameters = {"type": "object", "properties": properties}
    names = ("get_weather", "now")
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


TYPED = tools_with(city={"type": "string"}, days={"type": "integer"})


def run(template, pieces, prompt=PROMPT, tools=TYPED, **options):
    parser = TemplateParser(template, tools, lambda index: f"c{index}", prompt=prompt, **options)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    text, calls = assembled(events)
    assert parser.num_calls == len(calls)
    return text, calls


UNKNOWN = XML_CALL.replace("get_weather", "other")
LISTED = '[CALL]{"name": "now", "arguments": [1]}[/CALL]'
XML_CASES = {
    "one": (XML_CALL, "", [WEATHER]),
    "two after text": (
        f"Hm.\n{XML_CALL}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Hm.",
        [WEATHER, ("c1", "now", "{}", True)],
    ),
    "thinking": (f"<think>\nWell\n</think>\n\n{XML_CALL}", "<think>\nWell\n</think>", [WEATHER]),
    "text": ("no call <tool", "no call", []),
    "unknown name": (UNKNOWN, UNKNOWN, []),
    "cut": (XML_CALL.partition("3")[0], "", [("c0", "get_weather", '{"city": "Zürich"', False)]),
    "cut before arguments": (XML_CALL.partition("Z")[0], "", [("c0", "get_weather", "", False)]),
    "cut in the name": (XML_CALL.partition("weather")[0], "", []),
}
JSON_CASES = {
    "one": (
        '[CALL]{"name": "now", "arguments": {"a": "ü"}}[/CALL] ok',
        "",
        [("c0", "now", '{"a": "ü"}', True)],
    ),
    "without arguments": ('[CALL]{"name": "now"}[/CALL]', "", [("c0", "now", "{}", True)]),
    "none": ('a[CALL]{"name"[/CALL] b [CALL]', 'a[CALL]{"name"[/CALL] b [CALL]', []),
    "cut": ('a[CALL]{"name"', "a", []),
    "of another type": ("a[CALL][1][/CALL]b", "a[CALL][1][/CALL]b", []),
    "a list as arguments": (LISTED, LISTED, []),
    "nothing": ("", "", []),
    "cut after the name": ('[CALL]{"name": "now", "arguments": {"a"', "", [("c0", "now", "", False)]),
}
CASES = [
    *((f"xml {name}", XML_RESPONSE, *case) for name, case in XML_CASES.items()),
    *((f"json {name}", JSON, *case) for name, case in JSON_CASES.items()),
]


def test_every_split_gives_the_calls(subtests):
    for name, template, text, rest, calls in CASES:
        with subtests.test(name):
            found, whole = run(template, [text])
            assert (found.rstrip() if calls else found, whole) == (rest, calls)
            rng = random.Random(text)
            for size in (1, 2, 7):
                pieces = [text[at : at + size] for at in range(0, len(text), size)]
                assert run(template, pieces) == (found, calls)
            for _ in range(30):
                cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
                pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
                assert run(template, pieces) == (found, calls)


def json_call(argument):
    return f'[CALL]{{"name": "now", "arguments": {{"a": {argument}}}}}[/CALL]'


def named(arguments="{content}", **content):
    """Return a template of calls whose name is in the opening tag."""
    calls = {
        "open_pattern": r"\[CALL(?: (?P<name>\w+))?\]",
        "close": "[/CALL]",
        "repeats": True,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": arguments}},
    }
    return {**JSON, "fields": {**JSON["fields"], "tool_calls": {**calls, **content}}}


DEEP = "[" * 1500
DEEP_ARGUMENTS = reduce(lambda inner, _: {"a": inner}, range(300), "{content}")
INLINE = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>\d+)?", "value_parser": {"name": "text"}}
MALFORMED = {
    "nested too deeply": (JSON, {}, json_call(DEEP + "]" * len(DEEP))),
    "text of an array that is nested too deeply": (JSON, {"type": "array"}, json_call(f'"{DEEP}"')),
    "nested too deeply with what the template adds": (
        named(DEEP_ARGUMENTS, content="json"),
        {},
        f"[CALL now]{'[' * 750}{']' * 750}[/CALL]",
    ),
    "without a part that the pattern of calls has": (named(content="json"), {}, "[CALL]{}[/CALL]"),
    "without a part that the pattern of arguments has": (
        named(content="xml-inline", content_args=INLINE),
        {},
        "[CALL now]<a>[/CALL]",
    ),
    "of a schema that is none": (JSON, {"anyOf": 5}, json_call('"x"')),
}


@pytest.mark.parametrize(("template", "schema", "call"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_call_is_text(template, schema, call):
    tools = tools_with(a=schema)
    for pieces in ([f"a{call}b"], ["a", *call, "b"]):
        assert run(template, pieces, tools=tools) == (f"a{call}b", [])
    assert run(template, ["Hi"], f"{PROMPT}{call}<tool>", tools) == ("Hi", [])


def test_call_that_is_cut_where_it_is_nested_too_deeply_has_its_name():
    assert run(JSON, ["a" + json_call(DEEP).partition("}")[0]]) == ("a", [("c0", "now", "", False)])


def test_message_that_the_prompt_begins():
    found, calls = run(XML_RESPONSE, [f"Well\n</think>\n\n{XML_CALL}"], prompt=f"{PROMPT}<think>\n")
    assert (found.strip(), calls) == ("Well\n</think>", [WEATHER])


@pytest.mark.parametrize("prompt", [PROMPT + "<think>\n\n</think>\n\n", "no anchor \n", ""])
def test_nothing_of_the_prompt_is_text(prompt):
    assert run(XML_RESPONSE, ["Hi"], prompt=prompt) == ("Hi", [])
    assert run(XML_RESPONSE, [XML_CALL], prompt=prompt) == ("", [WEATHER])


def test_further_calls_are_dropped_where_one_is_allowed():
    assert run(XML_RESPONSE, [XML_CALL + XML_CALL], max_calls=1) == ("", [WEATHER])


def model_of(response_template, template=CHAT_XML):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw_tokenizer(ADDED), chat_template=template, eos_token="<|end|>"
    )
    tokenizer.response_template = response_template
    return ScriptedBackend(chat_format=chat_format(tokenizer))


def test_template_is_used_for_forms_that_are_not_known():
    own, forced = (
        plan_calls(TOOLS, ToolChoice(mode), True, model_of(XML_RESPONSE)) for mode in ("auto", "required")
    )
    known = plan_calls(TOOLS, None, True, model_of(XML_RESPONSE, QWEN))
    forms = [(plan.form.family, plan.form.is_native) for plan in (own, forced, known)]
    assert forms == [(CallFamily.TEMPLATE, True), (CallFamily.HERMES, False), (CallFamily.HERMES, True)]
    assert own.markers == {b"<|python_tag|>"}  # the only special token of the template's
    assert own.grammar("") == ""
    assert forced.grammar("")
    with pytest.raises(InvalidArgumentError):
        own.grammar("", answer='%json {"type": "integer"}')


WRONG = [
    None,
    [],
    {"fields": {}},
    {**XML_RESPONSE, "version": 2},
    {"start_anchor": "a", "fields": {"content": {}}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_response_template_that_is_wrong_or_has_no_calls_is_not_used(wrong):
    model = model_of(wrong)
    assert model.chat_format.response_template is None
    assert not plan_calls(TOOLS, None, True, model).form.is_native


async def test_chat_has_the_calls():
    text = f"Hm.\n{XML_CALL.replace('days', 'unit').replace('3', 'c')}"
    data = [text[at : at + 6].encode() for at in range(0, len(text), 6)]

    def backend():
        return ScriptedBackend(pieces=data, chat_format=ChatFormat(CHAT_XML, True, ADDED, XML_RESPONSE))

    body = {"messages": CHAT, "tools": BODY_TOOLS, "max_tokens": 1000}
    path = "/v1/chat/completions"
    (choice,) = (await complete(backend(), path, **body)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Hm.")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich", "unit": "c"}'}
    streamed = "".join(data for _, data in await events_with_ids(backend(), path, **body))
    assert call["id"] in streamed
