"""Generates docs/benchmarks.md and docs/speed.svg from the result files that it names.

python docs/make_benchmarks.py          # writes them
python docs/make_benchmarks.py --check  # fails if they are stale

One current table per claim. To replace a figure, measure again, name the new result file here and delete the
old one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.chart import ADAPTIVE, by_category  # noqa: E402
from benchmarks.peers.run import SYSTEMS  # noqa: E402
from benchmarks.prompts import CATEGORIES  # noqa: E402

RESULTS = HERE.parent / "benchmarks" / "results"
SPEED = "peers-2026-11-27-6"
PLAIN = "gammaray-0"
_DRAFTERS = {  # by the name of a system; others draft in turn
    "gammaray-model": "draft worker",
    "gammaray-head": "head",
    "gammaray-adaptive": "both",
    "llama.cpp": "llama.cpp",
    "llama.cpp-draft-4": "llama.cpp, draft of 4",
}

Result = dict[str, Any]
Table = Callable[[Result], Iterator[str]]


@dataclass(frozen=True)
class Claim:
    """A section of the page: what is claimed, the result file, and how its table is made."""

    title: str
    text: str
    result: str
    table: Table


def load(name: str) -> Result:
    """Return a result file."""
    found: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the first column is text."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * 1}{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def of_temperature(result: Result, temperature: float, concurrency: int = 1) -> dict[str, dict[str, Any]]:
    """Return the rows by category and system."""
    return {
        point["category"]: {row["system"]: row for row in point["rows"]}
        for point in result["points"]
        if point["temperature"] == temperature and point.get("concurrency", 1) == concurrency
    }


def temperatures(result: Result) -> list[float]:
    """Return the measured temperatures, in order."""
    return list(dict.fromkeys(point["temperature"] for point in result["points"]))


def speed(result: Result) -> Iterator[str]:
    """Yield decoding after the first token over gamma 0, and tokens per second, by category."""
    columns = (*CATEGORIES, "all")
    ratios, speeds = [], []
    for temperature in temperatures(result):
        found = of_temperature(result, temperature)
        cells = [_number(found, name, ADAPTIVE, "decode_over_plain") for name in columns]
        whole = _number(found, "all", ADAPTIVE, "over_plain")
        ratios.append([f"temperature {temperature:g}", *cells, whole])
        systems = dict.fromkeys(system for rows in found.values() for system in rows)
        for system in systems:
            cells = [_number(found, name, system, "decode_tokens_per_s", 1) for name in columns]
            speeds.append([f"{system}, T {temperature:g}", *cells])
    yield from table(("x gamma 0", *columns, "whole requests"), ratios)
    yield ""
    yield from equal_and_loops(result)
    yield ""
    yield "Decoding after the first token, tokens/s:"
    yield ""
    yield from table(("", *columns), speeds)


def pair(result: Result) -> Iterator[str]:
    """Yield decoding after the first token over gamma 0, by temperature, drafter or program, and category."""
    columns, rows = (*CATEGORIES, "all"), []
    for temperature in temperatures(result):
        found = of_temperature(result, temperature)
        for system in found["all"]:
            if system == PLAIN:
                continue
            of_all = [found[name] for name in columns]
            speeds = [[by[one]["decode_tokens_per_s"]["median"] for one in (system, PLAIN)] for by in of_all]
            name = _DRAFTERS.get(system, "in turn")
            rows.append([f"T {temperature:g}, {name}", *(f"{own / plain:.2f}" for own, plain in speeds)])
    yield from table(("x gamma 0", *columns), rows)
    yield ""
    memory = ", ".join(
        f"{mb / 1024:.1f} GiB of {_process(name, kind)}"
        for name, by_kind in result["memory_mb"].items()
        for kind, mb in by_kind.items()
        if kind in ("target", "draft") or name.startswith("llama")
    )
    equal = next(equal_and_loops(result)).partition(". ")[0].rstrip(".")
    yield f"{equal}. Resident memory: {memory}."


def _process(system: str, kind: str) -> str:
    if kind not in ("target", "draft"):
        return _DRAFTERS.get(system, system)
    return f"the {kind} worker{' that drafts in turn' if ',' in system else ''}"


def equal_and_loops(result: Result) -> Iterator[str]:
    """Yield a sentence on the tokens that were compared, and on completions that were left out."""
    compared = equal = loops = 0
    completions = 0
    for point in result["points"]:
        if point["category"] != "all":
            continue
        for count in point["equality"]:
            if count["reference"] == PLAIN:
                compared, equal = compared + count["compared"], equal + count["equal"]
        if "loops" in point:
            loops += point["loops"]["num_loops"]
            completions += sum(map(len, point["loops"]["repeated_share"]))
    text = f"{equal} of {compared} completions have the tokens of gamma 0."
    if completions:
        text += (
            f" {loops} of {completions} completions of gamma 0 repeat more than half of their 6-grams: "
            "they are left out of the figures with one completion in flight."
        )
    yield text


def load_table(result: Result) -> Iterator[str]:
    """Yield whole requests over gamma 0 by number of completions in flight."""
    rows = []
    for point in result["points"]:
        if point["category"] != "all":
            continue
        found = {row["system"]: row for row in point["rows"]}
        over = found[ADAPTIVE]["over_plain"]
        rows.append(
            [
                f"{point.get('concurrency', 1)} in flight, T {point['temperature']:g}",
                f"{found[PLAIN]['tokens_per_s']['median']:.1f}",
                f"{found[ADAPTIVE]['tokens_per_s']['median']:.1f}",
                f"{over['median']:.2f} ({over['least']:.2f} to {over['largest']:.2f})",
            ]
        )
    yield from table(("", "gamma 0, tok/s", "default, tok/s", "default over gamma 0"), rows)
    yield ""
    yield from equal_and_loops(result)


def equalities(result: Result) -> Iterator[str]:
    """Yield the comparisons of tokens."""
    rows = [
        [c["comparison"], f"{c['equal']} of {c['completions']}", str(c["tokens"])]
        for c in result["comparisons"]
    ]
    yield from table(("", "equal completions", "tokens"), rows)


def chaos(result: Result) -> Iterator[str]:
    """Yield what streams went through, and the pause that a fault costs them."""
    rows = []
    for name, run in result["drafters"].items():
        streams = run["streams"]
        rows.append(
            [
                name,
                str(run["strikes"]),
                str(run["kills"]),
                str(streams["finished"]),
                str(streams["tokens"]),
                str(len(streams["lost"])),
                str(len(streams["wrong"])),
            ]
        )
    yield from table(("drafter", "faults", "kills", "streams", "tokens", "lost", "repeated or changed"), rows)
    yield ""
    killed = [
        [row["label"], str(row["strikes"]), f"{row['pause_median_s']:.2f}", f"{row['pause_max_s']:.2f}"]
        for run in result["drafters"].values()
        for row in run["recovery"]
        if row["pause_median_s"] is not None and row["kills"]
    ]
    yield from table(("fault", "times", "median pause of a stream, s", "longest, s"), killed)


def forced(result: Result) -> Iterator[str]:
    """Yield the speed of JSON by a schema."""
    rows = [
        [
            f"{row['way']}, T {row['temperature']:g}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['over_gamma_0']:.2f}",
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['valid']} of {row['completions']}",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["temperature"], row["way"]))
        if row["way"].startswith("schema")
    ]
    yield from table(("", "tok/s", "x gamma 0", "tokens/cycle", "valid"), rows)


def prefixes(result: Result) -> Iterator[str]:
    """Yield times to the first token with a cached prefix."""
    rows = [
        [
            str(point["prompt_tokens"]),
            f"{point['first_token_ms']['cached']:.0f}",
            f"{point['first_token_ms']['read']:.0f}",
            f"{point['cached_over_read']:.2f}",
        ]
        for point in result["points"]
    ]
    yield from table(("tokens of the first message", "cached, ms", "computed, ms", "ratio"), rows)


def tracing(result: Result) -> Iterator[str]:
    """Yield the cost of tracing in tokens per second."""
    rows = [
        [name, f"{100 * found['cost']:.1f} %", f"{100 * found['low']:.1f} to {100 * found['high']:.1f} %"]
        for name, found in result["cost"].items()
        if name in ("every", "hundredth")
    ]
    yield from table(("sessions that are traced", "cost in tokens/s", "95 % interval"), rows)


def soak(result: Result) -> Iterator[str]:
    """Yield what the soak did and found."""
    calls = sum(result["done"].values())
    minutes = result["options"]["seconds"] / 60
    grown = sum(trend["grows"] for trend in result["trends"])
    yield (
        f"{calls} calls in {minutes:g} minutes; {len(result['complaints'])} complaints; "
        f"{grown} of {len(result['trends'])} measures of memory, threads, files, tasks and Redis keys grew."
    )


CLAIMS = (
    Claim(
        "A real chat model, one stream",
        "SmolLM2-135M-Instruct with the EAGLE-3 head that ships with gammaray, in the target worker, and "
        "look-ups; "
        "ten prompts in each of seven categories, no prompt or output cached.",
        SPEED,
        speed,
    ),
    Claim(
        "Several completions in flight",
        "The same model, chats; whole requests, prompts included. With many in flight the cores are busy; "
        "the controller proposes less.",
        "peers-2026-11-30",
        load_table,
    ),
    Claim(
        "A real pair: a draft worker beside the target",
        "Qwen2.5-Coder, 1.5B in bfloat16 and 0.5B in int8, a core with AMX each, one prompt of each "
        "category, decoding after the first token, adaptive γ. Head: "
        "[trained](lab.md#a-head-for-smollm2) on two such cores in 105 minutes; both: the default; in turn: "
        "the target worker drafts with the 0.5B itself. "
        "[lab.md](lab.md#a-real-pair-on-one-machine) has γ 4, what limits it, and llama.cpp.",
        "peers-2026-12-01",
        pair,
    ),
    Claim(
        "The same tokens, whatever drafts",
        "SmolLM2, token by token: greedily against `generate` of transformers, at temperature 1 against "
        "gamma 0.",
        "equivalence-2026-11-23",
        equalities,
    ),
    Claim(
        "JSON by a schema",
        "Twenty fields by SmolLM2. What the schema leaves no choice about is proposed without a model.",
        "structured-2026-11-23-2",
        forced,
    ),
    Claim(
        "Streams survive",
        "Every kind of process is killed or stopped under load, and Redis fails over; each stream is "
        "compared with "
        "an undisturbed run.",
        "chaos-structured-2026-11-24",
        chaos,
    ),
    Claim("Nothing grows", "Half an hour of mixed load.", "soak-2026-11-22", soak),
    Claim(
        "A chat's second message",
        "Time to the first token when the KV cache of the first message is kept, and when it is computed "
        "again.",
        "prefix-cache-2026-11-21",
        prefixes,
    ),
    Claim("Cost of tracing", "The demo pair, gamma 4.", "tracing-cost-2026-11-21", tracing),
)


def page() -> str:
    """Return docs/benchmarks.md."""
    lines = [
        "<!-- Made by `python docs/make_benchmarks.py`; do not edit. -->",
        "# Benchmarks",
        "",
        "One current table per claim, with its hardware, date, commit, command and result file. "
        "[benchmarks/README.md](../benchmarks/README.md) says how each command measures; [lab.md](lab.md) "
        "has what "
        "was tried. **Gamma 0** is plain decoding through the same cluster in the same run. Machines are "
        "virtual "
        "and shared: compare ratios, not tokens per second. Commands that are gone are in git's history, at "
        "the commit of their result or at a2b8fe9.",
        "",
        "A *loop* is a completion of which more than half of the 6-grams repeat earlier ones. Small "
        "models write "
        "loops when they decode greedily, and a loop is the easiest text to draft, so newer results "
        "record them and "
        "leave them out; results of before 2026-11-25, 21:00 contain them.",
        "",
        "![Speed over plain decoding by category](speed.svg)",
    ]
    for claim in CLAIMS:
        result = load(claim.result)
        lines += [
            "",
            f"## {claim.title}",
            "",
            claim.text,
            "",
            *claim.table(result),
            "",
            _source(claim, result),
        ]
    lines += [
        "",
        "Models ran on a GPU once, an H200, in one process and not as a cluster, by a removed engine "
        "and by the layers of `transformers`: equal tokens are in "
        "[lab.md](lab.md#the-layers-of-transformers-on-an-h200). Not measured: vLLM on GPUs, a "
        "cluster with GPUs, a real Kubernetes cluster.",
        "",
    ]
    return "\n".join(lines)


def picture() -> str:
    """Return docs/speed.svg: speed over gamma 0 by category and temperature."""
    return by_category(load(SPEED), "SmolLM2-135M: decoding speed over plain decoding, same tokens")


def _number(
    found: dict[str, dict[str, Any]], category: str, system: str, figure: str, digits: int = 2
) -> str:
    row = found.get(category, {}).get(system)
    return "" if row is None or row[figure] is None else f"{row[figure]['median']:.{digits}f}"


def _source(claim: Claim, result: Result) -> str:
    found = result["provenance"]
    hardware = found["hardware"]
    sha = (found["git"] or {}).get("sha", "")[:7]
    return (
        f"*{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:g} GiB, "
        f"{hardware['gpu'] or 'no GPU'}; {found['date_utc'][:10]}, {sha}; "
        f"[result](../benchmarks/results/{claim.result}.json):* `{_runnable(found['command'])}`"
    )


def _runnable(command: str) -> str:
    """Return a result's command for a further run: without its file, and without systems that are gone."""
    words = command.split()
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    if "--without" in words:
        at = words.index("--without") + 1
        words[at] = ",".join(name for name in words[at].split(",") if name in SYSTEMS)
    return " ".join(words)


def main() -> int:
    """Write the page and the picture, or compare them; return the exit status."""
    stale = 0
    for name, text in (("benchmarks.md", page()), ("speed.svg", picture())):
        path = HERE / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{name} is stale: run `python docs/make_benchmarks.py`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
