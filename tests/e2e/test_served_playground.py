"""The page at /, in a real browser, against a whole cluster."""

import json
import re

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.programs import PROGRAMS
from tests.support.cluster.cluster_helpers import undisturbed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.needs("chromium"),
    pytest.mark.usefixtures("idle_afterwards"),
    pytest.mark.timeout(600),
]
TIMEOUT_MS = 60_000.0
MIN_PICTURE_BYTES = 10_000
"""An empty page gives a smaller picture."""


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAMS["chromium"].path)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, cluster):
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(f"{cluster.http}/")
    yield page
    page.close()


def start(page, mode="completion", **fields):
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    page.locator("#more").evaluate("details => { details.open = true; }")
    page.locator("#mode").select_option(mode)
    for name, value in fields.items():
        control = page.locator(f"#{name}")
        if control.evaluate("control => control.tagName") == "SELECT":
            control.select_option(str(value))
        else:
            control.fill(str(value))
    page.locator("#run").click()


def generate(page, **fields):
    """Fill the form, submit it and wait for the end; return the summary that the API sent, None if none."""
    with page.expect_response("**/v1/completions") as answer:
        start(page, **fields)
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    expect(page.locator("#run")).to_be_enabled()
    lines = answer.value.text().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return next((event["gammaray"] for event in events if "alpha" in event.get("gammaray", {})), None)


def number(page, name):
    return float(page.locator(f"#{name}").inner_text())


def test_page_streams_the_text_of_the_api_coloured_by_origin(page, cluster, tmp_path):
    prompt = "def read_lines(path):\n"
    summary = undisturbed(
        lambda: generate(page, prompt=prompt, gamma=4, max_tokens=48, temperature=0.7, seed=3),
        lambda summary: summary["fallback_cycles"],
    )
    with cluster.openai() as client:
        options = {"max_tokens": 48, "temperature": 0.7, "seed": 3, "extra_body": {"gammaray": {"gamma": 4}}}
        answer = undisturbed(
            lambda: client.completions.create(model="demo", prompt=prompt, **options),
            lambda answer: answer.gammaray["fallback_cycles"],
        )
    expect(page.locator("#error")).to_be_empty()
    expect(page.locator("#output .prompt")).to_have_text(prompt)
    texts = page.locator("#output span:not(.prompt)").all_text_contents()
    assert "".join(texts) == answer.choices[0].text
    origins = page.locator("#output span").evaluate_all("spans => spans.map(span => span.className)")
    assert set(origins) >= {"model", "correction", "prompt"}
    expect(page.locator("#accepted")).to_contain_text("model ")
    expect(page.locator("#used_seed")).to_have_text("3")
    expect(page.locator("#tokens")).to_have_text(str(answer.usage.completion_tokens))
    expect(page.locator("#alpha")).to_have_text(f"{answer.gammaray['alpha']:.3f}")
    assert number(page, "gamma_mean") == pytest.approx(summary["gamma_mean"], abs=0.005)
    assert len(page.screenshot(path=tmp_path / "playground.png", full_page=True)) > MIN_PICTURE_BYTES


def test_page_sends_a_prediction_and_colours_what_is_taken_from_it(page, cluster):
    prompt, options = "def read_lines(path):\n", {"max_tokens": 48, "temperature": 0, "seed": 3}
    with cluster.openai() as client:
        plain = {"extra_body": {"gammaray": {"gamma": 0}}}
        answer = client.completions.create(model="demo", prompt=prompt, **options, **plain)
    text = answer.choices[0].text
    summary = generate(page, prompt=prompt, prediction=text, drafter="prediction", gamma=4, **options)
    assert summary["cycles_by_drafter"]["prediction"] > 0
    texts = page.locator("#output span:not(.prompt)").all_text_contents()
    assert "".join(texts) == text
    assert page.locator("#output .prediction").count() > 0
    accepted = summary["accepted_tokens"]
    expect(page.locator("#accepted")).to_have_text(f"prediction {accepted}")


def test_page_sends_a_chat_message(page):
    with page.expect_response("**/v1/chat/completions") as answer:
        start(page, prompt="a list of numbers", mode="chat", max_tokens=8, seed=1)
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    expect(page.locator("#error")).to_be_empty()
    expect(page.locator("#tokens")).to_have_text("8")
    assert json.loads(answer.value.request.post_data)["messages"][0]["content"] == "a list of numbers"
    assert page.locator("#output span:not(.prompt)").count() > 0
    said = page.locator("#output .turn").nth(1).inner_text()
    with page.expect_response("**/v1/chat/completions") as answer:
        page.locator("#prompt").fill("go on")
        page.locator("#prompt").press("Enter")
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    sent = json.loads(answer.value.request.post_data)["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"].strip() == said.strip()
    assert page.locator("#output .turn").count() == 4
    page.locator("#clear").click()
    assert page.locator("#output .turn").count() == 0


def test_page_opens_as_the_model_is_used_and_names_the_drafters_of_the_cluster(page):
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    expect(page.locator("#model")).to_have_text("demo")
    expect(page.locator("#mode")).to_have_value("chat")
    expect(page.locator("#prediction")).not_to_be_visible()
    legend = page.locator("#legend_drafters span").evaluate_all("spans => spans.map(span => span.className)")
    assert legend == ["model", "suffix", "prediction", "grammar"]
    options = page.locator("#drafter option").evaluate_all("options => options.map(option => option.value)")
    assert options == ["model", "suffix", "prediction", "grammar", "none"]


def test_page_compares_with_gamma_0_by_one_click(page):
    expect(page.locator("#compare")).to_be_disabled()
    generate(page, prompt="def read_lines(path):\n", gamma=4, max_tokens=48, temperature=0.7)
    with page.expect_response("**/v1/completions") as answer:
        page.locator("#compare").click()
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    sent = json.loads(answer.value.request.post_data)
    assert sent["gammaray"]["gamma"] == 0
    assert str(sent["seed"]) == page.locator("#used_seed").inner_text()
    expect(page.locator("#beside")).to_have_text(re.compile("^[0-9.]+ / [0-9.]+ tok/s, [0-9.]+×, same text$"))


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"]}


def test_page_sends_a_json_schema_and_every_digit_of_a_large_seed(page):
    generate(page, prompt="x = ", schema=json.dumps(SCHEMA), max_tokens=64, seed=2**64 - 1)
    expect(page.locator("#error")).to_be_empty()
    expect(page.locator("#used_seed")).to_have_text(str(2**64 - 1))
    texts = page.locator("#output span:not(.prompt)").all_text_contents()
    assert json.loads("".join(texts))["name"] in ("a", "b")


@pytest.mark.parametrize(
    ("schema", "words"), [("{", "JSON schema: "), ('{"not": {}}', "400: response_format")]
)
def test_page_shows_what_is_wrong_with_a_json_schema(page, schema, words):
    start(page, prompt="x = ", schema=schema, max_tokens=4)
    expect(page.locator("#error")).to_contain_text(words)
    expect(page.locator("#run")).to_be_enabled()


def test_page_stops_when_asked(page, cluster):
    start(page, prompt="import os", max_tokens=2000)
    expect(page.locator("#tokens")).to_have_text(re.compile("^[1-9]"))
    page.locator("#stop").click()
    expect(page.locator("body")).to_have_attribute("data-state", "idle")
    expect(page.locator("#error")).to_be_empty()
    assert number(page, "tokens") < 2000
    cluster.wait_until_idle()
