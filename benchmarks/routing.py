"""What the choice of a target worker by cached prefixes saves: prefilled tokens, time to the first token.

    python -m benchmarks.routing

Two target workers run as processes; this process has the orchestrator's own pools and verifiers.

- `new`: sessions whose prompts begin with one of eight documents, four at a time in random order. `cached`:
  each goes to the worker that has processed most of its prompt; `fewest`: to that with the fewest sessions.
- `takeover`: sessions continue with another owner, whose pools know nothing about cached prefixes, two at a
  time. `handover`: with the worker that the handover names; `fewest`: with that with the fewest sessions.

Every round of a variant has a cache salt of its own, so that it finds no caches of other rounds. The variants
take turns, and must emit the same tokens.
"""

from __future__ import annotations

# First of all: the orchestrator's package sets what gRPC reads when it is imported.
from gammaray.demo_pair import resolve_model
from orchestrator.text.tokenizer import Tokenizer

# isort: split
import argparse
import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.cluster import run_or_exit
from benchmarks.provenance import write_result
from benchmarks.timed_stack import worker_process
from gammaray.bench.tables import plain_table
from gammaray.bench.workloads import documents
from gammaray.errors import InternalError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from orchestrator.cycle.session import Session
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import RemoteVerifier

_START_TIMEOUT_S = 90.0
NEW_IN_FLIGHT, TAKEOVERS_IN_FLIGHT = 4, 2


@dataclass(frozen=True)
class Settings:
    """What is run.

    Args:
        documents: Documents that the prompts of new sessions begin with.
        per_document: New sessions of each document.
        shared_tokens: Tokens of a document in a prompt.
        own_tokens: Tokens of a prompt after the document.
        takeovers: Sessions that get another owner.
        emitted_tokens: Tokens that each session emits.
        rounds: Rounds of each variant.
        cache_mb: Cache budget of each worker.
    """

    documents: int
    per_document: int
    shared_tokens: int
    own_tokens: int
    takeovers: int
    emitted_tokens: int
    rounds: int
    cache_mb: int


@dataclass
class Sums:
    """What the sessions of one round needed."""

    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    first_token_ms: list[float] = field(default_factory=list)


class _Text:
    """Leaves the text out."""

    def push(self, token_id: int) -> bool:
        return False

    def take(self, *, final: bool) -> str:
        return ""


class _NoRegistry:
    """Announces no worker; the addresses are given."""

    async def addresses(self, role: str) -> set[str]:
        return set()


class _Verifier(RemoteVerifier):
    """Counts the tokens that were cached at the first verification; may ignore prefixes in its choice."""

    is_routed = True
    num_cached = -1

    def _keys(self, session: Session) -> list[int]:
        return super()._keys(session) if self.is_routed else []

    async def _ask(self, session: Session, link: WorkerConnection[Any, Any], timeout_s: float) -> Any:
        result = await super()._ask(session, link, timeout_s)
        if self.num_cached < 0:
            self.num_cached = result.timing.cached_tokens
        return result


async def run_session(
    fleet: Fleet, session: Session, num_tokens: int, sums: Sums, *, is_routed: bool = True, prefer: str = ""
) -> str:
    """Emit `num_tokens` tokens without a drafter, add to the sums, and return the worker's address."""
    spec = session_spec(session, frozenset(), shares_caches=True)
    verifier = _Verifier(fleet.targets, spec, timeout_s=60.0, wait_s=10.0)
    verifier.is_routed = is_routed
    began = time.perf_counter()
    if prefer:
        verifier.prefer(session, prefer)
    num_given = session.num_committed
    for number in range(num_tokens):
        verdict = await verifier.verify(session, Proposal())
        if number == 0:
            sums.first_token_ms.append((time.perf_counter() - began) * 1e3)
        session.commit([verdict.next_token_id])
    sums.prompt_tokens += num_given
    sums.prefilled_tokens += num_given - verifier.num_cached
    address = verifier.address
    verifier.release(session)
    return address


def new_session(name: str, prompt: Sequence[int], salt: str) -> Session:
    """Return a greedy session."""
    return Session(
        session_id=name,
        prompt=tuple(prompt),
        params=SamplingParams(temperature=0.0, seed=1),
        method=VerificationMethod.COUPLED,
        max_tokens=1024,
        text=_Text(),
        cache_salt=salt,
    )


@asynccontextmanager
async def connected_fleet(addresses: str, vocab_size: int) -> Any:
    """Connect to the target workers for the length of a block, as one more orchestrator would."""
    fleet = Fleet(_NoRegistry(), vocab_size, target_addresses=addresses)
    await fleet.start(_START_TIMEOUT_S)
    try:
        yield fleet
    finally:
        await fleet.close()


async def _in_turn(work: Sequence[Any], num_in_flight: int) -> list[Any]:
    """Run coroutines, at most `num_in_flight` at a time, and return their results."""
    free = asyncio.Semaphore(num_in_flight)

    async def run(one: Any) -> Any:
        async with free:
            return await one

    return await asyncio.gather(*(run(one) for one in work))


async def new_sessions(
    settings: Settings, addresses: str, tokens: Sequence[int], vocab_size: int, seed: int, *, is_routed: bool
) -> tuple[Sums, dict[str, list[int]]]:
    """Run one round of new sessions; returns the sums, and each session's tokens by its name."""
    salt, sums = secrets.token_hex(8), Sums()
    sessions = []
    own_start = settings.documents * settings.shared_tokens
    for number in range(settings.documents * settings.per_document):
        start = number % settings.documents * settings.shared_tokens
        own = own_start + number * settings.own_tokens
        prompt = [
            *tokens[start : start + settings.shared_tokens],
            *tokens[own : own + settings.own_tokens],
        ]
        sessions.append(new_session(f"{salt}-{number}", prompt, salt))
    random.Random(seed).shuffle(sessions)
    async with connected_fleet(addresses, vocab_size) as fleet:
        work = [
            run_session(fleet, session, settings.emitted_tokens, sums, is_routed=is_routed)
            for session in sessions
        ]
        await _in_turn(work, NEW_IN_FLIGHT)
    return sums, {session.session_id.partition("-")[2]: session.token_ids for session in sessions}


async def takeovers(
    settings: Settings, addresses: str, tokens: Sequence[int], vocab_size: int, seed: int, *, is_routed: bool
) -> tuple[Sums, dict[str, list[int]]]:
    """Run one round of sessions that get another owner; as `new_sessions`, of the second owner."""
    salt, length = secrets.token_hex(8), settings.shared_tokens + settings.own_tokens
    sessions = [
        new_session(f"{salt}-{number}", tokens[number * length : (number + 1) * length], salt)
        for number in range(settings.takeovers)
    ]
    async with connected_fleet(addresses, vocab_size) as fleet:
        work = [run_session(fleet, session, settings.emitted_tokens, Sums()) for session in sessions]
        used = await _in_turn(work, TAKEOVERS_IN_FLIGHT)
    order = list(zip(sessions, used, strict=True))
    random.Random(seed).shuffle(order)
    sums = Sums()
    async with connected_fleet(addresses, vocab_size) as fleet:
        work = []
        for session, address in order:
            session.epoch += 1
            prefer = address if is_routed else ""
            work.append(run_session(fleet, session, settings.emitted_tokens, sums, prefer=prefer))
        await _in_turn(work, TAKEOVERS_IN_FLIGHT)
    return sums, {session.session_id.partition("-")[2]: session.token_ids for session in sessions}


EXPERIMENTS = {"new": (new_sessions, "cached"), "takeover": (takeovers, "handover")}
OTHER = "fewest"


async def measure(settings: Settings) -> dict[str, Any]:
    """Run all rounds and return the result, JSON-ready.

    Raises:
        InternalError: The tokens of a session depend on the choice of its worker.
    """
    tokenizer = Tokenizer(resolve_model("demo"))
    text = "\n".join(document.text for document in documents() if document.is_held_out)
    tokens = tokenizer.encode(text)
    points = []
    with _two_targets(settings.cache_mb) as addresses:
        for name, (run, routed) in EXPERIMENTS.items():
            found: dict[str, list[Sums]] = {routed: [], OTHER: []}
            for number in range(-1, settings.rounds):  # the first is a warm-up
                variants = [routed, OTHER] if number % 2 else [OTHER, routed]
                outputs = []
                for variant in variants:
                    sums, emitted = await run(
                        settings, addresses, tokens, tokenizer.vocab_size, number, is_routed=variant == routed
                    )
                    outputs.append(emitted)
                    if number >= 0:
                        found[variant].append(sums)
                if outputs[0] != outputs[1]:
                    raise InternalError("the tokens of a session depend on the choice of its worker")
            points.append(_point(name, routed, found))
    return {"settings": vars(settings), "points": points}


@contextmanager
def _two_targets(cache_mb: int) -> Iterator[str]:
    options = ("--cache-budget-mb", str(cache_mb))
    with worker_process("target", *options) as (one, _), worker_process("target", *options) as (other, _):
        yield f"{one},{other}"


def _point(name: str, routed: str, found: dict[str, list[Sums]]) -> dict[str, Any]:
    rows = {
        variant: {
            "prompt_tokens": sum(sums.prompt_tokens for sums in rounds),
            "prefilled_tokens": sum(sums.prefilled_tokens for sums in rounds),
            "first_token_ms": {
                "median": statistics.median(ms for sums in rounds for ms in sums.first_token_ms),
                "mean": statistics.mean(ms for sums in rounds for ms in sums.first_token_ms),
            },
        }
        for variant, rounds in found.items()
    }
    ratios = [
        statistics.mean(own.first_token_ms) / statistics.mean(other.first_token_ms)
        for own, other in zip(found[routed], found[OTHER], strict=True)
    ]
    return {
        "experiment": name,
        "variants": rows,
        "prefilled_ratio": rows[routed]["prefilled_tokens"] / rows[OTHER]["prefilled_tokens"],
        "mean_first_token_ratio": {"median": statistics.median(ratios), "values": ratios},
    }


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        documents=8,
        per_document=options.per_document,
        shared_tokens=768,
        own_tokens=32,
        takeovers=12,
        emitted_tokens=16,
        rounds=options.rounds,
        cache_mb=options.cache_mb,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each variant")
    parser.add_argument("--per-document", type=int, default=6, help="new sessions per document")
    parser.add_argument("--cache-mb", type=int, default=1024, help="cache budget of each worker")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    result = run_or_exit(measure(_settings(options)))
    table = plain_table(
        "Two target workers: tokens to prefill, and time to the first token",
        ("sessions", "worker chosen by", "prefilled", "share", "median (ms)", "mean (ms)", "ratio of means"),
    )
    for point in result["points"]:
        for variant, row in point["variants"].items():
            times = row["first_token_ms"]
            ratio = "" if variant == OTHER else f"{point['mean_first_token_ratio']['median']:.2f}"
            table.add_row(
                point["experiment"],
                variant,
                str(row["prefilled_tokens"]),
                f"{row['prefilled_tokens'] / row['prompt_tokens']:.0%}",
                f"{times['median']:.1f}",
                f"{times['mean']:.1f}",
                ratio,
            )
    Console().print(table)
    print(f"written to {write_result('routing', result, options.out)}")


if __name__ == "__main__":
    main()
