"""The official openai client against a whole cluster."""

import json
import urllib.request

import pytest

from tests.support.cluster.cluster_helpers import undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"
FIELDS = {
    "session_id",
    "seed",
    "cycles",
    "tokens_per_cycle",
    "alpha",
    "acceptance_rate",
    "accepted_lengths",
    "gamma_mean",
    "drafted_tokens",
    "accepted_tokens",
    "origins",
    "token_ids",
    "time_ms",
    "speedup_estimate",
    "cycles_by_drafter",
    "fallback_cycles",
    "draft_workers",
}


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


def complete(client, prompt=PROMPT, gammaray=None, **options):
    extra = {name: options.pop(name) for name in ("top_k", "ignore_eos", "min_tokens") if name in options}
    body = {**extra, "gammaray": gammaray or {}}
    return client.completions.create(model="demo", prompt=prompt, extra_body=body, **options)


def check_summary(summary, usage):
    assert set(summary) == FIELDS
    assert set(summary["time_ms"]) == {"draft", "verify", "other", "total"}
    assert len(summary["token_ids"]) == len(summary["origins"]) == usage.completion_tokens
    assert set(summary["origins"]) <= {"accepted", "correction", "bonus"}
    assert summary["origins"].count("accepted") == summary["accepted_tokens"] <= summary["drafted_tokens"]
    reported = usage.completion_tokens_details
    assert (reported.accepted_prediction_tokens, reported.rejected_prediction_tokens) == (0, 0)
    assert summary["tokens_per_cycle"] == pytest.approx(usage.completion_tokens / summary["cycles"])
    assert sum(summary["accepted_lengths"]) == summary["cycles"]


def test_completion_has_text_usage_and_summary(client):
    options = {"max_tokens": 32, "seed": 1, "temperature": 0.7, "ignore_eos": True}
    answer = undisturbed(
        lambda: complete(client, gammaray={"gamma": 4}, **options),
        lambda answer: answer.gammaray["fallback_cycles"],
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.text
    assert answer.usage.completion_tokens == 32
    assert answer.gammaray["accepted_tokens"] > 0
    check_summary(answer.gammaray, answer.usage)
    assert answer.gammaray["alpha"] > 0.4


def test_completion_with_the_returned_seed_reproduces_the_text(client):
    first = complete(client, max_tokens=24, temperature=1.0, ignore_eos=True)
    again = complete(client, max_tokens=24, temperature=1.0, ignore_eos=True, seed=first.gammaray["seed"])
    assert again.gammaray["token_ids"] == first.gammaray["token_ids"]
    assert again.gammaray["seed"] == first.gammaray["seed"]


def test_completion_gamma_zero_drafts_nothing(client):
    answer = complete(client, max_tokens=8, seed=1, ignore_eos=True, gammaray={"gamma": 0})
    assert answer.gammaray["cycles"] == 8
    assert answer.gammaray["origins"] == ["bonus"] * 8
    assert answer.gammaray["alpha"] is None
    assert answer.gammaray["accepted_lengths"] == [8]


def test_completion_prompt_forms_agree(client):
    options = {"max_tokens": 8, "temperature": 0}
    text = complete(client, **options)
    as_list = complete(client, prompt=[PROMPT, "import os\n"], **options)
    assert as_list.choices[0].text == text.choices[0].text
    assert len(as_list.choices) == 2
    first = complete(client, max_tokens=4, temperature=0)
    by_ids = complete(client, prompt=first.gammaray["token_ids"], max_tokens=4, temperature=0)
    assert by_ids.usage.prompt_tokens == 4
    two = complete(client, prompt=[first.gammaray["token_ids"], [5, 6]], max_tokens=4, temperature=0)
    assert two.choices[0].text == by_ids.choices[0].text


def test_stream_pieces_make_the_whole(client):
    options = {"max_tokens": 32, "seed": 3, "ignore_eos": True}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    *_, finish, usage = chunks
    assert usage.choices == []
    assert usage.usage.completion_tokens == 32
    assert finish.gammaray["token_ids"] == whole.gammaray["token_ids"]
    check_summary(finish.gammaray, usage.usage)


def test_stream_events_end_with_done(cluster):
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    number, data = events[-3].split("\n")  # the number is what a client resumes from
    assert number.startswith("id: ")
    assert set(json.loads(data.removeprefix("data: "))["gammaray"]) == FIELDS


def test_chat_whole_and_streamed_agree(client):
    options = {
        "model": "demo",
        "messages": [{"role": "user", "content": "import os\n\n\ndef "}],
        "max_completion_tokens": 24,
        "seed": 5,
    }
    whole = client.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].gammaray["token_ids"] == whole.gammaray["token_ids"]


def test_a_conversation_computes_only_new_tokens(client):
    messages = [
        {"role": "user", "content": "import os\n\n\nclass Stack:\n    def push(self, item):\n        "}
    ]
    options = {"model": "demo", "max_completion_tokens": 24, "seed": 5, "extra_body": {"ignore_eos": True}}
    first = client.chat.completions.create(messages=messages, **options)
    messages += [first.choices[0].message, {"role": "user", "content": "\n\ndef pop(self):"}]
    second = client.chat.completions.create(messages=messages, **options)
    details = second.usage.prompt_tokens_details
    # Tokenising the text again may give other tokens at the boundary of prompt and response.
    assert first.usage.prompt_tokens // 2 < details.cached_tokens < second.usage.prompt_tokens
    apart = {**options, "extra_body": {"ignore_eos": True, "gammaray": {"cache_salt": "apart"}}}
    again = client.chat.completions.create(messages=messages, **apart)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert again.choices[0].message.content == second.choices[0].message.content


def test_samples_differ_and_each_is_its_own_function_of_the_seed(client):
    options = {"max_tokens": 16, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    three = complete(client, n=3, **options)
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert complete(client, **options).choices[0].text == texts[0]
    assert [choice.text for choice in complete(client, n=3, **options).choices] == texts
    assert three.usage.completion_tokens == 48
    streamed = ["", "", ""]
    for chunk in complete(client, n=3, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_seed_left_out_gives_other_completions(client):
    texts = {complete(client, max_tokens=16, ignore_eos=True).choices[0].text for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_string_ends_the_text_before_it(client, as_list):
    free = complete(client, max_tokens=40, temperature=0).choices[0].text
    stop = free[10:14]
    answer = complete(client, max_tokens=40, temperature=0, stop=[stop, "§§"] if as_list else stop)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == free[: free.index(stop)]
    pieces = complete(client, max_tokens=40, temperature=0, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == free[: free.index(stop)]


def test_completion_logprobs_cover_each_token(client):
    answer = complete(client, max_tokens=12, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) <= 0  # greedy takes the most likely one


def test_chat_logprobs_cover_each_token(client):
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "import "}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)


def test_logit_bias_bans_and_forces_tokens(client):
    free = complete(client, max_tokens=6, temperature=0).gammaray["token_ids"]
    banned = complete(client, max_tokens=6, temperature=0, logit_bias={str(free[0]): -100})
    assert free[0] not in banned.gammaray["token_ids"]
    forced = complete(client, max_tokens=6, temperature=1, logit_bias={"300": 100})
    assert forced.gammaray["token_ids"] == [300] * 6


def test_penalties_change_a_loop(client):
    loop = complete(client, max_tokens=60, temperature=0).gammaray["token_ids"]
    penalised = complete(client, max_tokens=60, temperature=0, frequency_penalty=2, presence_penalty=2)
    assert len(set(penalised.gammaray["token_ids"])) > len(set(loop))


def test_echo_puts_the_prompt_first(client):
    assert complete(client, max_tokens=4, echo=True).choices[0].text.startswith(PROMPT)


def test_echo_with_logprobs_returns_prompt_logprobs_as_lm_eval_requests(client):
    prompts = [
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=n).gammaray["token_ids"]
        for n in (12, 20)
    ]
    options = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234}
    answer = complete(client, prompt=prompts, echo=True, **options)
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        reported = choice.logprobs
        assert len(reported.tokens) == len(reported.token_logprobs) == len(prompt) + 1
        assert reported.token_logprobs[0] is reported.top_logprobs[0] is None
        # Token by token the same: each prefix is completed by one token whose alternatives are known.
        for place in (1, len(prompt) - 1):
            asked = {"logit_bias": {str(prompt[place]): 100}}
            forced = complete(client, prompt=prompt[:place], **options, **asked)
            assert forced.gammaray["token_ids"] == [prompt[place]]
            (logprob,) = forced.choices[0].logprobs.token_logprobs
            assert reported.token_logprobs[place] == pytest.approx(logprob, abs=1e-4)


def test_metrics_by_vllms_names_move_with_completions(cluster, client):
    def counters():
        with urllib.request.urlopen(f"{cluster.http}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if "spec_decode" in line and not line.startswith("#") and "position" not in line
        }

    before = counters()
    answer = complete(client, max_tokens=24, temperature=0, gammaray={"gamma": 4})
    after = counters()
    reported = answer.metrics["speculative_decoding"]
    grown = {name.split("spec_decode_num_")[1]: after[name] - before[name] for name in after}
    assert grown["drafts_total"] >= reported["num_spec_steps"] > 0
    assert grown["draft_tokens_total"] >= reported["num_draft_tokens"]
    assert grown["accepted_tokens_total"] >= reported["num_accepted_draft_tokens"]
    assert sum(reported["acceptance_histogram"]) == reported["num_spec_steps"]


def test_continuous_usage_and_obfuscation_of_streams(client):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    *pieces, last = complete(client, max_tokens=16, temperature=0, stream=True, stream_options=options)
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == last.usage.completion_tokens
    assert {piece.usage.prompt_tokens for piece in pieces} == {last.usage.prompt_tokens}
    assert all(isinstance(piece.obfuscation, str) for piece in pieces)


def test_models_and_health(cluster, client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "gammaray"
    with urllib.request.urlopen(f"{cluster.http}/health", timeout=10) as answer:
        assert answer.status == 200


def test_all_of_many_concurrent_choices_are_served(client):
    answer = complete(client, prompt="def f(", n=128, max_tokens=2, temperature=1, seed=3)
    assert [choice.index for choice in answer.choices] == list(range(128))
    tokens = sum(len(choice.gammaray["token_ids"]) for choice in answer.choices)
    assert answer.usage.completion_tokens == tokens
