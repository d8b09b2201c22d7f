"""The official openai client against a whole cluster."""

import urllib.request

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"
RESPONSE = {"model": "demo", "max_output_tokens": 32, "extra_body": {"seed": 5}}


@pytest.fixture
def client(cluster):
    with cluster.openai() as client:
        yield client


def complete(client, prompt=PROMPT, gammaray=None, **options):
    extra = {name: options.pop(name) for name in ("top_k", "ignore_eos", "min_tokens") if name in options}
    body = {**extra, "gammaray": gammaray or {}}
    return client.completions.create(model="demo", prompt=prompt, extra_body=body, **options)


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


def test_response_whole_streamed_retrieved_and_replayed_agree(client):
    whole = client.responses.create(input=PROMPT, **RESPONSE)
    with client.responses.stream(input=PROMPT, **RESPONSE) as stream:
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
