"""The drafter of a request: every drafter gives the same text over both APIs."""

import pytest

from gammaray import AsyncClient, Client
from gammaray.errors import InvalidArgumentError
from tests.support.cluster.cluster_helpers import eventually, is_without_model, undisturbed_completion

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_drafter_gives_the_same_text_and_the_summary_names_it(cluster, temperature):
    async with AsyncClient(cluster.grpc) as client:

        async def run(drafter, **options):
            options = {"seed": 7, "max_tokens": 96, "ignore_eos": True, "temperature": temperature, **options}
            return await client.complete(PROMPT, drafter=drafter, **options)

        plain = await run("none")
        assert plain.summary.plain_cycles == plain.summary.cycles == 96
        ngram = await run("ngram", gamma=4)
        assert ngram.summary.ngram_cycles > 0
        assert ngram.summary.model_cycles == ngram.summary.fallback_cycles == 0
        assert ngram.summary.ngram_cycles + ngram.summary.plain_cycles == ngram.summary.cycles
        model = await undisturbed_completion(lambda: run("model", gamma=4), is_without_model)
        assert model.summary.model_cycles > 0
        assert model.summary.draft_workers == 1
        assert model.text == ngram.text == plain.text


@pytest.mark.parametrize("verification", ["rejection", "naive", "block"])
async def test_prompt_lookup_serves_every_verification_method(cluster, verification):
    async with AsyncClient(cluster.grpc) as client:
        options = {"drafter": "ngram", "gamma": 4, "seed": 7, "max_tokens": 96, "verification": verification}
        first = await client.complete(PROMPT, ignore_eos=True, **options)
        assert first.summary.ngram_cycles > 0
        assert (await client.complete(PROMPT, ignore_eos=True, **options)).text == first.text


def test_http_accepts_a_drafter_and_reports_its_cycles(cluster):
    def run(drafter):
        body = {"gammaray": {"drafter": drafter, "gamma": 4}, "ignore_eos": True}
        return cluster.openai().completions.create(
            model="demo", prompt=PROMPT, max_tokens=64, seed=7, temperature=1, extra_body=body
        )

    plain, ngram = run("none"), run("ngram")
    assert plain.choices[0].text == ngram.choices[0].text
    cycles = ngram.gammaray["cycles_by_drafter"]
    assert cycles["ngram"] > 0
    assert cycles["model"] == 0
    assert sum(cycles.values()) == ngram.gammaray["cycles"]


def test_head_is_refused_where_there_is_none(cluster):
    with Client(cluster.grpc) as client:
        client.wait_ready(60, roles=("target",))

        def is_refused():
            try:
                client.complete(PROMPT, drafter="head", max_tokens=1)
            except InvalidArgumentError as error:
                return "no target worker" in str(error)
            return False

        assert eventually(is_refused)  # as soon as the orchestrator is connected to its target worker
