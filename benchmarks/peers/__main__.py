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
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray.demo_pair import DEMO_PAIR


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--target", default=DEMO_PAIR, help="model directory, or demo (default)")
    add("--draft", help="directory of a draft model, or demo")
    add("--head", help="directory of a head or draft model in the target worker")
    add(
        "--in-target",
        type=_list,
        default="",
        help="directories of heads or draft models, comma-separated, each in the target worker of a cluster "
        "of its own: drafting in turn",
    )
    add("--weights", default="auto", help="of all of these: auto (default) or int8")
    add("--dtype", default="auto", help="of gammaray's arithmetic; default auto")
    add("--categories", type=_list, default=CATEGORIES, help="comma-separated; default: all")
    add("--prompts", dest="num_prompts", type=int, default=3, help="per category, up to 10; default 3")
    add("--tokens", dest="max_tokens", type=int, default=96, help="tokens per completion; default 96")
    add("--to-end", dest="ignore_eos", action="store_false", help="completions end where the model ends them")
    add("--repetitions", type=int, default=3, help="default 3")
    add("--temperature", dest="temperatures", type=_floats, default="0,0.7,1", help="default 0,0.7,1")
    add("--streams", type=_integers, default="1", help="completions in flight, comma-separated; default 1")
    add("--gammas", type=_integers, default=(), help="fixed gammas of gammaray besides, comma-separated")
    add("--threads", type=int, default=1, help="arithmetic threads per model; default 1")
    add("--seed", type=int, default=0, help="of the order of the systems; default 0")
    add(
        "--without",
        type=_list,
        default="",
        help="systems to leave out, comma-separated; an unknown name lists all",
    )
    add("--gguf", type=Path, help="the target for llama.cpp")
    add("--draft-gguf", type=Path, help="the draft for llama.cpp")
    parser.epilog = "LLAMA_SERVER: path of llama-server."
    return parser


def _list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    """Measure, print the tables, write the result."""
    parser = _parser()
    options = parser.parse_args()
    if options.out is not None and options.out.exists():
        parser.error(f"--out: {options.out} exists")
    try:
        settings = Settings(**settings_of(options), llama_server=os.environ.get("LLAMA_SERVER"))
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
