"""Chaos on clusters of its own: `python -m tests.chaos --minutes 5 --seed 0 --drafters all`, or `make chaos`.

Starts two orchestrators, two target workers, what drafts for them, and a Redis; keeps streams over gRPC and
HTTP running, kills and stops processes and has Redis refuse in an order that the seed decides, and compares
each stream with what plain decoding said while nothing was disturbed. What drafts is one of these, each with
a cluster of its own:

- model: two draft workers. Streams are drafted by the model in chains and trees, by suffix
  trees over the session and over past outputs, by predictions, and by mixtures.
- parallel: two draft workers with a parallel draft model (PARD), a part of its vocabulary and int8 weights.
- early-exit: two draft workers with the first 13 of the target's 16 layers.
- head: a head in the target workers.

Exits with 1 when a stream was lost, a token was lost, repeated or changed, or a drafter was never used.

With `--network` connections, Redis, disks, clocks and memory fail instead of processes, one after the other
(`tests.chaos.network`); there typed errors may end requests. With `--upgrade` a cluster of version 0.2.0 is
upgraded and rolled back in steps. Both exit with 1 when the tokens of a client differ from plain decoding's,
or a request does not end by its deadline.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from gammaray.bench.provenance import write_result
from tests.chaos import upgrade
from tests.chaos.network.troubles import troubles
from tests.chaos.run import Options, complaints, run
from tests.chaos.spans import Measured, figures, table
from tests.chaos.stage import KINDS, ROLES, Stage, Trouble, stage_of
from tests.chaos.strikes import strikes

NETWORK_DEADLINE_S, VLLM_DEADLINE_S = 60.0, 480.0
"""On a busy machine a worker on vLLM starts for a minute and more."""


def _given() -> argparse.Namespace:
    """Return the options, with `drafters` and `roles` as lists."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="Of each cluster. Default: 5.")
    parser.add_argument("--seed", type=int, default=0, help="Of the order of what happens. Default: 0.")
    parser.add_argument("--drafters", default="model", help=f"all, or of {', '.join(KINDS)}. Default: model.")
    parser.add_argument("--streams", type=int, default=14, help="Over gRPC at one time. Default: 14.")
    parser.add_argument("--tokens", type=int, default=200, help="Tokens of each completion. Default: 200.")
    engines = ("auto", "vllm")
    parser.add_argument("--engine", default="auto", choices=engines, help="Of the workers. Default: auto.")
    parser.add_argument("--roles", default=",".join(ROLES), help="Who is struck. Default: all.")
    parser.add_argument("--out", type=Path, help="New file for the result.")
    parser.add_argument("--network", action="store_true", help="Troubles of networks, Redis, disks, clocks.")
    parser.add_argument("--troubles", default="", help="Beginnings of names of `--network`. Default: all.")
    parser.add_argument("--upgrade", action="store_true", help="Rolling upgrades from 0.2.0 to this tree.")
    given = parser.parse_args()
    if given.out is not None and given.out.exists():
        parser.error(f"--out: {given.out} exists")
    given.drafters = list(KINDS) if given.drafters == "all" else given.drafters.split(",")
    given.roles = given.roles.split(",")
    for option, allowed in (("drafters", KINDS), ("roles", ROLES)):
        if wrong := set(getattr(given, option)) - set(allowed):
            parser.error(f"--{option}: got {', '.join(sorted(wrong))}, allowed: {', '.join(allowed)}")
    return given


def main() -> int:
    given = _given()
    if given.upgrade:
        with complaints() as stderr, upgrade.versions(upgrade.BEFORE, stderr) as cluster:
            options = Options(3600, given.seed, 10, may_fail=True)
            outcome = asyncio.run(run(cluster, options, upgrade.STEPS))
        return _report({"before": upgrade.BEFORE, **asdict(outcome)}, "chaos-upgrade", [outcome], given.out)
    options = Options(given.minutes * 60, given.seed, given.streams, max_tokens=given.tokens)
    if given.network:
        options = replace(options, deadline_s=NETWORK_DEADLINE_S, may_fail=True)
    elif given.engine == "vllm":
        options = replace(options, deadline_s=VLLM_DEADLINE_S)
    outcomes = {}
    for name in given.drafters:
        print(f"drafters: {name}", flush=True)
        with (
            complaints() as stderr,
            stage_of(name, has_network_faults=given.network, engine=given.engine, stderr=stderr) as stage,
        ):
            struck = [role for role in given.roles if role != "draft" or name != "head"]
            plan: Iterable[Trouble] = strikes(given.seed, struck)
            if given.network:
                plan = _faults(stage, given.seed, tuple(filter(None, given.troubles.split(","))))
            outcomes[name] = asyncio.run(run(stage, options, plan))
    results = {name: {"options": asdict(options), **figures(outcome)} for name, outcome in outcomes.items()}
    kind = "chaos-network" if given.network else "chaos"
    return _report({"drafters": results}, kind, list(outcomes.values()), given.out)


def _faults(stage: Stage, seed: int, names: tuple[str, ...]) -> Iterator[Trouble]:
    """Yield every trouble of the stage before one comes again; once those whose names begin so, if any."""
    chosen = [one for one in troubles(stage) if not names or one.name.startswith(names)]
    rng = random.Random(seed)
    while chosen:
        yield from rng.sample(chosen, len(chosen))
        if names:
            return


def _report(result: dict[str, object], name: str, outcomes: list[Measured], out: Path | None) -> int:
    for outcome in outcomes:
        print("", table(outcome), "", sep="\n", flush=True)
    if out is not None:
        write_result(name, result, out)
    return 1 if any(outcome.violations or not outcome.finished for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
