"""gammaray's engine alone, served over stdin and stdout to `benchmarks.baselines`; one JSON per line.

The same model code, sampling and verification as in a target worker, in one process: no Ray, gRPC or Redis.
Requests in flight share the engine's steps; at most one prompt is prefilled per step.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gammaray.blocks import Verdict
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from orchestrator.cycle.session import Session
from orchestrator.drafting.matches import to_proposal
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.logits import edited_logits, processed_log_probs
from services.engine.sampling.noise import Noise
from services.verification.rules import verify

Answer = dict[str, Any]


class NoText:
    """The text of a session of which only the tokens are wanted."""

    def push(self, token_id: int) -> bool:
        """Return that no stop string ends here."""
        return False

    def take(self, *, final: bool) -> str:
        """Return no text."""
        return ""


@dataclass
class _Running:
    """A completion in progress.

    Args:
        number: Number of the request.
        session: Its state.
        depth: Tokens of each lookup; 0 for plain decoding.
        noise: Noise of the session.
        received: `time.perf_counter()` when the request arrived.
    """

    number: int
    session: Session
    depth: int
    noise: Noise
    received: float
    lookup: SuffixDrafter = field(default_factory=SuffixDrafter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    target_s: float = 0.0

    def propose(self) -> Proposal:
        """Return what a look-up in the text finds, never more than the completion still needs."""
        depth = min(self.depth, self.session.remaining - 1)
        match = self.lookup.look_up(self.session, depth)
        return Proposal() if match is None else to_proposal(match, self.session)

    def answer(self) -> Answer:
        """Return the finished completion for `Baselines.generate`."""
        return {
            "number": self.number,
            "token_ids": self.session.token_ids[len(self.session.prompt) :],
            "seconds": self.arrivals[-1][0],
            "arrivals": self.arrivals,
            "target_s": self.target_s,
        }


class EngineWorker:
    """Completes requests with one engine.

    Args:
        engine: The engine.
        eos_token_ids: Tokens that end a completion which does not ignore them.
    """

    def __init__(self, engine: Engine, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._engine, self._eos = engine, eos_token_ids
        self._running: list[_Running] = []

    @property
    def is_idle(self) -> bool:
        """Whether no completion is in progress."""
        return not self._running

    def add(self, request: dict[str, Any], received: float) -> None:
        """Begin a completion; `request` is made by `Baselines.generate` with token ids as its prompt.

        Raises:
            ValueError: An unknown system.
        """
        kind, _, depth = request["system"].partition("-lookup-")
        if kind != "engine":
            raise ValueError(f"system: got {request['system']!r}, allowed: engine, engine-lookup-N")
        params = SamplingParams(temperature=request["temperature"], seed=request["seed"])
        session = Session(
            session_id=f"session-{request['number']}",
            prompt=tuple(request["prompt"]),
            params=params,
            method=VerificationMethod.COUPLED,
            max_tokens=request["max_tokens"],
            text=NoText(),
            eos_token_ids=frozenset() if request["ignore_eos"] else self._eos,
        )
        noise = Noise(request["seed"], 0, self._engine.vocab_size, self._engine.device)
        self._running.append(_Running(request["number"], session, int(depth or 0), noise, received))

    def step(self) -> list[Answer]:
        """Run one cycle of the completions in progress; return those that have ended."""
        batch = self._batch()
        proposals = [one.propose() for one in batch]
        feeds = [self._feed(one, proposal) for one, proposal in zip(batch, proposals, strict=True)]
        began = time.perf_counter()
        logits = self._engine.step(feeds)
        verdicts = [
            self._verify(one, proposal, rows)
            for one, proposal, rows in zip(batch, proposals, logits, strict=True)
        ]
        ended = time.perf_counter()
        for one, proposal, verdict in zip(batch, proposals, verdicts, strict=True):
            if one.arrivals:
                one.target_s += ended - began
            emitted = [*(proposal.token_ids[node] for node in verdict.accepted_path), verdict.next_token_id]
            self._engine.truncate(one.session.session_id, one.session.num_committed + len(emitted) - 1)
            count = one.session.commit(emitted)
            one.arrivals.append((time.perf_counter() - one.received, count))
        done = [one for one in batch if one.session.finish_reason is not None]
        for one in done:
            self._running.remove(one)
            self._engine.release(one.session.session_id)
        return [one.answer() for one in done]

    def _batch(self) -> list[_Running]:
        """Return the completions of the next step: those with a cached prompt, and one without."""
        started = [one for one in self._running if one.arrivals]
        return started + [one for one in self._running if not one.arrivals][:1]

    def _feed(self, one: _Running, proposal: Proposal) -> SequenceInput:
        session_id, nodes = one.session.session_id, proposal.token_ids
        start = self._engine.length(session_id)
        tokens = [*one.session.token_ids[start:], *nodes]
        return SequenceInput(session_id, start, tokens, len(nodes) + 1)

    def _verify(self, one: _Running, proposal: Proposal, logits: Tensor) -> Verdict:
        params, base = one.session.params, one.session.num_committed
        rows = processed_log_probs(logits, params) if params.temperature > 0 else edited_logits(logits)
        return verify(VerificationMethod.COUPLED, rows, proposal, params, one.noise, base)


def main() -> None:
    """Answer requests until stdin closes; the first line written says that the model is loaded."""
    target, eos, threads = sys.argv[1:]
    eos_token_ids = frozenset(map(int, filter(None, eos.split(","))))
    worker = EngineWorker(load_engine(target, threads=int(threads)), eos_token_ids)
    received: queue.SimpleQueue[tuple[str, float] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            received.put((line, time.perf_counter()))
        received.put(None)

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), flush=True)
    while True:
        while worker.is_idle or not received.empty():
            item = received.get()
            if item is None:
                return
            worker.add(json.loads(item[0]), item[1])
        for answer in worker.step():
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
