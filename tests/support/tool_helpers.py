"""Tools and chat templates for tests of tool calls."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from gammaray.demo_pair import resolve_model
from gammaray.grammar.matcher import GrammarCompiler
from orchestrator.api.http.tools.calls import CallPlan, Tool
from orchestrator.api.http.tools.formats import CallFamily
from orchestrator.api.http.tools.parser import (
    ArgumentText,
    CallBegun,
    CallEnded,
    CallEvent,
    CallParser,
    PlainText,
)
from orchestrator.text.chat import ChatFormat, chat_format, render
from orchestrator.text.controls import ChatPrompt, Encoder

Messages = Sequence[Mapping[str, Any]]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
}
TOOLS = [Tool("get_weather", "Weather of a city.", WEATHER), Tool("now")]
BODY_TOOLS = [tool.to_template() for tool in TOOLS]

# The parts of the models' own templates that concern tools.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n{\\"name\\": <function-name>, " }}
    {{- "\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- "<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond " }}
        {{- 'with a JSON in the format {"name": function name, "parameters": dictionary of argument name ' }}
        {{- 'and its value}.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if tools and loop.last %}
            {{- "[AVAILABLE_TOOLS] " }}{{- tools | tojson }}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if not call.id or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- call.function | tojson }}{{- ', "id": "' + call.id + '"' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message.role == "tool" %}
        {%- if not message.tool_call_id or message.tool_call_id | length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content }}
        {{- ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- " " + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# That of Qwen 3.5 in transformers.
XML_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|python_tag\|>)", "content": "text"},
    },
}

ADDED = {
    **dict.fromkeys(("<tool_call>", "</tool_call>", "<think>", "</think>"), False),
    **dict.fromkeys(("<|python_tag|>", "[TOOL_CALLS]"), True),
}
"""Tokens of the families; whether they are special."""

QWEN_CHAT = ChatFormat(QWEN, True, ADDED)
THINKING_CHAT = ChatFormat(QWEN + "<think></think>", True, ADDED)
LLAMA_CHAT = ChatFormat(LLAMA, True, ADDED)
MISTRAL_CHAT = ChatFormat(MISTRAL, True, ADDED)
PLAIN_CHAT = ChatFormat("messages only")


STRICT = """{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception("System message must be at the beginning.") }}{%- endif %}
        {{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "user" or message.role == "assistant" %}
        {%- if not loop.first and loop.previtem.role == message.role %}
            {{- raise_exception("Roles must alternate.") }}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception("Unexpected message role.") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Takes one message of the system, at the beginning, and turns of user and assistant alone."""


def raw_tokenizer(added: Mapping[str, bool]) -> RawTokenizer:
    tokenizer = RawTokenizer.from_file(str(Path(resolve_model("demo")) / "tokenizer.json"))
    for text, special in added.items():
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, special=special)])
    return tokenizer


class TemplateModel:
    """A chat template of transformers, with a tokenizer that has the tokens of all families."""

    def __init__(self, template: str | dict[str, str] | None, response_template: object = None) -> None:
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw_tokenizer(ADDED), chat_template=template, bos_token="", eos_token="<|end|>"
        )
        self.tokenizer.response_template = response_template
        self.chat_format = chat_format(self.tokenizer)

    def render_chat(self, messages: Messages, tools: Messages = ()) -> str:
        return render(self.tokenizer, messages, tools, self.chat_format.roles)

    def encode_marked(self, prompt: ChatPrompt) -> tuple[int, ...]:
        return tuple(self._encoder.backend.encode(self._encoder.named(prompt)).ids)

    @cached_property
    def _encoder(self) -> Encoder:
        return self.chat_format.controls.encoder(self.tokenizer.backend_tokenizer)


class Follower:
    """Tests texts against grammars, as tokens of the demo model's tokenizer with further tokens."""

    def __init__(self, added: Mapping[str, bool]) -> None:
        self._tokenizer = raw_tokenizer(added)
        self._eos = self._tokenizer.token_to_id("<|end|>")
        vocab_size = self._tokenizer.get_vocab_size()
        self._compiler = GrammarCompiler(self._tokenizer.to_str(), vocab_size, [self._eos])

    def accepts(self, grammar: str, text: str) -> bool:
        state = self._compiler.begin(grammar)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if state.count_possible(token_ids) < len(token_ids):
            return False
        state.extend(token_ids)
        return state.count_possible([self._eos]) == 1


def parser_of(family: CallFamily, **options: object) -> CallParser:
    """Return a parser of calls of the tools f and g, with the ids c0, c1, ..."""
    return CallParser(family, frozenset(("f", "g")), lambda index: f"c{index}", **options)  # type: ignore[arg-type]


def parsed(parser: CallParser, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str, str, bool]]]:
    """Return the text, and of each call its id, name, arguments and whether they are whole."""
    return assembled([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def assembled(events: Iterable[CallEvent]) -> tuple[str, list[tuple[str, str, str, bool]]]:
    """Return the same for events; checks that those of a call are in order."""
    text, begun, arguments, ended = [], [], {}, {}
    for event in events:
        match event:
            case PlainText(piece):
                assert piece
                text.append(piece)
            case CallBegun(index):
                assert index == len(begun)
                begun.append(event)
                arguments[index] = ""
            case ArgumentText(index, piece):
                assert index == len(begun) - 1
                assert index not in ended
                arguments[index] += piece
            case CallEnded(index, is_whole):
                assert index == len(begun) - 1
                assert index not in ended
                ended[index] = is_whole
    calls = [(call.call_id, call.name, arguments[call.index], ended[call.index]) for call in begun]
    return "".join(text), calls


def plan_text(plan: CallPlan, calls: Iterable[tuple[str, str]]) -> str:
    """Return how a model of a plan's family writes calls, given by name and arguments."""
    key = "parameters" if plan.form.family is CallFamily.LLAMA else "arguments"
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if plan.form.family is CallFamily.HERMES:
        return "\n".join(f"<tool_call>\n{written}\n</tool_call>" for written in objects)
    if plan.form.family is CallFamily.MISTRAL:
        return f"[{', '.join(objects)}]"
    return "; ".join(objects)


def joined(choices: Iterable[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Return the text and the calls that a client makes of a stream's choices, and the finish reasons."""
    text, calls, reasons = "", [], []
    for choice in choices:
        delta = choice["delta"]
        text += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"}
                assert piece["function"]["arguments"] == ""
                own = {name: value for name, value in piece.items() if name != "index"}
                calls.append({**own, "function": dict(piece["function"])})
            else:
                assert piece["index"] == len(calls) - 1
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    return text, calls, reasons
