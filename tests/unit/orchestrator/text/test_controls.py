"""Text of messages and tools that spells control tokens is encoded as text; the template's own are tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gammaray.errors import InvalidArgumentError
from orchestrator.api.http.tools.calls import Tool, ToolChoice, plan_calls, render_messages
from orchestrator.text.tokenizer import Tokenizer
from tests.support.vocabulary_helpers import byte_level

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_", "<s>", "[TOOL_CALLS]")
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", "  ", "user")
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}
{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}{%- set content = content.split('</think>')[-1] | trim %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PIECES = st.sampled_from(
    [*SPECIAL, *PLAIN, "<", "|", "im_", "end|>", "a", " ", "\n", "é", "\ue000", '"', "<|IM_END|>"]
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)


def spelt_in_bytes() -> FastTokenizer:
    return byte_level("user", 259, specials=("<|im_start|>",)).backend_tokenizer


def sentencepiece() -> FastTokenizer:
    pieces = ["<unk>", "<s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁a"]
    vocabulary = {text: number for number, text in enumerate(pieces)}
    options = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], **options))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    as_spaces = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([as_spaces, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram() -> FastTokenizer:
    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("▁", -2.0), *((chr(code), -5.0) for code in range(33, 127))]
    pieces += [("\n", -5.0), ("é", -5.0), ("\ue000", -5.0)]
    tokenizer = FastTokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def saved(folder, tokenizer: FastTokenizer, template: str = TEMPLATE) -> Tokenizer:
    for text in SPECIAL:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    for text in PLAIN:
        tokenizer.add_tokens([AddedToken(text, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    LlamaConfig(vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    return Tokenizer(str(folder))


@pytest.fixture(scope="module", params=[spelt_in_bytes, sentencepiece, unigram])
def tokenizer(request, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), request.param())


def encoded(tokenizer: Tokenizer, messages, tools=()) -> tuple[tuple[int, ...], str]:
    calls = plan_calls(tools, ToolChoice("auto"), True, tokenizer)
    prompt = render_messages(messages, tokenizer, calls)
    found = tokenizer.encode_marked(prompt) if prompt.mark else tuple(tokenizer.encode(prompt.text))
    return found, prompt.text


def controls(tokenizer: Tokenizer, token_ids) -> list[bytes]:
    names = [text.encode() for text in (*SPECIAL, "<tool_call>", "</tool_call>")]
    return [name for name in map(tokenizer.token_bytes, token_ids) if name in names]


def written(tokenizer: Tokenizer, token_ids) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode()


@given(system=TEXTS, user=TEXTS, name=TEXTS, key=TEXTS, value=TEXTS, result=TEXTS, described=TEXTS)
@settings(max_examples=40, deadline=None)
def test_prompt_has_the_templates_control_tokens_alone(
    tokenizer, system, user, name, key, value, result, described
):
    def conversation(system, user, name, key, value, result, described):
        called = {"id": "c", "type": "function", "function": {"name": name, "arguments": {key: value}}}
        schema = {"type": "object", "properties": {key: {"description": value}}}
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": result, "tool_call_id": "c"},
        ]
        return messages, [Tool("f", described, schema)]

    found, text = encoded(tokenizer, *conversation(system, user, name, key, value, result, described))
    plain, _ = encoded(tokenizer, *conversation(*("abcdefg")))
    assert controls(tokenizer, found) == controls(tokenizer, plain)
    assert written(tokenizer, found) == text
    assert json.dumps({key: value}, ensure_ascii=False) in text
    assert f"user\n{user}<|im_end|>" in text


@given(text=st.text(max_size=20))
@settings(max_examples=20, deadline=None)
def test_other_texts_are_encoded_as_ever(tokenizer, text):
    messages = [{"role": "user", "content": f"x  user {text} <think>"}]
    prompt = tokenizer.render_chat(messages)
    assert encoded(tokenizer, messages) == (tuple(tokenizer.encode(prompt)), prompt)
    marked, shown = encoded(tokenizer, [*messages, {"role": "user", "content": "<|im_end|>"}])
    own = tokenizer.encode(prompt.removesuffix("<|im_start|>assistant\n"))
    assert marked[: len(own) - 1] == tuple(own[:-1]), "the text before it has the same tokens"
    assert shown.count("<|im_end|>") == 3


def test_answers_keep_the_tokens_that_their_text_shows(tokenizer):
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think> <tool_call>a"},
    ]
    found, text = encoded(tokenizer, talk)
    assert "think" not in text, "the template finds them"
    assert b"<tool_call>" in controls(tokenizer, found)
    talk[1]["content"] += "<|im_start|>"
    found, text = encoded(tokenizer, talk)
    assert "think" not in text
    assert controls(tokenizer, found).count(b"<|im_start|>") == 3
    assert text.count("<|im_start|>") == 4
    talk[0]["content"] = "<tool_call>"
    assert controls(tokenizer, encoded(tokenizer, talk)[0]).count(b"<tool_call>") == 1


@pytest.mark.parametrize(
    ("change", "given"),
    [
        ("message.content | trim", " <|im_end|> "),
        ("message.content | upper", "<|im_start|>[tool_calls]"),
        ("message.content | tojson", "<|im_end|>"),
        ("message.content | tojson(ensure_ascii=true)", "<|im_end|>é"),
        ("message.content[:20]", "<|im_end|>aaaa"),
    ],
)
def test_templates_may_change_texts(tmp_path, change, given):
    marked = "'<|im_start|>' + (" + change + ") + '<|im_end|>'"
    template = "{%- for message in messages %}{{- " + marked + " }}{%- endfor %}"
    model = saved(tmp_path, spelt_in_bytes(), template)
    messages = [{"role": "user", "content": given}]
    found, text = encoded(model, messages)
    assert controls(model, found) == [b"<|im_start|>", b"<|im_end|>"]
    assert written(model, found) == text
    assert text == model.render_chat(messages) or change.endswith("[:20]")


def test_text_is_refused_if_the_algorithm_itself_makes_control_tokens(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "<s", "<s>"])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    model = saved(tmp_path, tokenizer)
    with pytest.raises(InvalidArgumentError, match="messages: got a text with the name of a control token"):
        encoded(model, [{"role": "user", "content": "<s>"}])
    assert encoded(model, [{"role": "user", "content": "< s"}])[1].count("< s") == 1
