"""The page at /, in a real browser, against a whole cluster."""

import pytest
from browser import browser_page, find_chromium
from cluster_helpers import undisturbed

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("idle_afterwards"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
]
IDLE = "document.body.dataset.state === 'idle'"
NOTE_FALLBACKS = """void (JSON.parse = (parse => (...given) => {
  const parsed = parse(...given);
  window.fallbacks = parsed?.gammaray?.fallback_cycles ?? window.fallbacks;
  return parsed;
})(JSON.parse))"""
"""The page does not show how often the drafter was late, which changes alpha."""


@pytest.fixture(scope="module")
def page(cluster):
    with browser_page(CHROMIUM) as page:
        page.open(f"{cluster.http}/")
        yield page


def generate(page, **fields):
    for name, value in fields.items():
        page.evaluate(f"document.getElementById({name!r}).value = {str(value)!r}, null")
    page.evaluate("document.body.dataset.state = '', document.getElementById('run').click()")
    page.wait_for(IDLE)
    return page.evaluate(
        "(all => ({"
        "  text: all('#output span:not(.prompt)').map(span => span.textContent).join(''),"
        "  origins: all('#output span').map(span => span.className),"
        "  error: document.getElementById('error').textContent,"
        "  shown: Object.fromEntries(all('dd').map(shown => [shown.id, shown.textContent])),"
        "}))(selector => [...document.querySelectorAll(selector)])"
    )


def test_page_shows_the_model(page):
    page.wait_for("document.getElementById('model').textContent === 'demo'")


def test_page_streams_the_text_of_the_api_coloured_by_origin(page, cluster, tmp_path):
    prompt = "def read_lines(path):\n"
    page.evaluate(NOTE_FALLBACKS)
    got = undisturbed(
        lambda: generate(page, prompt=prompt, gamma=4, max_tokens=48, temperature=0.7, seed=3),
        lambda _: page.evaluate("window.fallbacks"),
    )
    with cluster.openai() as client:
        options = {"max_tokens": 48, "temperature": 0.7, "seed": 3, "extra_body": {"gammaray": {"gamma": 4}}}
        answer = undisturbed(
            lambda: client.completions.create(model="demo", prompt=prompt, **options),
            lambda answer: answer.gammaray["fallback_cycles"],
        )
    assert got["error"] == ""
    assert page.evaluate("window.fallbacks") == 0
    assert got["text"] == answer.choices[0].text
    assert set(got["origins"]) >= {"accepted", "correction", "prompt"}
    assert got["shown"]["used_seed"] == "3"
    assert got["shown"]["tokens"] == str(answer.usage.completion_tokens)
    assert got["shown"]["alpha"] == f"{answer.gammaray['alpha']:.3f}"
    assert float(got["shown"]["gamma_mean"]) > 0
    page.screenshot(tmp_path / "playground.png")
    assert (tmp_path / "playground.png").stat().st_size > 10_000


def test_page_keeps_every_digit_of_a_large_seed(page):
    got = generate(page, prompt="x = ", max_tokens=4, seed=2**64 - 1)
    assert got["error"] == ""


def test_page_shows_the_error_of_a_bad_field(page):
    got = generate(page, prompt="", max_tokens=4, seed=1)
    assert "prompt" in got["error"]
    assert got["error"].startswith("400")


def test_page_stops_when_asked(page, cluster):
    page.evaluate(
        "document.getElementById('prompt').value = 'import os',"
        "document.getElementById('max_tokens').value = 2000,"
        "document.body.dataset.state = '', document.getElementById('run').click()"
    )
    page.wait_for("document.getElementById('tokens').textContent > 0")
    page.evaluate("document.getElementById('stop').click()")
    page.wait_for(IDLE)
    assert page.evaluate("document.getElementById('error').textContent") == ""
    cluster.wait_until_idle()
