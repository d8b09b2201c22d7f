"""The GPU benchmark at tiny size on the CPU: that it runs, writes what it says, and measures correctly."""

from __future__ import annotations

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import run as benchmark
from benchmarks.gpu import vllm_peer
from benchmarks.gpu.loop import decode, new_sessions, release, speculate
from benchmarks.gpu.pair import TINY, Pair, agreement
from benchmarks.gpu.peers import vllm_rows
from benchmarks.gpu.run import Results, main
from benchmarks.gpu.speedup import best_gamma
from benchmarks.gpu.table import table

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.set_num_threads(1)
    return Pair.build(TINY, "cpu", torch.float32)


@pytest.mark.slow
def test_tiny_run_writes_every_phase_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["provenance"]["versions"]["torch"]
    assert result["errors"] == {}
    assert result["exactness"]["same_chains"] is True
    assert result["exactness"]["chain_against_transformers"] < 1e-4
    assert len(result["products"]) == 15
    assert [row["batch"] for row in result["decode"]] == [1, 2]
    assert [row["context"] for row in result["contexts"]] == [96, 300]
    assert {row["tokens"] for row in result["verify"]} == {1, 3, 5}
    assert [row["batch"] for row in result["speedup"]] == [1, 2]
    for row in result["speedup"]:
        whole, of, batch = row["same_tokens"].partition(" of ")
        assert of
        assert whole == batch
        assert 1 <= row["tokens_per_cycle"] <= 9
    assert [row["peer"] for row in result["peers"]] == ["generate", "assisted-5"]
    assert (tmp_path / "gpu.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("fault", [{"tree_against_torch": float("nan")}, {"same_chains": False}], ids=str)
def test_inexact_kernels_are_not_measured(
    fault: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    right = benchmark.exactness
    monkeypatch.setattr(benchmark, "exactness", lambda device: right(device) | fault)
    assert main(["--tiny", "--out", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert "not exact, so nothing is measured" in result["errors"]["exactness"]
    assert "not exact" in capsys.readouterr().err
    assert not {"build", "decode", "speedup"} & set(result)


def test_phase_error_is_recorded_and_later_phases_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    results = Results(tmp_path / "gpu.json", {})

    def fails():
        yield {"row": 1}
        raise ZeroDivisionError("planted")

    results.phase("one", fails)
    results.phase("two", lambda: {"value": 2})
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["one"] == [{"row": 1}]
    assert written["errors"] == {"one": "ZeroDivisionError: planted"}
    assert written["two"] == {"value": 2}


def test_run_without_cuda_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "--tiny" in capsys.readouterr().err


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_gives_the_tokens_of_plain_decoding(pair: Pair, gamma: int, temperature: float) -> None:
    pair.set_eps(2, 0.1)
    target, draft = pair.target(), pair.draft(2)
    plain = new_sessions([target], 2, 12, temperature)
    decode(target, plain, 20)
    release([target], plain)
    ours = new_sessions([target, draft], 2, 12, temperature)
    trace = speculate(target, draft, ours, 6, gamma)
    assert trace.emitted == sum(len(session.tokens) for session in ours)
    assert trace.emitted == trace.accepted + 2 * trace.cycles
    for one, other in zip(plain, ours, strict=True):
        length = min(len(one.tokens), len(other.tokens))
        assert length >= 6
        assert one.tokens[:length] == other.tokens[:length]


PEER_SCRIPT = """
import json
print("INFO 08-01 loading")
print(json.dumps({"peer": "vllm", "batch": 1, "tokens_per_s": 2.0, "runs": [2.0]}))
"""


def test_rows_of_a_peer_process_are_read_among_its_log_lines() -> None:
    assert vllm_rows([sys.executable, "-c", PEER_SCRIPT]) == [
        {"peer": "vllm", "batch": 1, "tokens_per_s": 2.0, "runs": [2.0]}
    ]


@pytest.mark.parametrize("ending", ["", "raise SystemExit('out of memory')"], ids=["no rows", "failed"])
def test_a_peer_process_that_fails_is_an_error(ending: str) -> None:
    with pytest.raises(RuntimeError, match="vLLM ended with"):
        vllm_rows([sys.executable, "-c", (PEER_SCRIPT if ending else "") + ending])


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_peer_without_vllm_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_peer.main(["--model", "none"]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err


def test_pair_eps_sets_the_agreement_without_changing_the_draft(pair: Pair) -> None:
    target, draft = pair.target(), pair.draft(2)
    found = []
    for eps in (1e-6, 0.05, 1.0):
        pair.set_eps(2, eps)
        found.append(agreement(target, draft, 4, 8, seed=1))
    assert found[0].coupled == found[0].greedy == 1.0
    assert found[0].overlap == pytest.approx(1.0, abs=1e-3)
    assert 0.4 < found[1].coupled < 0.98
    assert found[2].coupled < 0.4
    assert found[1].overlap >= found[1].coupled - 0.05
    pair.set_eps(2, 1e-6)
    assert agreement(target, draft, 4, 8, seed=1).coupled == 1.0


def test_pair_calibration_meets_alpha(pair: Pair) -> None:
    target, draft = pair.target(), pair.draft(2)
    eps, found = pair.calibrate(
        target, draft, 2, 0.8, num_sessions=4, num_tokens=16, expired=lambda: False, tolerance=0.05
    )
    assert 0.002 < eps < 1.0
    assert abs(found.coupled - 0.8) <= 0.05


def test_pair_draft_module_shares_the_target_weights(pair: Pair) -> None:
    module = pair.draft_module(2)
    assert module.config.num_hidden_layers == len(module.model.layers) == 2
    assert module.lm_head.weight is pair.module.lm_head.weight
    text = torch.arange(6)[None]
    reference = torch.cat(list(pair.draft(2).step([_feed(text)])))
    assert (module(text).logits[0] - reference).abs().max() < 1e-3


def test_pair_entropy_is_that_of_a_language_model(pair: Pair) -> None:
    log_probs = pair.draft(2).step([_feed(torch.arange(40)[None])])[0].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    assert 1.5 < entropy < 3.5


def test_best_gamma_grows_with_alpha_and_falls_with_costs() -> None:
    def costs(draft_ms: float, slope: float) -> dict[str, list[dict[str, float]]]:
        verify = [{"batch": 1, "tokens": n, "device_ms": 10 + slope * n} for n in range(1, 13)]
        return {"draft": [{"layers": 2, "batch": 1, "step_ms": draft_ms}], "verify": verify}

    cheap, dear = costs(0.5, 0.0), costs(3.0, 0.0)
    assert best_gamma(0.6, 2, 1, cheap) < best_gamma(0.9, 2, 1, cheap)
    assert best_gamma(0.8, 2, 1, dear) < best_gamma(0.8, 2, 1, cheap)
    assert best_gamma(0.8, 2, 1, costs(0.5, 100.0)) == 1
    assert best_gamma(0.8, 2, 8, cheap) == 4


def test_table_leaves_out_what_was_not_measured() -> None:
    text = table({"peers": [{"peer": "generate", "batch": 1, "tokens_per_s": 123.456}]})
    assert "| generate | 1 | 123.5 |" in text
    assert "Plain decoding" not in text


def test_benchmark_needs_no_more_than_it_says() -> None:
    """Torch, transformers and grpcio with what those bring; followed through our own modules' sources."""
    waiting, seen, foreign = ["benchmarks.gpu.run"], set[str](), set[str]()
    while waiting:
        name = waiting.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting.extend(n for n in names if n.split(".")[0] in ("benchmarks", "gammaray", "services"))
            foreign.update(n.split(".")[0] for n in names)
    assert "services.engine.engine" in seen
    foreign -= {*sys.stdlib_module_names, "benchmarks", "gammaray", "services"}
    allowed = {"filelock", "grpc", "numpy", "torch", "transformers", "triton"}  # torch depends on filelock
    allowed |= {"huggingface_hub", "safetensors"}  # transformers depends on both
    # The package's own lazy names, none of which the benchmark uses.
    assert foreign - allowed <= lazily_imported(), foreign


def lazily_imported() -> set[str]:
    """What only `gammaray.client.async_client` and `gammaray.client.request` need."""
    return {"google", "opentelemetry", "pydantic", "grpc_status"}


def _feed(text: torch.Tensor):
    from services.engine.core.batch import SequenceInput

    tokens = text[0].tolist()
    return SequenceInput("feed", 0, tokens, len(tokens))
