"""Chaos on clusters of its own: `python -m tests.chaos --minutes 5 --seed 0 --drafters all`, or `make chaos`.

Starts two orchestrators, two target workers, what drafts for them, and a Redis; keeps streams running, kills
and stops processes and has Redis fail in an order that the seed decides, and compares each stream with what
plain decoding said while nothing was disturbed. What drafts is one of these, each with a cluster of its own:

- model: two draft workers. Streams are drafted by the model in chains and trees, by suffix
  trees over the session and over past outputs, by predictions, and by mixtures.
- parallel: two draft workers with a parallel draft model (PARD), a part of its vocabulary and int8 weights.
- early-exit: two draft workers with the first 13 of the target's 16 layers.
- vocabulary: two draft workers whose model has another vocabulary than the target. By the model and mixtures.

Exits with 1 when a stream was lost, a token was lost, repeated or changed, or a drafter was never used.

With `--network` connections, Redis, disks, clocks and memory fail instead of processes, one after the
other (`tests.chaos.network`). With `--upgrade` a cluster of version 0.2.0 is upgraded and rolled back in
steps. Both exit with 1 when the tokens of a client differ from plain decoding's, or a request does not end by
its deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile

from gammaray.bench.provenance import write_result
from tests.chaos import upgrade
from tests.chaos.chaos_clusters import KINDS, started
from tests.chaos.network import network_run
from tests.chaos.network.network_run import NetworkOptions, stage_of
from tests.chaos.network.spans import table as table_of
from tests.chaos.report import figures, table, tracebacks
from tests.chaos.run import Options, Outcome, run

RECOVERY_VLLM_S = 240.0
"""How long clients try to resume a stream, and the next strike waits for all streams: on a busy machine a
worker on vLLM starts for a minute and more."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="Of strikes per cluster. Default: 5.")
    parser.add_argument("--seed", type=int, default=0, help="Of the order of strikes. Default: 0.")
    parser.add_argument(
        "--drafters", default="model", help=f"all, or some of {', '.join(KINDS)}. Default: model."
    )
    parser.add_argument("--streams", type=int, default=18, help="Streams at one time. Default: 18.")
    parser.add_argument("--tokens", type=int, default=400, help="Tokens of each completion. Default: 400.")
    parser.add_argument(
        "--engine", default="auto", choices=("auto", "vllm"), help="Of the workers. Default: auto."
    )
    parser.add_argument("--roles", help="Who is struck. Default: all.")
    parser.add_argument(
        "--other-target", help="Target of `vocabulary`. Default: the demo target with fewer merges."
    )
    parser.add_argument("--out", type=Path, help="New file for the result.")
    parser.add_argument("--network", action="store_true", help="Troubles of networks, Redis, disks, clocks.")
    parser.add_argument("--troubles", default="", help="Beginnings of names of `--network`. Default: all.")
    parser.add_argument("--upgrade", action="store_true", help="Rolling upgrades from 0.2.0 to this tree.")
    given = parser.parse_args()
    if given.out is not None and given.out.exists():
        parser.error(f"--out: {given.out} exists")
    if given.network:
        return _run_network(given)
    if given.upgrade:
        return _run_upgrade(given)
    names = list(KINDS) if given.drafters == "all" else given.drafters.split(",")
    if unknown := set(names) - set(KINDS):
        parser.error(f"--drafters: got {', '.join(sorted(unknown))}, allowed: all, {', '.join(KINDS)}")
    options = Options(given.minutes * 60, given.seed, given.streams, given.tokens)
    if given.engine == "vllm":
        options = replace(options, resume_s=RECOVERY_VLLM_S, move_timeout_s=RECOVERY_VLLM_S)
    by_name = {}
    for name in names:
        roles = KINDS[name].roles if given.roles is None else tuple(given.roles.split(","))
        if unknown := set(roles) - set(KINDS[name].roles):
            wrong, allowed = ", ".join(sorted(unknown)), ", ".join(KINDS[name].roles)
            parser.error(f"--roles: got {wrong}, allowed with drafters {name}: {allowed}")
        by_name[name] = replace(options, roles=roles)
    outcomes = {}
    for name, own in by_name.items():
        print(f"drafters: {name}", flush=True)
        outcomes[name] = _run(name, own, given.other_target, given.engine)
        print("", table(outcomes[name]), "", sep="\n", flush=True)
    if given.out is not None:
        results = {name: figures(outcome, by_name[name]) for name, outcome in outcomes.items()}
        write_result("chaos", {"drafters": results}, given.out)
    return 0 if all(outcome.is_clean for outcome in outcomes.values()) else 1


def _run_network(given: argparse.Namespace) -> int:
    names = tuple(filter(None, given.troubles.split(",")))
    options = NetworkOptions(given.minutes * 60, given.seed, names=names)
    with complaints() as stderr, stage_of(stderr) as (stage, cluster):
        outcome = asyncio.run(network_run.run(stage, cluster, options, lambda line: print(line, flush=True)))
    print("", table_of(outcome), "", sep="\n", flush=True)
    if given.out is not None:
        write_result("chaos-network", network_run.network_figures(outcome, options), given.out)
    return 1 if outcome.violations else 0


def _run_upgrade(given: argparse.Namespace) -> int:
    with complaints() as stderr, upgrade.versions(upgrade.BEFORE, stderr) as cluster:
        outcome = asyncio.run(upgrade.run(cluster, 10, 4, 200, lambda line: print(line, flush=True)))
    print("", table_of(outcome), "", sep="\n", flush=True)
    if given.out is not None:
        write_result("chaos-upgrade", {"before": upgrade.BEFORE, **asdict(outcome)}, given.out)
    return 1 if outcome.violations else 0


def _run(name: str, options: Options, other_target: str | None, engine: str) -> Outcome:
    with complaints() as stderr, started(name, stderr, other_target, engine) as scene:
        outcome = asyncio.run(run(scene, options, lambda line: print(line, flush=True)))
        if outcome.tally.lost:
            print(tracebacks(), file=sys.stderr)
        return outcome


@contextmanager
def complaints() -> Iterator[int]:
    """Keep the standard error of a cluster, which tells of every death; print its end if something fails."""
    with TemporaryFile("w+") as file:
        try:
            yield file.fileno()
        except BaseException:
            file.seek(0)
            print(file.read()[-4000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    sys.exit(main())
