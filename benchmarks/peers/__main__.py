"""gammaray, transformers and llama.cpp on the same weights and the same prompts, in one run.

    python -m benchmarks.peers --target MODEL_DIR                     # without drafts
    python -m benchmarks.peers --target MODEL_DIR --draft DRAFT_DIR --streams 1,4,16
    LLAMA_SERVER=build/bin/llama-server python -m benchmarks.peers --target MODEL_DIR --gguf MODEL.gguf

Measured are gammaray's cluster, `generate` of transformers, and, if the environment variable LLAMA_SERVER
names a llama-server, llama.cpp: each plain and with its own speculation.
The prompts are the chat tasks of `benchmarks/prompts`, rendered by the model's chat template and sent as
token ids to every system. Each prompt is completed by every system, in a random order, before the next.

Exits with 1 when speculation in gammaray changed a token, or a load failed, whose points are then missing.
Differences between the programs are reported only: their arithmetic is not the same to the last bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.chart import by_category
from benchmarks.cluster import run_or_exit
from benchmarks.peers.run import Settings, compare, has_changed_tokens
from benchmarks.prompts import CATEGORIES
from benchmarks.provenance import write_result
from gammaray.demo_pair import DEMO_PAIR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default=DEMO_PAIR, help="model directory, or demo (default)")
    parser.add_argument("--draft", help="directory of a draft model, or demo")
    parser.add_argument("--head", help="directory of a head or draft model in the target worker")
    parser.add_argument("--weights", default="auto", help="of that: auto (default), int8 or int4")
    parser.add_argument("--categories", default=",".join(CATEGORIES), help="comma-separated; default: all")
    parser.add_argument("--prompts", type=int, default=3, help="prompts per category, up to 10; default 3")
    parser.add_argument("--tokens", type=int, default=96, help="tokens per completion; default 96")
    parser.add_argument("--to-end", action="store_true", help="completions end where the model ends them")
    parser.add_argument("--repetitions", type=int, default=3, help="default 3")
    parser.add_argument("--temperature", default="0,0.7,1", help="comma-separated; default 0,0.7,1")
    parser.add_argument("--streams", default="1", help="completions in flight, comma-separated; default 1")
    parser.add_argument("--threads", type=int, default=1, help="arithmetic threads per model; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the systems; default 0")
    parser.add_argument("--without", default="", help="systems to leave out, comma-separated")
    parser.add_argument("--gguf", type=Path, help="the target for llama.cpp")
    parser.add_argument("--draft-gguf", type=Path, help="the draft for llama.cpp")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    parser.epilog = "LLAMA_SERVER: path of llama-server."
    return parser


def main() -> None:
    """Measure, print the tables, write the result."""
    parser = _parser()
    options = parser.parse_args()
    if options.out is not None and options.out.exists():
        parser.error(f"--out: {options.out} exists")
    try:
        settings = Settings(
            target=options.target,
            draft=options.draft,
            categories=tuple(options.categories.split(",")),
            num_prompts=options.prompts,
            max_tokens=options.tokens,
            repetitions=options.repetitions,
            temperatures=tuple(float(text) for text in options.temperature.split(",")),
            streams=tuple(int(text) for text in options.streams.split(",")),
            threads=options.threads,
            seed=options.seed,
            without=tuple(filter(None, options.without.split(","))),
            llama_server=os.environ.get("LLAMA_SERVER"),
            gguf=options.gguf,
            draft_gguf=options.draft_gguf,
            head=options.head,
            weights=options.weights,
            ignore_eos=not options.to_end,
        )
    except ValueError as error:
        parser.error(str(error))
    result = run_or_exit(compare(settings, Console(width=140)))
    path = write_result("peers", result, options.out)
    print(f"written: {path}")
    if 1 in settings.streams:
        chart = path.with_suffix(".svg")
        chart.write_text(by_category(result, f"{Path(options.target).name}: speed over plain decoding"))
        print(f"written: {chart}")
    sys.exit(has_changed_tokens(result) or bool(result["failures"]))


if __name__ == "__main__":
    main()
