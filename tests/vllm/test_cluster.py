"""A whole cluster whose target runs on vLLM, under Ray Serve, with Redis and the public APIs."""

from pathlib import Path
from urllib.request import urlopen

import pytest

from gammaray import Client
from gammaray.demo_pair import resolve_model
from tests.support.adapter_helpers import make_adapter
from tests.support.cluster.cluster_helpers import PATIENCE_S, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SMOLLM2 = Path(__file__).parents[2] / "build/models/smollm2"
MODEL = str(SMOLLM2) if SMOLLM2.is_dir() else "demo"
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\ndef variance(values):\n    return"
ADAPTER = "tuned"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    adapter = tmp_path_factory.mktemp("adapters") / ADAPTER
    make_adapter(adapter, Path(resolve_model(MODEL, "target")), 0)
    model = ("--target", MODEL, "--lora", f"{ADAPTER}={adapter}")
    with running_cluster("--engine", "vllm", *model, "--draft-workers", "0") as running:
        yield running


@pytest.mark.parametrize("temperature", [0, 1])
def test_adaptive_gamma_gives_the_tokens_of_plain_decoding(cluster, temperature):
    options = {"temperature": temperature, "seed": 7, "max_tokens": 40, "ignore_eos": True}
    with Client(cluster.grpc) as client:
        plain = client.complete(PROMPT, gamma=0, **options)
        adaptive = client.complete(PROMPT, **options)
    assert [token.token_id for token in adaptive.tokens] == [token.token_id for token in plain.tokens]
    assert plain.summary.drafted_tokens == 0
    assert adaptive.summary.accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_adapter_over_http_gives_its_own_text_and_that_of_plain_decoding(cluster, temperature):
    def text(model, gamma):
        done = client.completions.create(
            model=model,
            prompt=PROMPT,
            seed=5,
            max_tokens=24,
            temperature=temperature,
            extra_body={"gammaray": {"gamma": gamma}, "ignore_eos": True},
        )
        return done.choices[0].text

    with cluster.openai() as client:
        assert ADAPTER in [model.id for model in client.models.list()]
        adapted = text(ADAPTER, "adaptive")
        assert adapted == text(ADAPTER, 0)
        assert adapted != text("", 0)


def test_status_and_metrics_name_the_engine(cluster):
    (target,) = (process for process in cluster.status() if process.role == "target")
    assert target.kernel.startswith("vLLM 0.32.")
    with urlopen(f"http://{target.metrics_address}/metrics", timeout=PATIENCE_S) as answer:
        (info,) = (line for line in answer.read().decode().splitlines() if line.startswith("gammaray_info{"))
    assert f'kernel="{target.kernel}"' in info
