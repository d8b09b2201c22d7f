"""What each client is asked to do, and what of its own report counts as success."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.environments import ensure_environment
from benchmarks.clients.likelihoods import worst_difference

TASKS = Path(__file__).parent / "tasks"
CHECKS = Path(__file__).parent / "checks"

REQUESTS = 16
TOKENS = 64
TOLERANCE = 1e-3
"""Largest allowed difference of a summed log-likelihood from the one that transformers computes."""

_TIMEOUT_S = 900.0


class ClientError(RuntimeError):
    """A client failed, or reported something else than success."""


@dataclass(frozen=True)
class Server:
    """Where the cluster is."""

    address: str
    model: str
    tokenizer: Path


@dataclass(frozen=True)
class Outcome:
    """What a client reported."""

    succeeded: int
    total: int
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One run of a client.

    Args:
        name: What the run is called.
        client: The environment that it needs.
        run: Runs it in an empty folder; raises ClientError when it fails.
    """

    name: str
    client: str
    run: Callable[[Server, Path], Outcome]


def _guidellm(server: Server, folder: Path) -> Outcome:
    backend = {
        "kind": "openai_http",
        "target": f"http://{server.address}",
        "model": server.model,
        "request_format": "/v1/completions",
    }
    report = folder / "guidellm.json"
    _run(
        *("guidellm", folder),
        *("guidellm", "run", "--backend", json.dumps(backend), "--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={TOKENS},output_tokens={TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}"),
        *("--output", f"kind=json,path={report}", "--disable-progress"),
    )
    (benchmark,) = _read(report)["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    speed = benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"]
    return Outcome(totals["successful"], totals["total"], {"output_tokens_per_s": speed})


def _aiperf(server: Server, folder: Path) -> Outcome:
    _run_aiperf(
        *(server, folder, "completions"),
        *("--synthetic-input-tokens-mean", str(TOKENS), "--output-tokens-mean", str(TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--request-count", str(REQUESTS)),
    )
    report = _read(folder / "profile_export_aiperf.json")
    panel = {name: value for name, value in report.items() if name.startswith("spec_decode")}
    if not panel:
        raise ClientError("AIPerf's speculative-decoding panel is empty")
    figures = {name: value.get("avg", value) for name, value in panel.items() if isinstance(value, dict)}
    return Outcome(*_aiperf_counts(report), figures)


def _speed_bench(server: Server, folder: Path) -> Outcome:
    rows = TASKS / "coding.jsonl"
    count = len(rows.read_text().splitlines())
    _run_aiperf(
        *(server, folder, "chat"),
        *("--custom-dataset-type", "speed_bench_coding", "--input-file", str(rows)),
        *("--extra-inputs", f"max_completion_tokens:{TOKENS}", "--request-count", str(count)),
    )
    _run("aiperf", folder, "aiperf", "speed-bench-report", str(folder), "--format", "csv")
    metrics = _read(folder / "server_metrics_export.json")["metrics"]
    counters = {
        name.removeprefix("vllm:"): metrics[name]["series"][0]["stats"]["total"]
        for name in sorted(metrics)
        if name.startswith("vllm:spec_decode_num_") and not name.endswith("per_pos")
    }
    if len(counters) != 3:
        raise ClientError(f"AIPerf found these of vLLM's counters of speculation: {sorted(counters)}")
    report = _read(folder / "profile_export_aiperf.json")
    with (folder / "speed_bench_report.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    if not row.get("coding"):
        raise ClientError(f"AIPerf's report has no acceptance length: {row}")
    return Outcome(*_aiperf_counts(report), {"accept_length": float(row["coding"]), **counters})


def _run_aiperf(server: Server, folder: Path, endpoint: str, *options: str) -> None:
    _run(
        *("aiperf", folder, "aiperf", "profile", "--model", server.model),
        *("--url", f"http://{server.address}", "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", str(server.tokenizer), "--extra-inputs", "temperature:0"),
        *("--concurrency", "2", "--random-seed", "1", "--ui", "simple"),
        *("--output-artifact-dir", str(folder), *options),
    )


def _aiperf_counts(report: Mapping[str, Any]) -> tuple[int, int]:
    succeeded = round(report["request_count"]["avg"])
    failed = round((report.get("error_request_count") or {}).get("avg", 0))
    return succeeded, succeeded + failed


def _evalscope(server: Server, folder: Path) -> Outcome:
    _run(
        *("evalscope", folder, "evalscope", "perf"),
        *("--url", f"http://{server.address}/v1/completions", "--api", "openai", "--model", server.model),
        *("--tokenizer-path", str(server.tokenizer), "--dataset", "random", "--prefix-length", "0"),
        *("--min-prompt-length", str(TOKENS), "--max-prompt-length", str(TOKENS)),
        *("--min-tokens", str(TOKENS), "--max-tokens", str(TOKENS), "--number", str(REQUESTS)),
        *("--parallel", "2", "--temperature", "0", "--stream", "--extra-args", '{"ignore_eos": true}'),
        *("--outputs-dir", str(folder), "--no-timestamp"),
    )
    report = _read(_only(folder, "benchmark_summary.json"))
    keys = {key.lower(): key for key in report}
    speeds = {name: report[key] for name, key in keys.items() if "throughput" in name}
    return Outcome(report[keys["success requests"]], report[keys["total requests"]], speeds)


def _lm_eval_generation(server: Server, folder: Path) -> Outcome:
    report, samples = _run_lm_eval(server, folder, "gammaray_completions")
    answered = sum(bool(sample["resps"][0]) for sample in samples)
    return Outcome(answered, len(samples), {"exact_match": report["exact_match,none"]})


def _lm_eval_likelihood(server: Server, folder: Path) -> Outcome:
    report, samples = _run_lm_eval(server, folder, "gammaray_continuations")
    scored = [
        (*_arguments(arguments), float(response[0][0]), response[0][1] in (True, "True"))
        for sample in samples
        for arguments, response in zip(
            sample["arguments"].values() if isinstance(sample["arguments"], dict) else sample["arguments"],
            sample["resps"],
            strict=True,
        )
    ]
    difference, same_greedy = worst_difference(server.tokenizer, scored)
    figures = {"acc": report["acc,none"], "worst_difference": difference, "same_is_greedy": same_greedy}
    if not (difference <= TOLERANCE and same_greedy):
        raise ClientError(f"log-likelihoods are not those of transformers: {figures}")
    return Outcome(len(scored), len(scored), figures)


def _arguments(arguments: Any) -> tuple[str, str]:
    if isinstance(arguments, dict):
        return arguments["arg_0"], arguments["arg_1"]
    return arguments[0], arguments[1]


def _run_lm_eval(server: Server, folder: Path, task: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    model_args = {
        "model": server.model,
        "base_url": f"http://{server.address}/v1/completions",
        "tokenizer": server.tokenizer,
        "num_concurrent": 2,
    }
    _run(
        *("lm-eval", folder, "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
        *("--tasks", task, "--include_path", str(TASKS), "--batch_size", "1"),
        *("--output_path", str(folder), "--log_samples"),
        cwd=TASKS,
    )
    report = _read(_only(folder, "results_*.json"))["results"][task]
    samples = _only(folder, f"samples_{task}_*.jsonl").read_text().splitlines()
    return report, [json.loads(line) for line in samples]


_CUT = "Incomplete response returned, reason: max_output_tokens"
"""What Codex says of an answer that fills the context, as the demo pair's often do, before it fails."""


def _codex(server: Server, folder: Path) -> Outcome:
    """Ask Codex CLI, which sends several kinds of tools, with a prompt that fits the model."""
    answer, instructions = folder / "answer.txt", folder / "instructions.md"
    instructions.write_text("Answer briefly.")
    settings = {
        "model_provider": "gammaray",
        "model_providers.gammaray.name": "gammaray",
        "model_providers.gammaray.base_url": f"http://{server.address}/v1",
        "model_providers.gammaray.wire_api": "responses",
        "model_providers.gammaray.request_max_retries": 0,
        "model_instructions_file": str(instructions),
        "include_permissions_instructions": False,
        "skills.include_instructions": False,
        **{f"features.{name}": False for name in ("shell_tool", "goals", "view_image")},
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    try:
        _run(
            *("codex", folder, "codex", "exec", "--skip-git-repo-check", "--model", server.model),
            *(*options, "--output-last-message", str(answer), "Say hello."),
        )
    except ClientError as error:
        if _CUT not in str(error):
            raise
        return Outcome(1, 1, {"ended": "with the context"})
    if not answer.is_file() or not answer.read_text().strip():
        raise ClientError("Codex has no answer")
    return Outcome(1, 1, {"characters": len(answer.read_text())})


def _checked(client: str) -> Callable[[Server, Path], Outcome]:
    """Return what runs a library's checks, `checks/CLIENT_checks.py`, in its environment."""
    script = CHECKS / f"{client.replace('-', '_')}_checks.py"

    def run(server: Server, folder: Path) -> Outcome:
        report = folder / "checks.json"
        _run(client, folder, "python", str(script), server.address, server.model, str(report))
        outcomes: dict[str, str | None] = _read(report)
        failures = {name: reason for name, reason in outcomes.items() if reason is not None}
        return Outcome(len(outcomes) - len(failures), len(outcomes), failures)

    return run


def _run(client: str, folder: Path, program: str, *arguments: str, cwd: Path | None = None) -> str:
    """Run a client's program and return what it printed.

    Raises:
        ClientError: It failed or took longer than 15 minutes.
    """
    binaries = ensure_environment(client)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GAMMARAY"))
    }
    environment |= {
        "PATH": f"{binaries}{os.pathsep}{environment.get('PATH', '')}",
        "HOME": str(folder),
        "HF_HOME": str(folder / "huggingface"),
        **dict.fromkeys(("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "NO_COLOR"), "1"),
    }
    log = folder / f"{program}.log"
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [binaries / program, *arguments],
                cwd=cwd or folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClientError(f"{program} took longer than {_TIMEOUT_S:.0f} s; see {log}") from None
    printed = log.read_text(errors="replace")
    if done.returncode != 0:
        raise ClientError(f"{program} ended with code {done.returncode}:\n{printed[-2000:]}")
    return printed


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ClientError(f"no report in {path}: {error}") from None
    return found


def _only(folder: Path, pattern: str) -> Path:
    found: Sequence[Path] = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ClientError(f"{len(found)} files {pattern} in {folder}")
    return found[0]


PROGRAMS = (
    Program("GuideLLM", "guidellm", _guidellm),
    Program("AIPerf profile", "aiperf", _aiperf),
    Program("AIPerf speed-bench-report", "aiperf", _speed_bench),
    Program("EvalScope perf", "evalscope", _evalscope),
    Program("lm-eval generation", "lm-eval", _lm_eval_generation),
    Program("lm-eval log-likelihood", "lm-eval", _lm_eval_likelihood),
    Program("Codex CLI", "codex", _codex),
    Program("openai", "openai", _checked("openai")),
    Program("LangChain", "langchain-openai", _checked("langchain-openai")),
    Program("pydantic-ai", "pydantic-ai-slim", _checked("pydantic-ai-slim")),
    Program("instructor", "instructor", _checked("instructor")),
)
