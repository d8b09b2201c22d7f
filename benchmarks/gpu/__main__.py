"""What a GPU is needed for, in the order of its worth, within ten minutes and without a network.

The first 20 seconds say what is missing. Then come the parts, each with a share of the time; what one leaves
goes to the next ones. Each part writes its result when it ends, fails or has used up its time:

    exactness    completions by vLLM with the plug-in gammaray-vllm, with look-ups and with a draft model,
                 compared with plain ones: temperature 0, 0.7 and 1, bfloat16 and float32, both model runners
    steps        the time of a forward with 1 + gamma rows per session over that with one row
    speed        tokens per second of vLLM, with the plug-in and of gammaray on vLLM
    invariance   completions in other batches with and without VLLM_BATCH_INVARIANT=1, and what that costs

    python -m benchmarks.gpu --target MODEL_DIR --draft MODEL_DIR
    python -m benchmarks.gpu --target MODEL_DIR --wheels WHEELS --install VENV    # first installs from wheels
    python -m benchmarks.gpu --tiny    # the demo pair on vLLM's CPU build: shows that the program works

Exits with 2 if nothing can run, with 1 if a part failed or a completion with the plug-in differs beyond ties.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import sysconfig
import time
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.needs import MISSING, OK, SPEED, Finding, found, installation

# Only the standard library so far: the rest may be missing.

PARTS = {"exactness": 40, "steps": 15, SPEED: 30, "invariance": 15}
"""Part -> its share of the time."""


def deadline(part: str, chosen: list[str], seconds: float) -> float:
    """Return the seconds of a part, of those that are left for it and the later ones."""
    later = chosen[chosen.index(part) :]
    return seconds * PARTS[part] / sum(PARTS[each] for each in later)


def integers(text: str) -> list[int]:
    """Return comma-separated numbers."""
    return [int(each) for each in text.split(",")]


def parts(text: str) -> list[str]:
    """Return comma-separated names of parts, in the order of their worth."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(PARTS)}")
    return [part for part in PARTS if part in names]


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=formatter
    )
    add = parser.add_argument
    add("--target", default="", help="directory of a model")
    add("--draft", default="", help="a draft model's; without it exactness rounds the target to four bits")
    add("--head", default="", help="EAGLE, EAGLE-3, Medusa or DFlash head for the speed")
    add("--parts", type=parts, default=",".join(PARTS), help="comma-separated; default: all")
    add("--minutes", type=float, default=10.0, help="for all parts; default 10")
    add("--wheels", type=Path, help="folder of wheels, for what is not installed")
    add(
        "--install", type=Path, metavar="VENV", help="install --wheels into this environment, and go on there"
    )
    add("--check", action="store_true", help="only say what is missing")
    add("--runners", default="V1,V2", help="model runners of the exactness; default V1,V2")
    add("--gamma", type=int, default=4, help="length of proposals; default 4")
    add("--sessions", type=integers, default="1,8,32,64", help="of the steps")
    add("--batches", type=integers, default="1,8,64", help="completions in flight of the speed")
    add("--temperatures", type=integers, default="0,1", help="of the speed")
    add("--prompts", type=int, default=16)
    add("--tokens", type=int, default=128, help="length of each completion; for exactness at most 64")
    add("--repetitions", type=int, default=1)
    add("--workload", default="mixed", help="of benchmarks/workloads.py")
    add("--dtype", default="bfloat16", help="of all parts but exactness")
    add("--memory-share", type=float, default=0.85, help="of the GPU's memory, for vLLM")
    add("--out", type=Path, help="folder of the results (default: benchmarks/results)")
    add("--tiny", action="store_true", help="the demo pair on a CPU; results are written with --out only")
    given = parser.parse_args()
    if given.install and not given.wheels:
        parser.error("--install needs --wheels")
    if given.tiny:
        given.target, given.draft, given.dtype, given.runners = "demo", "demo", "float32", "V1"
        given.sessions, given.batches, given.temperatures = [1, 2], [2], [0]
        given.prompts, given.tokens = 2, 16
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return given


def install(given: argparse.Namespace) -> None:
    """Install into `--install`, which sees this Python's packages, and start this program there; once."""
    if Path(sys.prefix).resolve() == given.install.resolve():
        return
    python = given.install / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(given.install)], check=True)
        (site,) = given.install.glob("lib/python*/site-packages")
        # Those of a virtual environment, too, which --system-site-packages would not show.
        outer = sysconfig.get_path("purelib")
        (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    command = installation(str(python), given.wheels)
    print(*command, flush=True)
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)
    os.execv(python, [str(python), "-m", "benchmarks.gpu", *sys.argv[1:]])


def checked(given: argparse.Namespace) -> list[Finding]:
    """Say what is there and what is missing; return all of it."""
    started, findings = time.monotonic(), []
    for finding in found(given):
        print(f"{finding.state:<8} {finding.name:<14} {finding.text}", flush=True)
        findings.append(finding)
    print(f"looked up in {time.monotonic() - started:.0f} s\n", flush=True)
    return findings


async def measured(part: str, given: argparse.Namespace, seconds: float, result: dict[str, Any]) -> str:
    """Run a part until its deadline; `result` gets what it finds; return why it ended early, or nothing."""
    try:
        async with asyncio.timeout(seconds):
            await import_module(f"benchmarks.gpu.{part}").run(given, result)
    except TimeoutError:
        return f"its {seconds:.0f} s were over"
    except Exception as error:  # the other parts go on
        return f"{type(error).__name__}: {error}"
    return ""


def run(given: argparse.Namespace, findings: list[Finding]) -> int:
    """Run the parts, write their results, print a table; return the exit status."""
    from benchmarks.cluster import run_or_exit
    from gammaray.demo_pair import resolve_model

    given.target_path = resolve_model(given.target, "target")
    given.draft_path = resolve_model(given.draft, "draft") if given.draft else ""
    lines, status, before = [], 0, dict(os.environ)
    until = time.monotonic() + 60 * given.minutes
    for part in given.parts:
        if lacking := [finding.name for finding in findings if finding.blocks(part)]:
            lines.append(f"{part}: not run: {', '.join(lacking)} missing")
            status = status or 1
            continue
        seconds, started = deadline(part, given.parts, until - time.monotonic()), time.monotonic()
        print(f"\n{part}, at most {seconds:.0f} s", flush=True)
        result: dict[str, Any] = {}
        try:
            error = run_or_exit(measured(part, given, seconds, result))
        except SystemExit as interrupted:
            error, status = "interrupted", int(interrupted.code or 0)
        os.environ.clear()
        os.environ.update(before)
        taken = round(time.monotonic() - started, 1)
        if error:
            print(f"failed: {error}", flush=True)
        lines.append(f"{part}: {taken:.0f} s" + (f", FAILED: {error.splitlines()[-1]}" if error else ""))
        if result:
            lines += [f"    {line}" for line in import_module(f"benchmarks.gpu.{part}").summary(result)]
        if error or any(row.get("error") or row.get("different") for row in result.get("rows", ())):
            status = status or 1
        if given.out or not given.tiny:
            write(part, given, findings, {"seconds": taken, "error": error, **result})
        if error == "interrupted":
            break
    print("", *lines, sep="\n")
    return status


def write(part: str, given: argparse.Namespace, findings: list[Finding], result: dict[str, Any]) -> None:
    """Write a part's result, without the paths of this machine."""
    from benchmarks.provenance import write_result

    shown = {name: named(value) for name, value in vars(given).items() if not name.endswith("_path")}
    machine = {each.name: each.text for each in findings if "/" not in each.text}
    stamp = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
    out = given.out / f"gpu-{part}-{stamp}.json" if given.out else None
    path = write_result(f"gpu-{part}", {"options": shown, "machine": machine, **result}, out)
    print(f"written: {path}", flush=True)


def named(value: Any) -> Any:
    """Return an option for a result file, without the paths of this machine."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute())
    return Path(value).name if is_path else value


def main() -> None:
    """Look the machine up, install if asked to, run the parts."""
    given = parsed()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if given.install:
        install(given)
    findings = checked(given)
    missing = [finding for finding in findings if finding.state == MISSING]
    runnable = [part for part in given.parts if not any(finding.blocks(part) for finding in findings)]
    if missing:
        print("missing:", *(f"  {finding.name}: {finding.text}" for finding in missing), sep="\n", flush=True)
    if given.check or not runnable:
        sys.exit(2 if missing else 0)
    fits = {
        finding.name[-2:]
        for finding in findings
        if finding.name.startswith("plug-in") and finding.state == OK
    }
    given.runners = [runner for runner in given.runners.split(",") if runner in fits]
    sys.exit(run(given, findings))


if __name__ == "__main__":
    main()
